"""Sampled ids in, answer events out, for models that write tool calls between `<tool_call>` tags.

What stands between the tags is JSON (`hermes`) or XML-like parameters (`qwen3_coder`).

The parser works on ids so that it knows where in the sample a call ended, and on text so that any way of spelling a
tag in ids is the same tag. Line breaks that belong to the format (around thinking, before and after calls) are not
part of the answer; everything else is kept, broken calls included. Its counterpart is the chat template: rendering a
parsed answer gives the sampled text back when the sample is written the template's way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Literal

from .base import (
    Answer,
    AnswerEvent,
    Finished,
    Head,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStarted,
)
from .callscan import CallScanner
from .loose import exactly
from .messages import Part, Text, Thinking, ToolCall, ToolSpec
from .shape import tool_names
from .vocabulary import TextDecoder, Vocabulary
from .xmlscan import XmlScanner

__all__ = ["TaggedParser", "Tags", "ToolFormat", "custom_input"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _UNTHINK = "<think>", "</think>"

Tags = Literal["none", "allowed", "open"]
"""Thinking: `none` has no tags, `allowed` may begin with one, `open`: the prompt already opened it."""


ToolFormat = Literal["hermes", "qwen3_coder"]
"""What stands between the tags."""


def _held(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of a line break and `tag`, or of `tag`."""
    at = text.rfind("<", max(0, len(text) - len(tag) + 1))
    if at >= 0 and tag.startswith(text[at:]):
        return len(text) - at + (text[at - 1 : at] == "\n")
    return int(text.endswith("\n"))


def custom_input(arguments: str) -> str | None:
    """The raw input of a freeform tool that was called as `{"input": …}`; None if it wasn't."""
    try:
        value = exactly(arguments)
    except ValueError:
        return None
    if isinstance(value, dict) and list(value) == ["input"] and isinstance(value["input"], str):
        return value["input"]
    return value if isinstance(value, str) else None


