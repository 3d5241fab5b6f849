"""What an attempt leaves on the host, written down before it exists, and its removal when the attempt is dead.

Each attempt's directory holds `owner.json` (label, gateway process, boot, control groups) and one empty file per
running process in `pids/`, named `<pid>-<start time>`, so that a number that was reused is never killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from polar_common.errors import RuntimeFault
from polar_runtime import procs
from polar_runtime.base import host_name
from polar_runtime.beneath import remove_tree
from polar_runtime.cgroup import Cgroup, Hierarchies
from polar_runtime.loopdisk import LoopDisk

__all__ = ["VARIABLE", "Ledger", "is_owned", "kill_named", "reap"]

VARIABLE = "POLAR_ATTEMPT"
_log = structlog.get_logger(__name__)


class Ledger:
    """One attempt's records. Blocking, tiny."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def write(self, label: str, kind: str, *, groups: list[str] | None = None, docker_host: str = "") -> None:
        """Record who runs the attempt, and where else it leaves traces."""
        own = procs.ProcessId.of(os.getpid())
        owner = {
            "label": label,
            "root": str(self.base.parent),
            "kind": kind,
            "pid": os.getpid(),
            "started": own.started if own else 0,
            "boot": procs.boot_id(),
            "groups": groups or [],
            "docker_host": docker_host,
        }
        (self.base / "pids").mkdir(exist_ok=True)
        (self.base / "owner.json").write_text(json.dumps(owner))

    def running(self, process: procs.ProcessId) -> None:
        """A process of the attempt was started."""
        with contextlib.suppress(OSError):
            (self.base / "pids" / f"{process.pid}-{process.started}").touch()

    def ended(self, process: procs.ProcessId) -> None:
        """It is gone."""
        with contextlib.suppress(OSError):
            (self.base / "pids" / f"{process.pid}-{process.started}").unlink()

    def processes(self) -> list[procs.ProcessId]:
        """Those recorded as running."""
        found = []
        with contextlib.suppress(OSError):
            for name in os.listdir(self.base / "pids"):
                pid, _, started = name.partition("-")
                if pid.isdigit() and started.isdigit():
                    found.append(procs.ProcessId(int(pid), int(started)))
        return found

    def owner(self) -> dict[str, object]:
        """The record; empty where it was never written."""
        try:
            record = json.loads((self.base / "owner.json").read_text())
        except (OSError, json.JSONDecodeError):
            return {}
        return record if isinstance(record, dict) else {}


def kill_named(name: str, seconds: float = 5.0) -> bool:
    """Kill every process that was started with the attempt's name in its environment; True when none is left."""
    deadline = time.monotonic() + seconds
    variable = f"{VARIABLE}={name}".encode()
    while pids := procs.labelled(variable):
        if time.monotonic() > deadline:
            return False
        procs.send(pids, 9)
        time.sleep(0.02)
    return True


def is_owned(base: Path) -> bool:
    """Whether the process that made an attempt's directory still runs on this host."""
    owner = Ledger(base).owner()
    pid, started = owner.get("pid"), owner.get("started")
    if owner.get("boot") != procs.boot_id() or not isinstance(pid, int) or not isinstance(started, int):
        return False
    return procs.ProcessId(pid, started).alive()


async def reap(root: Path, is_live: Callable[[str], Awaitable[bool]]) -> list[str]:
    """Remove what dead attempts left below `root`: processes, control groups, directories. Returns their labels.

    `is_live(label)` says whether an attempt still runs somewhere; it is asked for every directory. An attempt whose
    removal fails is logged and left for the next time.
    """
    reaped = []
    for base in sorted(root.iterdir()) if root.is_dir() else []:
        if not base.is_dir() or base.is_symlink() or await is_live(base.name):
            continue
        try:
            await asyncio.to_thread(_reap_one, base)
        except (OSError, RuntimeFault) as error:
            _log.error("leftovers of a dead attempt remain", attempt=base.name, error=str(error))
        else:
            reaped.append(base.name)
    return reaped


def _reap_one(base: Path) -> None:
    ledger = Ledger(base)
    owner = ledger.owner()
    # Names are made of where it was then: the house may have moved, or be called by another path now.
    root = Path(str(owner.get("root") or base.parent))
    if owner.get("kind") == "docker":
        # Imported only where there is something to remove: the SDK takes a quarter of a second to load.
        from polar_runtime.docker_api import daemon, removal

        daemon(str(owner.get("docker_host", ""))).call_here(removal(base.name, root))
    if owner.get("boot") == procs.boot_id():
        for process in ledger.processes():
            procs.kill_tree(process)
        name = host_name(root, base.name)
        kill_named(name)
        groups = owner.get("groups")
        paths = [Path(p) for p in groups if isinstance(p, str)] if isinstance(groups, list) else []
        if paths:
            group = Cgroup(Hierarchies({str(i): p.parent for i, p in enumerate(paths)}, v2=len(paths) == 1), name)
            group.kill()
            group.remove()
    LoopDisk(base, 0).remove()
    remove_tree(base)
