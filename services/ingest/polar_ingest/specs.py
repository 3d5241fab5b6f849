"""Task specifications, read from the log when a session is released: a waiting task costs no memory for its text."""

from __future__ import annotations

from polar_common import subjects
from polar_common.bus import Bus
from polar_common.errors import NotFound, Poison
from polar_common.events import TaskAccepted

__all__ = ["Specs"]

_CACHE_BYTES = 32 << 20


class Specs:
    """`task.accepted` events by task id, the most recently used ones kept."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._kept: dict[str, tuple[TaskAccepted, int]] = {}
        self._bytes = 0

    async def find(self, task: str) -> TaskAccepted | None:
        """The event, None if there is no such task. Raises Unavailable, Poison."""
        if (hit := self._kept.pop(task, None)) is not None:
            self._kept[task] = hit
            return hit[0]
        stored = await self._bus.last(subjects.task(task, "accepted"))
        if stored is None:
            return None
        event = stored.event
        if not isinstance(event, TaskAccepted):
            raise Poison(f"{stored.subject} holds a {event.kind}")
        self._keep(task, event, len(stored.body))
        return event

    async def get(self, task: str) -> TaskAccepted:
        """The event. Raises NotFound, Unavailable, Poison."""
        if (event := await self.find(task)) is None:
            raise NotFound(f"no task {task}")
        return event

    def _keep(self, task: str, event: TaskAccepted, size: int) -> None:
        if size > _CACHE_BYTES or task in self._kept:
            return
        self._kept[task] = (event, size)
        self._bytes += size
        while self._bytes > _CACHE_BYTES:
            _, dropped = self._kept.pop(next(iter(self._kept)))
            self._bytes -= dropped
