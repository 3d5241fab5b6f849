"""One sample as it comes in: ids and log-probs add up, the parser reads along, stop strings are cut from the answer.

Pure: engine chunks in, answer events out; at the end the whole answer. Stop strings are matched on visible text,
thinking and arguments alike, and held back while they may still be completed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from polar_common.errors import EngineDown
from polar_common.events import VersionSpan
from polar_proxy.dialects.base import Finish, events_of
from polar_proxy.engines.base import Chunk, EngineFinish
from polar_render.base import AnswerEvent, StreamParser, TextDelta, ThinkingDelta, ToolCallDelta
from polar_render.demand import demanded_calls
from polar_render.messages import Part, Text, Thinking, ToolCall, ToolSpec

__all__ = ["Sample", "Sampling", "cut_stop", "finish_of"]

_Delta = TextDelta | ThinkingDelta | ToolCallDelta


def cut_stop(parts: Sequence[Part], stops: Sequence[str]) -> tuple[tuple[Part, ...], str | None]:
    """The parts before the first stop string, and which it was (None: it isn't there)."""
    kept: list[Part] = []
    for part in parts:
        text = _text(part)
        found = min(((at, s) for s in stops if (at := text.find(s)) >= 0), default=None)
        if found is None:
            kept.append(part)
            continue
        at, stop = found
        if at:
            kept.append(_with(part, text[:at]))
        return tuple(kept), stop
    return tuple(kept), None


def _text(part: Part) -> str:
    if isinstance(part, Text | Thinking):
        return part.text
    return part.arguments if isinstance(part, ToolCall) else ""


def _with(part: Part, text: str) -> Part:
    if isinstance(part, ToolCall):
        return replace(part, arguments=text)
    return replace(part, text=text) if isinstance(part, Text | Thinking) else part


def finish_of(finish: EngineFinish, stopped: bool, parts: Sequence[Part]) -> Finish:
    """How the answer ended, as harnesses are told."""
    if finish == "length":
        return "length"
    if stopped:
        return "stop_string"
    return "tool_calls" if any(isinstance(p, ToolCall) for p in parts) else "stop"


class _Holder:
    """Holds back the end of each stretch of text that may be the beginning of a stop string, and all behind one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=1) - 1
        self._held: _Delta | None = None
        self._behind: list[AnswerEvent] | None = None

    def feed(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        out: list[AnswerEvent] = []
        for event in events:
            if self._behind is not None:
                self._behind.append(event)
            elif isinstance(event, TextDelta | ThinkingDelta | ToolCallDelta):
                out += self._said(event)
            else:
                out += self._release()
                out.append(event)
        return out

    def _said(self, event: _Delta) -> list[AnswerEvent]:
        out: list[AnswerEvent] = []
        if self._held is not None and not _same_stretch(self._held, event):
            out += self._release()
        whole = _said(self._held) + _said(event)
        at = min((p for s in self._stops if (p := whole.find(s)) >= 0), default=-1)
        cut = at if at >= 0 else max(0, len(whole) - self._longest)
        self._held = _saying(event, whole[cut:])
        if at >= 0:
            self._behind = self._release()
        if cut:
            out.append(_saying(event, whole[:cut]))
        return out

    def _release(self) -> list[AnswerEvent]:
        held, self._held = self._held, None
        return [held] if held is not None and _said(held) else []

    def finish(self, *, stopped: bool) -> list[AnswerEvent]:
        """What is still owed: nothing behind a stop string, unless the engine didn't stop there."""
        if self._behind is None:
            return self._release()
        return [] if stopped else self._behind


def _same_stretch(left: _Delta, right: _Delta) -> bool:
    return type(left) is type(right) and getattr(left, "index", 0) == getattr(right, "index", 0)


def _said(event: _Delta | None) -> str:
    if event is None:
        return ""
    return event.arguments if isinstance(event, ToolCallDelta) else event.text


def _saying(event: _Delta, text: str) -> _Delta:
    return ToolCallDelta(event.index, text) if isinstance(event, ToolCallDelta) else type(event)(text)


@dataclass(slots=True)
class Sample:
    """A complete sample. `parts` end before the stop string; `closed`: the ids end with an end-of-turn id."""

    ids: list[int]
    logprobs: list[float | None] | None
    parts: tuple[Part, ...]
    finish: Finish
    closed: bool
    stop_sequence: str | None
    versions: tuple[VersionSpan, ...]
    cached_tokens: int
    prompt_ids: list[int] | None
    prompt_tokens: int
    kv_mixed: bool
    completion_tokens: int


class Sampling:
    """Collects one sample. `feed` returns the events that may be told now.

    `demanded`: tools of which the engine was made to call some; such an answer is read, and told, as a whole.
    """

    def __init__(self, parser: StreamParser, stops: Sequence[str], demanded: tuple[ToolSpec, ...] = ()) -> None:
        self._demanded = demanded
        self._parser = parser
        self._stops = stops
        self._holder = _Holder(stops) if stops else None
        self._last = Chunk()
        self.ids: list[int] = []
        self.logprobs: list[float | None] | None = None
        self._prompt_ids: list[int] | None = None

    def take(self, chunk: Chunk) -> None:
        """Add a chunk without reading it: for answers that nobody watches."""
        if chunk.ids:
            self.ids += chunk.ids
        if chunk.logprobs is not None:
            self.logprobs = chunk.logprobs if self.logprobs is None else self.logprobs + chunk.logprobs
        last = self._last
        if chunk.finish is not None:
            last.finish, last.stop_reason = chunk.finish, chunk.stop_reason
            last.versions, last.kv_mixed = chunk.versions, chunk.kv_mixed
        last.cached_tokens = chunk.cached_tokens or last.cached_tokens
        last.prompt_tokens = chunk.prompt_tokens or last.prompt_tokens
        last.completion_tokens = chunk.completion_tokens or last.completion_tokens
        last.parts = chunk.parts or last.parts
        if chunk.prompt_ids is not None:
            last.prompt_ids = chunk.prompt_ids

    def feed(self, chunk: Chunk) -> list[AnswerEvent]:
        self.take(chunk)
        if not chunk.ids:
            return []
        events = self._parser.feed(chunk.ids)
        if self._demanded:
            return []
        return events if self._holder is None else self._holder.feed(events)

    def finish(self, *, fed: bool) -> tuple[Sample, list[AnswerEvent]]:
        """The whole sample and the last events. `fed`: the chunks went through `feed`."""
        last = self._last
        if last.finish is None:
            raise EngineDown("the engine's answer has no finish reason")
        if not fed:
            self._parser.feed(self.ids)
        events = self._parser.finish()
        answer = self._parser.answer()
        parts, stop = answer.parts, None
        if last.parts is not None and not self.ids:
            parts = last.parts
            events = events_of(parts)
        if self._stops and last.finish == "stop" and isinstance(last.stop_reason, str):
            parts, stop = cut_stop(parts, self._stops)
            # The engine may have seen it across a border that the parser took out.
            stop = stop or last.stop_reason
        if self._demanded:
            parts = demanded_calls(parts, self._demanded)
            events = events_of(parts)
        elif self._holder is not None:
            events = self._holder.feed(events)
            events += self._holder.finish(stopped=stop is not None)
        sample = Sample(
            ids=self.ids, logprobs=self.logprobs, parts=parts, finish=finish_of(last.finish, stop is not None, parts),
            closed=answer.closed, stop_sequence=stop, versions=last.versions, cached_tokens=last.cached_tokens,
            prompt_ids=last.prompt_ids, prompt_tokens=last.prompt_tokens, kv_mixed=last.kv_mixed,
            completion_tokens=last.completion_tokens or len(self.ids),
        )  # fmt: skip
        return sample, events
