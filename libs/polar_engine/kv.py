"""Keys and values of one token sequence, in a growing tensor that is only ever appended to.

Because nothing that was written is changed, a prefix of a buffer stays valid whatever is appended later. So a request
that continues exactly where a buffer ends appends in place, and one that branches off earlier refers to the shared part
of its parent and keeps only its own positions: n samples of one task hold their common prompt once, and attention reads
it once for all of them. `prefix.PrefixCache` decides between the two. Needs torch.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["KvBuffer", "KvShape"]

# A shorter common part is copied: reading it apart would cost more than it saves.
_WORTH_SHARING = 128
# Below this, a buffer comes from the ordinary allocator. Above it, first-touch page faults cost more than the copy of a
# prefix does (1,600 positions of SmolLM2: 35 ms of faults, 7 ms of copying), and huge pages take them away.
_HUGE = 4 << 20


def _allocate(shape: tuple[int, ...], dtype: Any) -> Any:
    size = math.prod(shape) * int(dtype.itemsize)
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    region = mmap.mmap(-1, size)
    region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=dtype).view(shape)


@dataclass(frozen=True)
class KvShape:
    """What one position costs: `layers` x 2 x `heads` x `dim` values of `dtype`."""

    layers: int
    heads: int
    dim: int
    dtype: Any = torch.float32

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position's keys and values over all layers."""
        return int(self.layers * 2 * self.heads * self.dim * self.dtype.itemsize)


class KvBuffer:
    """Positions below `base` are those of `parent` (None: base is 0), the rest are in `data`.

    `data` is [layers, 2, heads, capacity, dim]; `length` counts all positions that are written, the parent's included.
    """

    def __init__(self, shape: KvShape, capacity: int, parent: KvBuffer | None = None, base: int = 0) -> None:
        self.shape = shape
        self.parent = parent
        self.base = base
        self.length = base
        # Set while a request appends; a second one that wants to continue from the same end must branch off.
        self.claimed = False
        self.data: Any = self._empty(capacity - base)

    def _empty(self, capacity: int) -> Any:
        s = self.shape
        return _allocate((s.layers, 2, s.heads, max(capacity, 1), s.dim), s.dtype)

    @property
    def own(self) -> int:
        """Written positions in `data`."""
        return self.length - self.base

    @property
    def capacity(self) -> int:
        """Own positions that fit without growing."""
        return int(self.data.shape[3])

    def parts(self) -> dict[int, int]:
        """Bytes held, written or not, by the identity of the buffer that owns them: this one and its parent."""
        owners = [self] if self.parent is None else [self, self.parent]
        return {id(owner): owner.capacity * self.shape.bytes_per_token for owner in owners}

    def reserve(self, length: int) -> None:
        """Make room for `length` positions in all, by half as much again where it has to grow."""
        if length - self.base <= self.capacity:
            return
        grown = self._empty(max(length - self.base, self.capacity * 3 // 2))
        grown[:, :, :, : self.own] = self.data[:, :, :, : self.own]
        self.data = grown

    def fork(self, length: int, capacity: int) -> KvBuffer:
        """A new buffer for `capacity` positions that starts with this one's first `length`."""
        root = self if self.parent is None else self.parent
        base = length if self.parent is None else min(length, self.base)
        if base < _WORTH_SHARING:
            branch = KvBuffer(self.shape, max(length, capacity))
            self._copy(branch, 0, length)
        else:
            # One level deep: what lies behind the parent's part is copied, so that attention meets two parts at most.
            branch = KvBuffer(self.shape, max(length, capacity), root, base)
            self._copy(branch, base, length)
        branch.length = length
        return branch

    def _copy(self, branch: KvBuffer, start: int, end: int) -> None:
        """Positions `start` to `end` of this sequence into `branch`, which owns them."""
        if self.parent is not None and start < self.base:
            self.parent._copy(branch, start, min(end, self.base))
            start = self.base
        if start < end:
            to = slice(start - branch.base, end - branch.base)
            branch.data[:, :, :, to] = self.data[:, :, :, start - self.base : end - self.base]
