"""The stages' places: INIT, READY, RUNNING and POSTRUN, each bounded. Who moves on takes the next place before giving
up the one he has, so that a full stage pushes back to the one before it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

from . import metrics

__all__ = ["Place", "Pool", "Pools", "Stage"]

Stage = Literal["init", "ready", "running", "postrun"]


class Pool:
    """`size` places; first come, first served."""

    def __init__(self, name: Stage, size: int) -> None:
        self.name = name
        self.size = size
        self.used = 0
        self.waiting = 0
        self.on_free: Callable[[], None] = lambda: None
        """Called whenever a place became free."""
        self._places = asyncio.Semaphore(size)

    @property
    def free(self) -> int:
        """Places that nobody has and nobody waits for."""
        return max(0, self.size - self.used - self.waiting)

    async def enter(self) -> None:
        self.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.waiting -= 1
        self._count(1)

    def leave(self) -> None:
        self._places.release()
        self._count(-1)
        self.on_free()

    def _count(self, step: int) -> None:
        self.used += step
        metrics.occupancy.labels(self.name).set(self.used)


class Pools:
    """The four of one gateway."""

    def __init__(self, init: int, ready: int, running: int, postrun: int) -> None:
        self.init = Pool("init", init)
        self.ready = Pool("ready", ready)
        self.running = Pool("running", running)
        self.postrun = Pool("postrun", postrun)


class Place:
    """Where one attempt is; left at the end, whatever happened."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    async def move(self, pool: Pool) -> None:
        """Wait for a place in `pool`, then give up the one held so far."""
        await pool.enter()
        self._leave()
        self._pool = pool

    def _leave(self) -> None:
        if self._pool is not None:
            self._pool.leave()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._leave()
