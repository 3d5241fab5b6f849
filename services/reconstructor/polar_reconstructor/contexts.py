"""Prompts of a session, resolved: each completion's ids as a view of a buffer that its whole chain shares.

A continuation appends in place, so a session of 200 turns holds its ids once. Whether one prompt starts with another
call's whole context is answered from references where they say so, else from the ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polar_common.errors import TraceError

from .calls import Call
from .columns import Ids

__all__ = ["Contexts"]


class _Growing:
    __slots__ = ("ids", "used")

    def __init__(self, capacity: int) -> None:
        self.ids: Ids = np.empty(capacity, dtype=np.int32)
        self.used = 0

    def append(self, more: Ids) -> None:
        end = self.used + len(more)
        self.ids[self.used : end] = more
        self.used = end


class Contexts:
    """Resolved contexts of calls given in the log's order. Raises TraceError where a reference doesn't hold."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = {c.id: c for c in calls}
        self._buffers: dict[str, _Growing] = {}
        self._verified: dict[tuple[str, str], bool] = {}
        self._bytes: dict[str, bytes] = {}
        order = {c.id: i for i, c in enumerate(calls)}
        longest = max((c.context_length for c in calls), default=0)
        for c in calls:
            self._check(c, order)
            self._buffers[c.id] = self._grow(c, longest)

    def prompt(self, c: Call) -> Ids:
        """int32[length], a view that can't be written to."""
        return self._view(c, c.length)

    def context(self, c: Call) -> Ids:
        """prompt + sampled, int32[context_length], a view that can't be written to."""
        return self._view(c, c.context_length)

    def _view(self, c: Call, length: int) -> Ids:
        found = self._buffers[c.id].ids[:length]
        found.flags.writeable = False
        return found

    def extends(self, later: Call, earlier: Call) -> bool:
        """Whether `later`'s prompt starts with `earlier`'s whole context (prompt and sampled ids)."""
        if self._buffers[later.id] is self._buffers[earlier.id]:
            return later.length >= earlier.context_length and later is not earlier
        key = (later.id, earlier.id)
        known = self._verified.get(key)
        if known is None:
            known = self._verified[key] = self._extends(later, earlier)
        return known

    def starts_with_prompt(self, later: Call, earlier: Call) -> bool:
        """Whether `later`'s prompt starts with `earlier`'s *prompt* and is longer: the paper's test."""
        if later.length <= earlier.length:
            return False
        if self._buffers[later.id] is self._buffers[earlier.id]:
            return True
        return self.prompt_bytes(later).startswith(self.prompt_bytes(earlier))

    def prompt_bytes(self, c: Call) -> bytes:
        """The prompt as little-endian int32 bytes, which compare at memory speed and stop at the first difference."""
        found = self._bytes.get(c.id)
        if found is None:
            found = self._bytes[c.id] = self.prompt(c).tobytes()
        return found

    def highest_id(self) -> int:
        """The largest id of all contexts, negative ones taken as unsigned; 0 where there is none."""
        buffers = {id(b): b for b in self._buffers.values()}
        return max((int(b.ids[: b.used].view("<u4").max(initial=0)) for b in buffers.values()), default=0)

    def forget_bytes(self) -> None:
        """Free what `prompt_bytes` keeps."""
        self._bytes.clear()

    def _extends(self, later: Call, earlier: Call) -> bool:
        if later.length < earlier.context_length:
            return False
        prompt = self.prompt_bytes(later)
        # The sampled stretch differs first where it differs at all: it is short, the shared history is long.
        if not prompt.startswith(earlier.sampled.tobytes(), 4 * earlier.length):
            return False
        return prompt.startswith(self.prompt_bytes(earlier))

    def _check(self, c: Call, order: dict[str, int]) -> None:
        for name in (*c.via, *([c.base] if c.base else [])):
            at = order.get(name)
            if at is None:
                raise TraceError(f"completion {c.id}: its prompt refers to {name}, which isn't in this attempt")
            if at >= order[c.id]:
                raise TraceError(f"completion {c.id}: its prompt refers to {name}, which isn't earlier: a cycle")
        base = self._base(c)
        if base is None and c.shared:
            raise TraceError(f"completion {c.id}: its prompt shares {c.shared} ids with nothing")
        if base is not None and c.shared > base.context_length:
            raise TraceError(
                f"completion {c.id}: its prompt shares {c.shared} ids with {base.id}, which has {base.context_length}"
            )
        if c.shared + len(c.new) != c.length:
            raise TraceError(f"completion {c.id}: its prompt has {c.shared} + {len(c.new)} ids and says {c.length}")

    def _base(self, c: Call) -> Call | None:
        name = c.via[-1] if c.via else c.base
        return self._calls[name] if name else None

    def _grow(self, c: Call, longest: int) -> _Growing:
        """The buffer that ends with the call. A new one has room for the longest context: pages that nothing is written
        to cost nothing.
        """
        base = self._base(c)
        buffer = None if base is None else self._buffers[base.id]
        if base is None or buffer is None or not buffer.used == c.shared == base.context_length:
            fresh = _Growing(longest)
            if buffer is not None:
                fresh.append(buffer.ids[: c.shared])
            buffer = fresh
        buffer.append(c.new)
        buffer.append(c.sampled)
        return buffer
