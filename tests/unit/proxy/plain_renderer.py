"""A renderer for unit tests: one id per character, one line per message, `|` ends a turn, `!name(args)` is a call.

Ids are code points; 1 ends a turn. It can refuse to bridge, and it drops nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from polar_render.base import (
    Answer,
    AnswerEvent,
    Finished,
    Head,
    Proof,
    Provenance,
    TextDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStarted,
)
from polar_render.messages import Message, Part, Text, Thinking, ToolCall

END = 1
_CALL = re.compile(r"!(\w+)\(([^)]*)\)")


def ids(text: str) -> list[int]:
    return [END if c == "|" else ord(c) for c in text]


def shown(message: Message) -> str:
    parts = []
    for part in message.parts:
        if isinstance(part, Text):
            parts.append(part.text)
        elif isinstance(part, Thinking):
            parts.append(f"<{part.text}>")
        elif isinstance(part, ToolCall):
            parts.append(f"!{part.name}({part.arguments})")
    return "".join(parts)


class PlainParser:
    """Reads text and calls; `<…>` at the beginning is thinking."""

    def __init__(self) -> None:
        self._ids: list[int] = []

    def feed(self, more: Sequence[int]) -> list[AnswerEvent]:
        before = self._read()[1]
        self._ids += more
        events = self._read()[1]
        return events[len(before) :]

    def finish(self) -> list[AnswerEvent]:
        return [Finished()]

    def answer(self) -> Answer:
        return Answer(self._read()[0], bool(self._ids) and self._ids[-1] == END)

    def _read(self) -> tuple[tuple[Part, ...], list[AnswerEvent]]:
        text = "".join(chr(i) for i in self._ids if i != END)
        parts: list[Part] = []
        events: list[AnswerEvent] = []
        at = 0
        if (thought := re.match(r"<([^>]*)>", text)) is not None:
            parts.append(Thinking(thought[1]))
            at = thought.end()
        count = 0
        for found in _CALL.finditer(text, at):
            if found.start() > at:
                parts.append(Text(text[at : found.start()]))
            parts.append(ToolCall("", found[1], found[2]))
            events += [
                ToolCallStarted(count, found[1]), ToolCallDelta(count, found[2]), ToolCallDone(count, found.end()),
            ]  # fmt: skip
            at, count = found.end(), count + 1
        if text[at:]:
            parts.append(Text(text[at:]))
            events.append(TextDelta(text[at:]))
        return tuple(parts), events


class PlainRenderer:
    """See the module. `bridges`: whether continued calls can be built."""

    provenance = Provenance("plain", "0" * 64, "1" * 64, "plain", "1")
    stop_ids = (END,)

    def __init__(self, *, bridges: bool = True, closes: bool = True) -> None:
        self.bridges = bridges
        self.close_ids: tuple[int, ...] = (END,) if closes else ()

    def render(self, messages: Sequence[Message], head: Head, *, prefill: bool = False) -> list[int]:
        before = messages[:-1] if prefill else messages
        text = "".join(f"[{t.name}]" for t in head.tools) + "".join(f"{m.role[0]}:{shown(m)}|" for m in before) + "a:"
        return ids(text + (shown(messages[-1]) if prefill else ""))

    def tail(
        self, history: Sequence[Message], answer: Message, new: Sequence[Message], head: Head, *, prefill: bool = False
    ) -> list[int] | None:
        return self.render(new, Head(), prefill=prefill) if self.bridges else None

    def parse(self, sampled: Sequence[int], head: Head, *, prefill: str = "") -> Answer:
        parser = PlainParser()
        parser.feed(sampled)
        return parser.answer()

    def parser(self, head: Head, *, prefill: str = "") -> PlainParser:
        return PlainParser()

    def decode(self, sampled: Sequence[int]) -> str:
        return "".join("|" if i == END else chr(i) for i in sampled)

    def decode_tokens(self, sampled: Sequence[int]) -> list[str]:
        return [self.decode((i,)) for i in sampled]

    def control_tokens(self, text: str) -> list[str]:
        return []

    def prove(self) -> Proof:
        return Proof((), self.bridges, "short")
