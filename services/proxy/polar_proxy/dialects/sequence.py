"""Puts answer events into strictly successive items, for protocols in which an item must end before the next begins.

Events of a second tool call, or text, that arrive while a tool call is open wait until it is closed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from polar_render.base import AnswerEvent, TextDelta, ThinkingDelta, ToolCallDelta, ToolCallDone, ToolCallStarted

__all__ = ["Closed", "Kind", "Opened", "Piece", "Sequence", "Step"]

Kind = Literal["text", "thinking", "tool"]


@dataclass(frozen=True, slots=True)
class Opened:
    """An item begins; `call` belongs to tools."""

    kind: Kind
    call: ToolCallStarted | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """More of the open item: text, or argument bytes."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The open item ends. `cut`: the answer ended within it."""

    kind: Kind
    cut: bool = False


Step = Opened | Piece | Closed


class Sequence:
    """Feeds on events and yields steps; never more than one item is open."""

    __slots__ = ("_open", "_tool", "_waiting")

    def __init__(self) -> None:
        self._open: Kind | None = None
        self._tool = -1
        self._waiting: list[AnswerEvent] = []

    def feed(self, event: AnswerEvent) -> Iterator[Step]:
        if self._open == "tool":
            if not isinstance(event, ToolCallDelta | ToolCallDone) or event.index != self._tool:
                self._waiting.append(event)
            elif isinstance(event, ToolCallDelta):
                yield Piece("tool", event.arguments)
            else:
                yield from self._close_tool(cut=False)
        elif isinstance(event, TextDelta):
            yield from self._more("text", event.text)
        elif isinstance(event, ThinkingDelta):
            yield from self._more("thinking", event.text)
        elif isinstance(event, ToolCallStarted):
            yield from self._close(cut=False)
            self._open, self._tool = "tool", event.index
            yield Opened("tool", event)

    def finish(self) -> Iterator[Step]:
        """Closes what the answer left open."""
        while self._open == "tool":
            yield from self._close_tool(cut=True)
        yield from self._close(cut=True)

    def _more(self, kind: Kind, text: str) -> Iterator[Step]:
        if not text:
            return
        if self._open != kind:
            yield from self._close(cut=False)
            self._open = kind
            yield Opened(kind)
        yield Piece(kind, text)

    def _close(self, cut: bool) -> Iterator[Step]:
        if self._open is not None:
            kind, self._open = self._open, None
            yield Closed(kind, cut)

    def _close_tool(self, cut: bool) -> Iterator[Step]:
        yield from self._close(cut)
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            yield from self.feed(event)
