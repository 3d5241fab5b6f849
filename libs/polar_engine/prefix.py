"""Which keys and values of earlier requests a new prompt can continue from.

Agent sessions send, call after call, the earlier prompt plus the earlier answer plus a little more, and n samples of a
task share a prompt. So the cache remembers, per buffer, the token sequence it holds; a new prompt takes the buffer with
the longest common prefix. Where the buffer ends just there and nobody appends to it, it is taken over in place;
otherwise the shared part is copied. Entries are evicted least recently used, by bytes. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Buffer", "PrefixCache", "Tokens", "common_prefix"]

Tokens = npt.NDArray[np.int32]


class Buffer(Protocol):
    """What the cache needs of a `kv.KvBuffer`."""

    length: int
    claimed: bool

    def parts(self) -> dict[int, int]:
        """Bytes held, by owner: what two buffers share has one owner."""

    def fork(self, length: int, capacity: int) -> Self:
        """A copy of the first `length` positions."""


B = TypeVar("B", bound=Buffer)


@dataclass
class _Entry(Generic[B]):
    tokens: Tokens
    salt: str
    buffer: B


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens two sequences share."""
    count = min(len(a), len(b))
    if count == 0 or a[0] != b[0]:
        return 0
    differ = a[:count] != b[:count]
    first = int(differ.argmax())
    return first if differ[first] else count


class PrefixCache(Generic[B]):
    """`limit` bytes of buffers, at most `entries` of them, all of one set of weights."""

    def __init__(self, limit: int, entries: int = 512) -> None:
        self.limit = limit
        self.entries = entries
        self.used = 0
        # Grows with every change, so that callers may keep a match until then.
        self.generation = 0
        self._held: OrderedDict[int, _Entry[B]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def match(self, prompt: Tokens, salt: str) -> int:
        """The longest prefix of `prompt` that some buffer holds."""
        return self._best(prompt, salt)[1]

    def acquire(self, prompt: Tokens, salt: str, new: Callable[[int], B], capacity: int) -> B:
        """A claimed buffer of `capacity` whose `length` is the reused part; at least one token is left to compute."""
        entry, shared = self._best(prompt, salt)
        shared = min(shared, len(prompt) - 1)
        if entry is None or shared <= 0:
            buffer = new(capacity)
        else:
            self._held.move_to_end(id(entry.buffer))
            in_place = not entry.buffer.claimed and entry.buffer.length == shared
            buffer = entry.buffer if in_place else entry.buffer.fork(shared, capacity)
        buffer.claimed = True
        return buffer

    def _best(self, prompt: Tokens, salt: str) -> tuple[_Entry[B] | None, int]:
        found: _Entry[B] | None = None
        longest, continues = 0, False
        for entry in self._held.values():
            if entry.salt != salt:
                continue
            shared = common_prefix(entry.tokens, prompt)
            free = not entry.buffer.claimed and entry.buffer.length == min(shared, len(prompt) - 1)
            if shared > longest or (shared == longest > 0 and free and not continues):
                found, longest, continues = entry, shared, free
        return found, longest

    def insert(self, tokens: Tokens, salt: str, buffer: B) -> None:
        """Remember that `buffer` starts with `tokens`. What another buffer covers entirely isn't held twice."""
        self._drop(id(buffer))
        if len(tokens) == 0:
            return
        for key, entry in list(self._held.items()):
            if entry.salt != salt:
                continue
            shared = common_prefix(entry.tokens, tokens)
            if shared == len(tokens):
                return
            if shared == len(entry.tokens):
                self._drop(key)
        self._held[id(buffer)] = _Entry(tokens, salt, buffer)
        self.generation += 1
        self.used = self._measure()
        self.shrink(self.limit)

    def _measure(self) -> int:
        owned: dict[int, int] = {}
        for entry in self._held.values():
            owned.update(entry.buffer.parts())
        return sum(owned.values())

    def shrink(self, limit: int) -> None:
        """Evict until at most `limit` bytes are held. Buffers in use live on in their requests."""
        while self._held and (self.used > limit or len(self._held) > self.entries):
            self._drop(next(iter(self._held)))

    def clear(self) -> None:
        """Forget everything: the weights changed."""
        self._held.clear()
        self.used = 0
        self.generation += 1

    def _drop(self, key: int) -> None:
        if self._held.pop(key, None) is not None:
            self.generation += 1
            self.used = self._measure()
