"""Watches one running command: its peaks, and the limits that nothing harder enforces."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from polar_runtime import procs
from polar_runtime.base import Limits, Resource
from polar_runtime.cgroup import Cgroup
from polar_runtime.peers import Peers

__all__ = ["Sampler", "Watched", "disk_usage"]

_FIRST_S, _OFTEN_S, _SLOWEST_S = 0.1, 0.25, 2.0
_WORTH_A_LOOK = 1 << 20
_DISK_EVERY = 20.0  # a look at the disk may take this fraction of the time at most


class Watched(Protocol):
    """What a sampler looks at and may end."""

    def members(self, most: int = 1 << 22) -> list[int]:
        """Pids on this host; cut short once there are more than `most`."""

    async def kill(self) -> None:
        """End all of them."""


class Sampler:
    """`run` until cancelled. With a control group only the peaks and the disk are left to watch; `disk` tells how many
    bytes are used. `peers` are looked at where the network is open."""

    def __init__(
        self,
        watched: Watched,
        limits: Limits,
        group: Cgroup | None,
        disk: Callable[[], Awaitable[int]],
        peers: Peers | None = None,
    ) -> None:
        self.peers = peers
        self.peak_rss = 0
        self.cpu_s = 0.0
        self.peak_procs = 0
        self.exhausted: Resource = ""
        self._watched = watched
        self._limits = limits
        self._group = group
        self._disk = disk
        self._disk_due = time.monotonic() + 1.0
        self._written = 0

    async def run(self) -> None:
        """Sample, first often, then ever less often down to every two seconds; every 0.25 s without a control group or
        where connections are to be seen."""
        pause, slowest = _FIRST_S, _SLOWEST_S if self._group and self.peers is None else _OFTEN_S
        while not self.exhausted:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, slowest)
            pids = self._look()
            if self.peers is not None:
                self.peers.look(pids)
            if not self.exhausted and time.monotonic() >= self._disk_due and self._has_written(pids):
                await self._look_at_disk()
        await self._watched.kill()

    def peers_with(self, known: Iterable[str]) -> tuple[str, ...]:
        """The peers seen, and those known before."""
        return tuple(sorted({*known, *(self.peers.seen if self.peers else ())}))

    def _look(self) -> list[int]:
        if self._group:
            pids = self._group.pids()
            self.peak_procs = max(self.peak_procs, len(pids), self._group.peak_pids())
            self.peak_rss = max(self.peak_rss, self._group.peak_memory())
            self.cpu_s = max(self.cpu_s, self._group.cpu_s() or procs.usage(pids).cpu_s)
            return pids
        pids = self._watched.members(self._limits.pids)
        self.peak_procs = max(self.peak_procs, len(pids))
        if len(pids) > self._limits.pids:
            self.exhausted = "pids"
            return pids
        now = procs.usage(pids)
        self.peak_rss = max(self.peak_rss, now.rss)
        self.cpu_s = max(self.cpu_s, now.cpu_s)
        if now.rss > self._limits.memory_mb << 20:
            self.exhausted = "memory"
        return pids

    def _has_written(self, pids: list[int]) -> bool:
        """Whether a look at the disk could tell anything new: a thousand idle sessions can't all run `du` for ever, nor
        once more when all of them end at once and nothing is left to be stopped."""
        if not pids:
            return False
        written = procs.written(pids)
        if written is not None and abs(written - self._written) < _WORTH_A_LOOK:
            return False
        self._written = written or 0
        return True

    async def _look_at_disk(self) -> None:
        began = time.monotonic()
        used = await self._disk()
        took = time.monotonic() - began
        self._disk_due = time.monotonic() + max(1.0, took * _DISK_EVERY)
        if used > self._limits.disk_mb << 20:
            self.exhausted = "disk"


async def disk_usage(directories: Sequence[Path]) -> int:
    """Bytes allocated below the directories, other file systems left out."""
    process = await asyncio.create_subprocess_exec(
        "du", "-sxk", "--", *map(os.fspath, directories),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        out, _ = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    return sum(int(line.split(b"\t", 1)[0]) for line in out.splitlines() if line[:1].isdigit()) << 10
