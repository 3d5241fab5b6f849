"""When to look at a session or task again: one pending instant per key, the earliest."""

from __future__ import annotations

import heapq
import math

__all__ = ["Timers"]


class Timers:
    """A heap with at most one live entry per key; who wants a later instant asks again when the earlier one rings."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._live: dict[str, float] = {}

    def at(self, instant: float, key: str) -> None:
        """Ring for `key` at `instant` (seconds of the caller's clock) at the latest; inf is never."""
        if math.isinf(instant) or self._live.get(key, math.inf) <= instant:
            return
        self._live[key] = instant
        heapq.heappush(self._heap, (instant, key))

    @property
    def next_at(self) -> float:
        """The earliest instant; inf if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now: float) -> list[str]:
        """Remove and return the keys whose instant has come."""
        rung = []
        while self._heap and self._heap[0][0] <= now:
            instant, key = heapq.heappop(self._heap)
            if self._live.get(key) == instant:
                del self._live[key]
                rung.append(key)
        return rung
