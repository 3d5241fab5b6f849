"""Process trees of this host, read from /proc: what a tree uses, and how it is ended for certain."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessId", "Usage", "boot_id", "kill_tree", "labelled", "tree", "usage"]

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


def tree(root: int) -> list[int]:
    """`root` and everything below it, parents first."""
    found = [root]
    for pid in found:
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


def send(pids: list[int], number: int) -> None:
    """Signal each of them that still is."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_tree(root: ProcessId, *, rounds: int = 50) -> None:
    """Kill a tree whose members may be forking. Blocking, at most about a second.

    Everything is stopped before anything is killed, so that no parent's death hides its children from the next look.
    """
    for _ in range(rounds):
        if not root.alive():
            return
        pids = tree(root.pid)
        send(pids[1:], signal.SIGSTOP)
        again = tree(root.pid)
        if len(again) == len(pids):
            send(again[::-1], signal.SIGKILL)
            return
        time.sleep(0.005)
    send(tree(root.pid)[::-1], signal.SIGKILL)
