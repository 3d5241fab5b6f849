"""Process trees of this host, read from /proc: what a tree uses, and how it is ended for certain."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ProcessId",
    "Usage",
    "boot_id",
    "command_line",
    "kill_namespace",
    "kill_tree",
    "labelled",
    "tree",
    "usage",
    "written",
]

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that can't be confused with a later one of the same number. `started` in clock ticks after boot."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process now running under `pid`."""
        fields = _stat(pid)
        return None if fields is None else cls(pid, int(fields[19]))

    def alive(self) -> bool:
        """Whether it still runs; a zombie doesn't."""
        fields = _stat(self.pid)
        return fields is not None and int(fields[19]) == self.started and fields[0] not in (b"Z", b"X")


@dataclass(frozen=True, slots=True)
class Usage:
    """A tree at one moment: resident bytes (shared pages counted once a process), CPU seconds, processes."""

    rss: int = 0
    cpu_s: float = 0.0
    procs: int = 0


def boot_id() -> str:
    """Changes at every boot, after which recorded pids mean nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _stat(pid: int) -> list[bytes] | None:
    """Fields of /proc/PID/stat from the third (state) on."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def tree(root: int, most: int = 1 << 22) -> list[int]:
    """`root` and everything below it, parents first; cut short once there are more than `most`."""
    found = [root]
    for pid in found:
        if len(found) > most:
            break
        found += _children(pid)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def usage(pids: list[int]) -> Usage:
    """What the processes use together. `cpu_s` includes their children that have ended and been waited for."""
    rss, ticks, count = 0, 0, 0
    for pid in pids:
        fields = _stat(pid)
        if fields is not None and fields[0] not in (b"Z", b"X"):
            rss += int(fields[21]) * _PAGE
            ticks += sum(map(int, fields[11:15]))
            count += 1
    return Usage(rss, ticks / _TICKS, count)


def labelled(variable: bytes) -> list[int]:
    """Processes whose environment at start contained `variable` (`NAME=value`)."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                if variable in file.read().split(b"\0"):
                    found.append(int(entry))
    return found


def written(pids: list[int]) -> int | None:
    """Bytes that the processes, and their children that have ended, have written so far; None where it isn't told."""
    total, told = 0, False
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/io").read_bytes().split()
            total += int(fields[3]) + int(fields[11])
            told = True
    return total if told else None


def command_line(pid: int) -> bytes:
    """Its arguments, each ended by NUL; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def send(pids: list[int], number: int) -> None:
    """Signal each of them that still is."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_namespace(root: ProcessId) -> None:
    """Kill a sandbox from its top: with the first process inside the kernel kills all of the namespace at once."""
    if root.alive():
        send(tree(root.pid, 8)[::-1], signal.SIGKILL)


def kill_tree(root: ProcessId, *, seconds: float = 5.0) -> None:
    """Kill a tree that has a session of its own and whose members may be forking. Blocking.

    Whole process groups at a time: the kernel refuses a fork that a group's signal overtakes, so that nothing escapes
    between the look and the kill. The root goes last, for without it its orphans couldn't be found.
    """
    deadline = time.monotonic() + seconds
    while root.alive() and time.monotonic() < deadline:
        below = tree(root.pid, 1000)[1:]
        groups = {pid: _group(pid) for pid in below}
        live = [pid for pid, group in groups.items() if group]
        if not live:
            break
        for group in set(groups.values()) - {0, os.getpgrp(), _group(root.pid)}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        send(live, signal.SIGKILL)
        time.sleep(0.005)
    if root.alive():
        send([root.pid], signal.SIGKILL)


def _group(pid: int) -> int:
    """A process's group; 0 where it is gone or a zombie."""
    fields = _stat(pid)
    return 0 if fields is None or fields[0] in (b"Z", b"X") else int(fields[2])
