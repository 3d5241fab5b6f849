"""Reads one JSON tool call while it is being sampled: the name as soon as it stands there, the arguments byte for byte.

`{"name": "f", "arguments": {"a":  1}}` yields the name `f` and the raw text `{"a":  1}`, blanks included; nothing is
parsed and written again. What isn't such an object is `broken`, and its text stays available as it was sampled; where
the arguments themselves were complete before, they stay as they are.
"""

from __future__ import annotations

import re
from typing import Literal

from .loose import exactly

__all__ = ["CallScanner"]

_STRING_RUN = re.compile(r'[^"\\]*')
_OUTSIDE_RUN = re.compile(r'[^"{}\[\]]*')
_SCALAR_RUN = re.compile(r"[^,}\s]*")
_BLANK_RUN = re.compile(r"[ \t\r\n]*")
_PAIRS = {"}": "{", "]": "["}

_State = Literal["open", "key", "in key", "colon", "value", "string", "nested", "scalar", "after", "end", "broken"]


class CallScanner:
    """Feed it the text between the tags. Any split of the text gives the same result."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._raw: list[str] = []
        self._arguments: list[str] = []
        self._taken = 0
        self._state: _State = "open"
        self._key = ""
        self._value = ""
        self._stack: list[str] = []
        self._quoted = False
        self._escaped = False
        self._complete: set[str] = set()

    @property
    def broken(self) -> bool:
        return self._state == "broken"

    @property
    def raw(self) -> str:
        """The whole text between the tags."""
        return "".join(self._raw)

    @property
    def arguments(self) -> str:
        """The arguments so far, as sampled."""
        return "".join(self._arguments)

    def take(self) -> str:
        """Arguments that came since the last call of this."""
        fresh = "".join(self._arguments[self._taken :])
        self._taken = len(self._arguments)
        return fresh

    def feed(self, text: str) -> None:
        self._raw.append(text)
        at = 0
        while at < len(text):
            at = self._step(text, at)

    def finish(self) -> None:
        """The text is over: broken is what has no name, isn't closed, or has more than blanks behind it."""
        if self._state != "end" or self.name is None:
            self._state = "broken"

    def _step(self, text: str, at: int) -> int:
        match self._state:
            case "broken":
                if self.name is not None and "arguments" not in self._complete:
                    self._argue(text[at:])
                return len(text)
            case "in key" | "string":
                return self._in_string(text, at)
            case "nested":
                return self._in_nested(text, at)
            case "scalar":
                end = _SCALAR_RUN.match(text, at).end()  # type: ignore[union-attr]
                self._take(text[at:end])
                if end < len(text):
                    self._end_value()
                return end
        at = _BLANK_RUN.match(text, at).end()  # type: ignore[union-attr]
        return self._structure(text, at) if at < len(text) else at

    def _structure(self, text: str, at: int) -> int:
        char = text[at]
        match self._state, char:
            case "open", "{":
                self._state = "key"
            case "key", '"':
                self._state, self._key = "in key", ""
            case "key", "}" if not self._complete:
                self._state = "end"
            case "colon", ":":
                self._state = "value"
            case "value", _:
                return self._start_value(text, at)
            case "after", ",":
                self._state = "key"
            case "after", "}":
                self._state = "end"
            case _:
                return self._break(at)
        return at + 1

    def _break(self, at: int) -> int:
        self._state = "broken"
        return at

    def _start_value(self, text: str, at: int) -> int:
        char = text[at]
        if char in "}],:":
            return self._break(at)
        self._value = ""
        if char == '"':
            self._state = "string"
            self._take(char)
            return at + 1
        if char in "{[":
            self._state = "nested"
            return at
        self._state = "scalar"
        return at

    def _in_string(self, text: str, at: int) -> int:
        """A key, or a value that is a string. Escapes are kept as they are."""
        if self._escaped:
            self._escaped = False
            self._take(text[at])
            return at + 1
        end = _STRING_RUN.match(text, at).end()  # type: ignore[union-attr]
        self._take(text[at:end])
        if end == len(text):
            return end
        if text[end] == "\\":
            self._escaped = True
            self._take("\\")
        elif self._state == "in key":
            self._state = "colon"
        else:
            self._take('"')
            self._end_value()
        return end + 1

    def _in_nested(self, text: str, at: int) -> int:
        if self._quoted:
            return self._in_nested_string(text, at)
        end = _OUTSIDE_RUN.match(text, at).end()  # type: ignore[union-attr]
        self._take(text[at:end])
        if end == len(text):
            return end
        char = text[end]
        if char == '"':
            self._quoted = True
        elif char in "{[":
            self._stack.append(char)
        elif self._stack.pop() != _PAIRS[char]:
            return self._break(end)
        self._take(char)
        if not self._stack:
            self._end_value()
        return end + 1

    def _in_nested_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            self._take(text[at])
            return at + 1
        end = _STRING_RUN.match(text, at).end()  # type: ignore[union-attr]
        if end < len(text):
            self._escaped = text[end] == "\\"
            self._quoted = self._escaped
            end += 1
        self._take(text[at:end])
        return end

    def _take(self, text: str) -> None:
        if self._state == "in key":
            self._key += text
        elif self._key in ("arguments", "parameters"):
            self._argue(text)
        else:
            self._value += text

    def _argue(self, text: str) -> None:
        if text:
            self._arguments.append(text)

    def _end_value(self) -> None:
        self._state = "after"
        role = "arguments" if self._key == "parameters" else self._key
        if role in self._complete:
            self._state = "broken"
        self._complete.add(role)
        if role == "name":
            try:
                name = exactly(self._value)
            except ValueError:
                name = None
            if isinstance(name, str) and name:
                self.name = name
            else:
                self._state = "broken"
