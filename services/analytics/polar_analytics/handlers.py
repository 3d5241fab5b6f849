"""The projector: follows the log from where the tables are, and inserts in batches. Of a segment that was dropped, it
reads the archive.

Progress is the highest sequence in the tables themselves, written last in each batch: after a crash the batch is
inserted again, which changes nothing. What can't be understood goes to the dead letter and is shown as `poison`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import structlog
from prometheus_client import Counter, Gauge

from polar_common.archive import read_archive
from polar_common.bus import Bus, Stored, follow
from polar_common.bus.poison import bury
from polar_common.errors import FromTheFuture
from polar_common.tasks import cancel_and_wait, spawn

from .domain import rows_of
from .store import Store

__all__ = ["Archive", "Projector"]

_log = structlog.get_logger(__name__)
_projected = Counter("polar_analytics_messages", "Messages projected", ["stream"])
_position = Gauge("polar_analytics_position", "Sequence up to which the tables are complete", ["stream"])


@dataclass(frozen=True, slots=True)
class Archive:
    """Where the events of a dropped segment are; `last` is their highest sequence."""

    directory: Path
    last: int

    async def messages(self, after: int) -> AsyncIterator[Stored]:
        """Raises ConfigError, BlobError or OSError where the archive is needed and isn't there whole."""
        if after >= self.last:
            return
        for count, stored in enumerate(read_archive(self.directory, after=after)):
            yield stored
            if count % 256 == 0:
                await asyncio.sleep(0)


class Projector:
    """Projects one stream. `caught_up` is set once everything stored at the start is in the tables."""

    def __init__(
        self,
        bus: Bus,
        store: Store,
        stream: str,
        subject: str,
        *,
        batch: int,
        linger_s: float,
        archive: Archive | None = None,
    ) -> None:
        self._bus = bus
        self._store = store
        self._stream = stream
        self._subject = subject
        self._batch = batch
        self._linger_s = linger_s
        self._archive = archive
        self._queue: asyncio.Queue[Stored] = asyncio.Queue(batch * 2)
        self._told = asyncio.Event()
        self.caught_up = asyncio.Event()
        self.position = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`, or to an archive's end; what was read is inserted before it returns."""
        self.position = await self._store.progress(self._stream)
        reading = spawn(self._read(), name=f"follow:{self._stream}")
        try:
            while not stop.is_set() and not reading.done():
                await self._once(stop)
        finally:
            await cancel_and_wait(reading)
        await self._flush(self._drain())
        if not reading.cancelled():
            reading.result()
            self.caught_up.set()

    async def _read(self) -> None:
        if self._archive is not None:
            messages = self._archive.messages(self.position)
        else:
            messages = follow(
                self._bus, self._stream, [self._subject], after=self.position, on_caught_up=self._told.set
            )
        async for stored in messages:
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
