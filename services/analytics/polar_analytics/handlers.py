"""The projector: follows the log from where the tables are, and inserts in batches.

Progress is the highest sequence in the tables themselves, written last in each batch: after a crash the batch is
inserted again, which changes nothing. What can't be understood goes to the dead letter and is shown as `poison`.
"""

from __future__ import annotations

import asyncio
import time

import structlog
from prometheus_client import Counter, Gauge

from polar_common.bus import Bus, Stored, follow
from polar_common.bus.poison import bury
from polar_common.errors import FromTheFuture
from polar_common.tasks import cancel_and_wait, spawn

from .domain import rows_of
from .store import Store

__all__ = ["Projector"]

_log = structlog.get_logger(__name__)
_projected = Counter("polar_analytics_messages", "Messages projected", ["stream"])
_position = Gauge("polar_analytics_position", "Sequence up to which the tables are complete", ["stream"])


class Projector:
    """Projects one stream. `caught_up` is set once everything stored at the start is in the tables."""

    def __init__(self, bus: Bus, store: Store, stream: str, subject: str, *, batch: int, linger_s: float) -> None:
        self._bus = bus
        self._store = store
        self._stream = stream
        self._subject = subject
        self._batch = batch
        self._linger_s = linger_s
        self._queue: asyncio.Queue[Stored] = asyncio.Queue(batch * 2)
        self._told = asyncio.Event()
        self.caught_up = asyncio.Event()
        self.position = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`; what was read is inserted before it returns."""
        self.position = await self._store.progress(self._stream)
        reading = spawn(self._read(), name=f"follow:{self._stream}")
        try:
            while not stop.is_set():
                if reading.done():
                    reading.result()
                    return
                await self._once(stop)
        finally:
            await cancel_and_wait(reading)
        await self._flush(self._drain())

    async def _read(self) -> None:
        async for stored in follow(
            self._bus, self._stream, [self._subject], after=self.position, on_caught_up=self._told.set
        ):
            await self._queue.put(stored)

    async def _once(self, stop: asyncio.Event) -> None:
        try:
            first = await asyncio.wait_for(self._queue.get(), 0.2)
        except TimeoutError:
            if self._told.is_set():
                self.caught_up.set()
            return
        until = time.monotonic() + self._linger_s
        batch = [first, *self._drain()]
        while len(batch) < self._batch and (left := until - time.monotonic()) > 0 and not stop.is_set():
            try:
                batch.append(await asyncio.wait_for(self._queue.get(), left))
            except TimeoutError:
                break
            batch += self._drain(self._batch - len(batch))
        await self._flush(batch)

    def _drain(self, most: int | None = None) -> list[Stored]:
        out: list[Stored] = []
        while not self._queue.empty() and (most is None or len(out) < most):
            out.append(self._queue.get_nowait())
        return out

    async def _flush(self, batch: list[Stored]) -> None:
        if not batch:
            return
        rows, poison = rows_of((self._stream, stored) for stored in batch)
        for stream, stored, error in poison:
            if isinstance(error, FromTheFuture):
                # No dead letter: an upgraded projector reads it when the tables are made anew.
                _log.error("a newer version wrote this; upgrade analytics", subject=stored.subject, error=str(error))
                continue
            await bury(self._bus, "analytics", stream, stored, error)
        await self._store.insert(rows)
        self.position = batch[-1].sequence
        _projected.labels(self._stream).inc(len(batch))
        _position.labels(self._stream).set(self.position)
