"""A recorded call as a plain engine would see it: its messages, past answers included, rendered in full. Pure.

What differs from the recorded prompt is named by what stands at the first differing id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polar_common.errors import RenderError, TraceError
from polar_render.base import Renderer
from polar_render.canonical import with_prefill
from polar_render.demand import demanded_calls
from polar_render.messages import Message, Part, Text, Thinking, ToolCall
from polar_render.records import Echo, Ids, ResolvedCompletion, common_prefix

__all__ = ["Difference", "compare", "messages_of", "native_prompt"]

_WINDOW = 48
"""Ids on both sides that are looked at to name a difference."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How two prompts differ.

    `kind`: `retokenised` (the same text in other ids), `thinking` (shown in one, not in the other), `close` (what ends
    a turn that was cut), `stripped_header` (a line that Polar keeps from the model), `refused` (the format can't
    express the messages), `template` (anything else that the format shows otherwise). `at`: the first differing place,
    -1 for `refused`, whose `detail` is the format's reason.
    """

    kind: str
    at: int = -1
    detail: str = ""


def compare(
    item: ResolvedCompletion, found: Mapping[str, ResolvedCompletion], renderer: Renderer
) -> tuple[Difference | None, Ids]:
    """The difference between a completion's prompt and its native rendering (None: equal), and that rendering.

    Raises TraceError or BlobError where messages or head can't be resolved.
    """
    messages = messages_of(item, found, renderer)
    try:
        native = native_prompt(item, messages, renderer)
        shown = native if not item.event.billing else native_prompt(item, _with_header(item, messages), renderer)
    except RenderError as error:
        return Difference("refused", detail=str(error)), np.zeros(0, dtype=np.int32)
    seen = item.prompt
    if not np.array_equal(native, seen):
        at = common_prefix(native, seen)
        return Difference(_kind(item, seen, native, at, renderer), at), native
    if not np.array_equal(shown, seen):
        return Difference("stripped_header", common_prefix(shown, seen)), shown
    return None, native


def native_prompt(item: ResolvedCompletion, messages: Sequence[Message], renderer: Renderer) -> Ids:
    """The full rendering as int32[n]. Raises RenderError."""
    return np.array(renderer.render(messages, item.head, prefill=_prefilled(item, messages)), dtype=np.int32)


def messages_of(item: ResolvedCompletion, found: Mapping[str, ResolvedCompletion], renderer: Renderer) -> list[Message]:
    """The harness's messages; echoes of answers become those answers, under the ids by which results refer to them."""
    said = item.messages
    out: list[Message] = []
    for place, message in enumerate(said):
        if isinstance(message, Message):
            out.append(message)
            continue
        answered = found.get(message.completion)
        if answered is None:
            raise TraceError(f"{item.completion} echoes {message.completion}, which isn't in its attempt")
        answer = _answer(answered, found, renderer)
        if _left_out(message, item, found):
            answer = replace(answer, parts=tuple(p for p in answer.parts if not isinstance(p, Thinking)))
        out.append(_named(answer, said[place + 1 :]))
    return out


def _left_out(echo: Echo, item: ResolvedCompletion, found: Mapping[str, ResolvedCompletion]) -> bool:
    """Whether the harness sent an answer back without its thinking.

    The call that first had it in its messages says so, for itself and the calls before it: a harness that leaves
    thinking out once is taken to do so from then on.
    """
    for other in (item, *found.values()):
        if echo in other.own_messages:
            return "kept_thinking" in other.event.additions
    return False


def _answer(item: ResolvedCompletion, found: Mapping[str, ResolvedCompletion], renderer: Renderer) -> Message:
    parts = renderer.parse(item.sampled.tolist(), item.head).parts
    if item.event.finish == "stop_string":
        parts = _before(parts, item.event.sampling.stop)
    if item.event.tool_choice_by == "engine":
        parts = demanded_calls(parts, item.head.tools)
    said = Message("assistant", tuple(parts))
    if item.event.prefill_tokens:
        before = messages_of(item, found, renderer)
        if before and before[-1].role == "assistant":
            return with_prefill(before[-1], said)
    return said


def _before(parts: Sequence[Part], stops: Sequence[str]) -> tuple[Part, ...]:
    """The parts up to the first stop string."""
    kept: list[Part] = []
    for part in parts:
        text = part.text if isinstance(part, Text | Thinking) else part.arguments if isinstance(part, ToolCall) else ""
        at = min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)
        if at < 0:
            kept.append(part)
            continue
        if at and isinstance(part, Text | Thinking):
            kept.append(replace(part, text=text[:at]))
        elif at and isinstance(part, ToolCall):
            kept.append(replace(part, arguments=text[:at]))
        break
    return tuple(kept)


def _named(answer: Message, rest: Sequence[Message | Echo]) -> Message:
    """The answer's calls under the ids that the results behind it name, in order."""
    names = []
    for message in rest:
        if not isinstance(message, Message) or message.role != "tool":
            break
        names.append(message.call_id)
    parts: list[Part] = []
    calls = 0
    for part in answer.parts:
        if isinstance(part, ToolCall):
            name = names[calls] if calls < len(names) and names[calls] else f"call_{calls}"
            part, calls = replace(part, id=name), calls + 1
        parts.append(part)
    return replace(answer, parts=tuple(parts))


def _prefilled(item: ResolvedCompletion, messages: Sequence[Message]) -> bool:
    return item.event.prefill_tokens > 0 and bool(messages) and messages[-1].role == "assistant"


def _with_header(item: ResolvedCompletion, messages: Sequence[Message]) -> list[Message]:
    """The lines that were taken out, back at the beginning of the first system text."""
    out = list(messages)
    lines = Text("".join(f"{line}\n" for line in item.event.billing))
    at = next((i for i, m in enumerate(out) if m.role == "system"), None)
    if at is None:
        return [Message("system", (lines,)), *out]
    first = out[at].parts[0] if out[at].parts else None
    if isinstance(first, Text):
        out[at] = replace(out[at], parts=(Text(lines.text + first.text), *out[at].parts[1:]))
    else:
        out[at] = replace(out[at], parts=(lines, *out[at].parts))
    return out


def _kind(item: ResolvedCompletion, seen: Ids, native: Ids, at: int, renderer: Renderer) -> str:
    texts = [renderer.decode_tokens(ids[at : at + _WINDOW].tolist()) for ids in (seen, native)]
    first = max(len(pieces[0]) if pieces else 0 for pieces in texts)
    joined = ["".join(pieces) for pieces in texts]
    if all(joined) and _agreeing(*joined) >= first > 0:
        return "retokenised"
    before = renderer.decode(seen[max(0, at - 8 * _WINDOW) : at].tolist())
    inside = before.rfind("<think>") > before.rfind("</think>")
    if inside or any(text.lstrip().startswith(("<think>", "</think>")) for text in joined):
        return "thinking"
    if any(name in item.event.additions for name in ("synthesised_close", "kept_stop_string")):
        return "close"
    return "template"


def _agreeing(left: str, right: str) -> int:
    """Number of equal characters at the beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