class TaggedParser:
    """See `StreamParser`. One parser reads one sample."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop_ids: Sequence[int],
        head: Head,
        thinking: Tags = "allowed",
        tool_format: ToolFormat = "hermes",
        prefill: str = "",
    ) -> None:
        self._vocabulary = vocabulary
        self._stop = frozenset(stop_ids)
        self._head = head
        self._tags: Tags = thinking
        self._format: ToolFormat = tool_format
        self._prefill = prefill
        self._tools: dict[str, ToolSpec] = tool_names(head.tools)
        self._decoder = TextDecoder(vocabulary)
        self._ids: list[int] = []
        self._marks: list[int] = []
        self._length = 0
        self._over = False
        self._buffer = ""
        self._step: Callable[[], bool] = {
            "none": self._text, "allowed": self._lead, "open": self._thinking,
        }[thinking]  # fmt: skip
        self._skip = 1 if thinking == "open" else 0
        self._blank = ""
        self._calls = 0
        self._call: CallScanner | XmlScanner | None = None
        self._announced = False
        self._events: list[AnswerEvent] = []
        self._parts: list[Part] = []
        self._kind: type[Text] | type[Thinking] | None = None
        self._pieces: list[str] = []
        self._malformed: list[str] = []
        if prefill:
            self._resume(prefill)

    def _resume(self, prefill: str) -> None:
        """Reads what the request itself wrote into this turn: it sets the state and is no part of the answer."""
        self._append(prefill)
        self._run()
        self._flush()
        self._events, self._parts, self._malformed = [], [], []
        self._calls, self._announced = 0, False

    def _scanner(self) -> CallScanner | XmlScanner:
        return CallScanner() if self._format == "hermes" else XmlScanner(self._tools)

    def _append(self, text: str) -> None:
        self._buffer += text
        self._length += len(text)

    def feed(self, ids: Sequence[int]) -> list[AnswerEvent]:
        self._events = []
        for token in ids:
            self._ids.append(token)
            if self._over:
                continue
            if token in self._stop:
                self._run()
                self._end()
                continue
            self._append(self._decoder.feed(token))
            self._marks.append(self._length)
        if not self._over:
            self._run()
        return self._events

    def finish(self) -> list[AnswerEvent]:
        self._events = []
        if not self._over:
            self._end()
        return self._events

    def answer(self) -> Answer:
        if not self._over:
            whole = TaggedParser(
                self._vocabulary, tuple(self._stop), self._head, self._tags, self._format, self._prefill
            )
            whole.feed(self._ids)
            whole.finish()
            return whole.answer()
        closed = bool(self._ids) and self._ids[-1] in self._stop
        return Answer(tuple(self._parts), closed, tuple(self._malformed))

    def _consumed(self) -> int:
        """The number of ids whose text has been consumed, the one that holds the last consumed character included."""
        return min(bisect_left(self._marks, self._length - len(self._buffer)) + 1, len(self._marks))

    # -- the machine: each step consumes from the buffer and says whether another step may follow

    def _run(self) -> None:
        while self._buffer and self._step():
            pass

    def _lead(self) -> bool:
        body = self._buffer.lstrip()
        if body.startswith(_THINK):
            self._buffer = body[len(_THINK) :]
            self._step, self._skip = self._thinking, 1
            return True
        if _THINK.startswith(body):
            return False
        self._step = self._text
        return True

    def _skip_breaks(self) -> None:
        while self._skip and self._buffer:
            if not self._buffer.startswith("\n"):
                self._skip = 0
                return
            self._buffer = self._buffer[1:]
            self._skip -= 1

    def _thinking(self) -> bool:
        if self._skip:
            self._skip_breaks()
        at = self._buffer.find(_UNTHINK)
        if at >= 0:
            self._think(self._buffer[:at].removesuffix("\n"))
            self._buffer = self._buffer[at + len(_UNTHINK) :]
            self._step, self._skip = self._text, 2
            return True
        keep = len(self._buffer) - _held(self._buffer, _UNTHINK)
        self._think(self._buffer[:keep])
        self._buffer = self._buffer[keep:]
        return False

    def _text(self) -> bool:
        if self._skip:
            self._skip_breaks()
        at = self._buffer.find(_OPEN)
        if at >= 0:
            self._say(self._buffer[:at].removesuffix("\n"))
            self._buffer = self._buffer[at + len(_OPEN) :]
            self._step, self._blank = self._in_call, ""
            self._call, self._announced = self._scanner(), False
            return True
        keep = len(self._buffer) - _held(self._buffer, _OPEN)
        self._say(self._buffer[:keep])
        self._buffer = self._buffer[keep:]
        return False

    def _in_call(self) -> bool:
        call = self._call
        assert call is not None
        at = self._buffer.find(_CLOSE)
        if at >= 0:
            call.feed(self._buffer[:at].removesuffix("\n"))
            self._buffer = self._buffer[at + len(_CLOSE) :]
            self._end_call(call, closed=True)
            return True
        keep = len(self._buffer) - _held(self._buffer, _CLOSE)
        call.feed(self._buffer[:keep])
        self._buffer = self._buffer[keep:]
        self._tell(call)
        return False

    # -- what leaves the machine

    def _flush(self) -> None:
        """Ends the stretch of text or thinking that is being told."""
        if self._kind is not None:
            self._parts.append(self._kind("".join(self._pieces)))
            self._kind, self._pieces = None, []

    def _think(self, text: str) -> None:
        if text:
            self._kind = Thinking
            self._pieces.append(text)
            self._events.append(ThinkingDelta(text))

    def _say(self, text: str) -> None:
        """Text, with blanks at the beginning of a stretch held until something visible follows."""
        if not text:
            return
        if self._kind is not Text:
            text = self._blank + text
            self._blank = text if text.isspace() else ""
            if self._blank:
                return
            self._flush()
            self._kind = Text
        self._pieces.append(text)
        self._events.append(TextDelta(text))

    def _spec(self, name: str) -> tuple[str, str, bool]:
        """Name, namespace and whether it is freeform, of the tool that a model calls so."""
        tool = self._tools.get(name)
        return (tool.name, tool.namespace, tool.custom) if tool else (name, "", False)

    def _tell(self, call: CallScanner | XmlScanner) -> None:
        """The call's name and the arguments so far. A freeform tool's input is told at the end, decoded."""
        if call.name is None:
            return
        name, namespace, custom = self._spec(call.name)
        if not self._announced:
            self._announced = True
            self._events.append(ToolCallStarted(self._calls, name, namespace, custom))
        if not custom and (fresh := call.take()):
            self._events.append(ToolCallDelta(self._calls, fresh))

    def _end_call(self, call: CallScanner | XmlScanner, *, closed: bool) -> None:
        self._step, self._skip = self._text, 1
        call.finish()
        block = _OPEN + call.raw + (_CLOSE if closed else "")
        if call.broken:
            self._malformed.append(block)
        if call.name is None:
            self._skip = 0
            self._say(block)
            return
        self._tell(call)
        name, namespace, custom = self._spec(call.name)
        arguments = call.arguments
        if custom:
            raw = custom_input(arguments)
            if raw is None and not call.broken:
                self._malformed.append(block)
            arguments = arguments if raw is None else raw
            if arguments:
                self._events.append(ToolCallDelta(self._calls, arguments))
        self._flush()
        self._parts.append(ToolCall("", name, arguments, namespace, custom))
        if closed or not call.broken:
            self._events.append(ToolCallDone(self._calls, self._consumed()))
        self._calls += 1

    def _end(self) -> None:
        self._append(self._decoder.finish())
        self._run()
        self._over = True
        rest, self._buffer = self._buffer, ""
        if self._step == self._thinking:
            self._think(rest)
        elif self._step == self._in_call and self._call is not None:
            self._call.feed(rest)
            self._end_call(self._call, closed=False)
        else:
            self._say(rest)
        self._flush()
        if self._blank and not self._calls:
            self._events.append(TextDelta(self._blank))
            self._parts.append(Text(self._blank))
        self._events.append(Finished())
