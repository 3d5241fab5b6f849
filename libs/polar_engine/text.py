"""Text of a growing answer, token by token: finds stop strings, and withholds what might become one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

__all__ = ["Piece", "TextStream"]


@dataclass(frozen=True)
class Piece:
    """New text that is safe to send, and the stop string that ended the answer, if any."""

    text: str
    stop: str | None = None


class TextStream:
    """Decodes one choice. `tokenizer` is a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], *, include_stop: bool, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=skip_special)
        self._skip_special = skip_special
        self._stop = stop
        self._include = include_stop
        # A stop string may begin in any of the last characters, so these wait for what follows.
        self._withhold = max((len(s) for s in stop), default=1) - 1
        self._ids: list[int] = []
        self._text = ""
        self._sent = 0

    def push(self, token: int, *, may_stop: bool = True) -> Piece:
        """Add a token. After a stop string was found the text ends before it (behind it with `include_stop`)."""
        self._ids.append(token)
        new = self._decoder.step(self._tokenizer, token) or ""
        searched = max(0, len(self._text) - self._withhold)
        self._text += new
        hits = [(at, s) for s in self._stop if may_stop and (at := self._text.find(s, searched)) >= 0]
        if hits:
            at, stop = min(hits)
            self._text = self._text[: at + len(stop) if self._include else at]
            return Piece(self._take(len(self._text)), stop)
        return Piece(self._take(len(self._text) - self._withhold))

    def flush(self) -> str:
        """What was withheld, and the replacement characters of bytes that never became a whole character."""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special)
        if whole.startswith(self._text):
            self._text = whole
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        start, self._sent = self._sent, max(self._sent, end)
        return self._text[start : self._sent]
