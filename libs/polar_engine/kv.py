"""Keys and values of one token sequence, in one growing tensor that is only ever appended to.

Because nothing that was written is changed, a prefix of a buffer stays valid whatever is appended later. So a request
that continues exactly where a buffer ends appends in place, at no cost, and only a request that branches off earlier
copies the part it shares. `prefix.PrefixCache` decides between the two. Needs torch.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["KvBuffer", "KvShape"]

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
    """`data` is [layers, 2, heads, capacity, dim]; positions below `length` are written."""

    def __init__(self, shape: KvShape, capacity: int) -> None:
        self.shape = shape
        self.length = 0
        # Set while a request appends; a second one that wants to continue from the same end must copy.
        self.claimed = False
        self.data: Any = self._empty(capacity)

    def _empty(self, capacity: int) -> Any:
        s = self.shape
        return _allocate((s.layers, 2, s.heads, max(capacity, 1), s.dim), s.dtype)

    @property
    def capacity(self) -> int:
        """Positions that fit without growing."""
        return int(self.data.shape[3])

    @property
    def nbytes(self) -> int:
        """Bytes held, written or not."""
        return self.capacity * self.shape.bytes_per_token

    def reserve(self, length: int) -> None:
        """Make room for `length` positions in all, by half as much again where it has to grow."""
        if length <= self.capacity:
            return
        grown = self._empty(max(length, self.capacity * 3 // 2))
        grown[:, :, :, : self.length] = self.data[:, :, :, : self.length]
        self.data = grown

    def fork(self, length: int, capacity: int) -> KvBuffer:
        """A new buffer of `capacity` that starts with a copy of the first `length` positions."""
        branch = KvBuffer(self.shape, max(length, capacity))
        branch.data[:, :, :, :length] = self.data[:, :, :, :length]
        branch.length = length
        return branch
