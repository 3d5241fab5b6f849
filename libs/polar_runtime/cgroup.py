"""A control group per attempt, where this host lets us make one: hard limits, exact sums, and a kill that nothing
escapes. Version 2 with delegated controllers, or version 1 hierarchies that are writable. Without either, `local.py`
falls back to rlimits and a watching sampler, and says so.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from polar_runtime import procs
from polar_runtime.base import Resource

__all__ = ["Cgroup", "Hierarchies", "find", "of_process"]

_ROOT = Path("/sys/fs/cgroup")
_NAME = "polar"


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where groups may be made: controller → parent directory. `v2` where it is the unified one."""

    parents: dict[str, Path]
    v2: bool


@functools.cache
def find() -> Hierarchies | None:
    """Probe this host once. None where no group can be made."""
    try:
        own = dict(_own_paths(Path("/proc/self/cgroup").read_text()))
    except OSError:
        return None
    if (_ROOT / "cgroup.controllers").exists():
        return _find_v2(_ROOT / own.get("", "/").lstrip("/"))
    parents = {}
    # Where cpu and cpuacct are one hierarchy, to be counted would mean to be scheduled as a group.
    counted = not os.path.samefile(_ROOT / "cpu", _ROOT / "cpuacct") if (_ROOT / "cpuacct").is_dir() else False
    for controller in ("memory", "pids", *(["cpuacct"] if counted else []), "cpu"):
        parent = _ROOT / controller / own.get(controller, "/").lstrip("/") / _NAME
        if _make(parent):
            parents[controller] = parent
    return Hierarchies(parents, v2=False) if "pids" in parents or "memory" in parents else None


def _own_paths(text: str) -> list[tuple[str, str]]:
    pairs = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        pairs += [(name, path) for name in controllers.split(",")]
    return pairs


def _find_v2(own: Path) -> Hierarchies | None:
    # A group with processes can't enable controllers for its children, except the root: try our own, then its parent.
    for base in (own, own.parent):
        if base == _ROOT.parent or not _make(base / _NAME):
            continue
        with contextlib.suppress(OSError):
            (base / "cgroup.subtree_control").write_text("+memory +pids")
            (base / _NAME / "cgroup.subtree_control").write_text("+memory +pids")
            return Hierarchies({"": base / _NAME}, v2=True)
    return None


def _make(path: Path) -> bool:
    try:
        path.mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK)


def of_process(pid: int) -> Cgroup | None:
    """The group in which a process of this host is, to read. None where it can't be told."""
    try:
        own = dict(_own_paths(Path(f"/proc/{pid}/cgroup").read_text()))
    except OSError:
        return None
    v2 = (_ROOT / "cgroup.controllers").exists()
    paths = {c: _ROOT / c / own.get(c, "/").lstrip("/") for c in ([""] if v2 else ["memory", "pids", "cpuacct"])}
    if not all(path.is_dir() for path in paths.values()):
        return None
    group = Cgroup(Hierarchies({c: path.parent for c, path in paths.items()}, v2=v2), "")
    group.paths = paths
    return group


class Cgroup:
    """One attempt's group. Blocking; each call takes well under a millisecond but `kill`."""

    def __init__(self, hierarchies: Hierarchies, name: str) -> None:
        self.paths = {c: parent / name for c, parent in hierarchies.parents.items()}
        self.v2 = hierarchies.v2

    def create(self, memory_mb: int, pids: int, cpus: float) -> None:
        """Make the directories and set the limits. OSError where the kernel refuses.

        The cpu controller only where cores are limited: it schedules by groups, and all attempts together would get
        the share of one ordinary process.
        """
        if not cpus:
            self.paths.pop("cpu", None)
        for path in self.paths.values():
            path.mkdir(exist_ok=True)
        if self.v2:
            self._set("", "memory.max", memory_mb << 20)
            self._set("", "memory.swap.max", 0)
            self._set("", "pids.max", pids)
            if cpus:
                for parent in (self.paths[""].parents[1], self.paths[""].parent):
                    with contextlib.suppress(OSError):
                        (parent / "cgroup.subtree_control").write_text("+cpu")
                self._set("", "cpu.max", f"{int(cpus * 100_000)} 100000")
            return
        self._set("memory", "memory.limit_in_bytes", memory_mb << 20)
        self._set("pids", "pids.max", pids)
        if cpus:
            self._set("cpu", "cpu.cfs_period_us", 100_000)
            self._set("cpu", "cpu.cfs_quota_us", int(cpus * 100_000))

    def _set(self, controller: str, name: str, value: object) -> None:
        # A host may lack one knob (swap accounting, cpu quota) and still have the others.
        with contextlib.suppress(OSError, KeyError):
            (self.paths[controller] / name).write_text(str(value))

    def entry_files(self) -> list[str]:
        """Files into which a process writes its pid to enter."""
        return [str(path / "cgroup.procs") for path in self.paths.values()]

    def pids(self) -> list[int]:
        """Its processes."""
        for path in self.paths.values():
            with contextlib.suppress(OSError):
                return [int(p) for p in (path / "cgroup.procs").read_text().split()]
        return []

    def peak_memory(self) -> int:
        """Bytes; 0 where it isn't counted."""
        return self._number(
            ("memory.peak",) if self.v2 else ("memory.max_usage_in_bytes",), "" if self.v2 else "memory"
        )

    def peak_pids(self) -> int:
        """Processes at once; 0 where the kernel doesn't keep it."""
        return self._number(("pids.peak",), "" if self.v2 else "pids")

    def cpu_s(self) -> float:
        """Seconds of CPU so far."""
        if self.v2:
            return self._keyed("", "cpu.stat", "usage_usec") / 1e6
        return self._number(("cpuacct.usage",), "cpuacct") / 1e9

    def exhausted(self) -> tuple[int, int]:
        """How often the kernel has killed for memory, and refused a fork for pids."""
        if self.v2:
            return self._keyed("", "memory.events", "oom_kill"), self._keyed("", "pids.events", "max")
        return (
            self._keyed("memory", "memory.oom_control", "oom_kill"),
            self._keyed("pids", "pids.events", "max"),
        )

    def which(self, before: tuple[int, int]) -> Resource:
        """The limit that was hit since `before`, an earlier `exhausted()`."""
        memory, pids = self.exhausted()
        if memory > before[0]:
            return "memory"
        return "pids" if pids > before[1] else ""

    def _number(self, names: tuple[str, ...], controller: str) -> int:
        for name in names:
            with contextlib.suppress(OSError, KeyError, ValueError):
                return int((self.paths[controller] / name).read_text())
        return 0

    def _keyed(self, controller: str, name: str, key: str) -> int:
        with contextlib.suppress(OSError, KeyError, ValueError):
            for line in (self.paths[controller] / name).read_text().splitlines():
                field, _, value = line.partition(" ")
                if field == key:
                    return int(value)
        return 0

    def kill(self, *, rounds: int = 200) -> bool:
        """Kill every member, forking or not; True when none is left."""
        for _ in range(rounds):
            pids = self.pids()
            if not pids:
                return True
            kill_file = next(iter(self.paths.values())) / "cgroup.kill"
            if self.v2 and kill_file.exists():
                kill_file.write_text("1")
            else:
                procs.send(pids, signal.SIGSTOP)
                procs.send(pids, signal.SIGKILL)
            time.sleep(0.01)
        return not self.pids()

    def remove(self) -> None:
        """Remove the directories; a group that still has members stays, for the reaper."""
        for path in self.paths.values():
            for _ in range(20):
                try:
                    path.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.01)
                else:
                    break
