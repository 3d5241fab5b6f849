"""Where a replay's sessions are built and published: in this process, or in several that have connections of their own.

Sessions go out in batches, whose publishes overlap; what comes back is one word per session.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import datetime
from pathlib import Path
from typing import Protocol

import structlog
import uvloop

from polar_common.bus import Bus, Stored
from polar_common.errors import FromTheFuture, Unavailable

from .handlers import Reconstructor
from .origins import Archived
from .rules import RuleSet

__all__ = ["Builders", "Here", "Job", "Processes"]

_log = structlog.get_logger(__name__)
Message = tuple[str, int, datetime, bytes]
"""Subject, sequence, log time, body."""
Job = tuple[str, list[Stored]]
"""A session and its messages."""


class Builders(Protocol):
    """Something that builds batches of sessions."""

    @property
    def at_once(self) -> int:
        """Batches that are worth having in flight."""
        ...

    @property
    def written(self) -> int:
        """Bytes of traces published so far."""
        ...

    async def build(self, batch: Sequence[Job]) -> list[str]:
        """`reconstructed`, `failed` or `newer` per session, in order. Raises Unavailable."""
        ...

    def close(self) -> None: ...


class Here:
    """This process."""

    at_once = 4

    def __init__(self, maker: Reconstructor) -> None:
        self._maker = maker

    @property
    def written(self) -> int:
        return self._maker.written

    async def build(self, batch: Sequence[Job]) -> list[str]:
        return list(await asyncio.gather(*(self._one(session, stored) for session, stored in batch)))

    async def _one(self, session: str, stored: list[Stored]) -> str:
        try:
            return await self._maker.reconstruct(session, stored)
        except FromTheFuture as error:
            _log.error("left: a newer version wrote it; replay with that", session=session, error=str(error))
            return "newer"

    def close(self) -> None:
        return None


class Processes:
    """`count` processes, spawned so that no connection is shared. `url` may name user and password.

    `archive`: where blobs are read, if not on the server.
    """

    def __init__(
        self, url: str, build: str, rules: RuleSet, count: int, *, dry: bool = False, archive: Path | None = None
    ) -> None:
        self.at_once = 2 * count
        self.written = 0
        self._pool = ProcessPoolExecutor(
            count,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_connect,
            initargs=(url, build, rules.model_dump_json(), dry, archive),
        )

    async def build(self, batch: Sequence[Job]) -> list[str]:
        jobs = [(session, [(m.subject, m.sequence, m.time, m.body) for m in stored]) for session, stored in batch]
        try:
            results, written = await asyncio.get_running_loop().run_in_executor(self._pool, _build, jobs)
        except BrokenProcessPool as error:
            raise Unavailable("a process of the replay died; start it again, it goes on where it was") from error
        self.written += written
        return results

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Process:
    """What a worker process keeps between batches."""

    def __init__(self, url: str, build: str, rules: str, dry: bool, archive: Path | None) -> None:
        self.loop = uvloop.new_event_loop()
        bus = self.loop.run_until_complete(Bus.connect(url, "replay"))
        # Whoever started the processes has checked it.
        blob = None if archive is None else Archived(archive, check=False).blob
        self.here = Here(Reconstructor(bus, build, RuleSet.model_validate_json(rules), dry=dry, blob=blob))


_processes: list[_Process] = []


def _connect(url: str, build: str, rules: str, dry: bool, archive: Path | None) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _processes.append(_Process(url, build, rules, dry, archive))


def _end_with_parent() -> None:
    """A pool's processes wait for work for ever, also where whoever started them was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _build(jobs: Sequence[tuple[str, Sequence[Message]]]) -> tuple[list[str], int]:
    process = _processes[0]
    before = process.here.written
    batch = [(session, [Stored(*message, "") for message in messages]) for session, messages in jobs]
    return process.loop.run_until_complete(process.here.build(batch)), process.here.written - before
