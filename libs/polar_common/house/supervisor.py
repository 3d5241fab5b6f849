"""Child processes of `polar up`: started in order, watched, restarted with backoff, stopped before the log is.

Children have sessions of their own (Ctrl-C reaches only the parent) and a parent-death signal, so a killed parent
leaves nothing behind; what survived a crash of the machine's kernel facilities is reaped at the next start by pid and
start time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from polar_common.errors import ConfigError
from polar_common.service import die_with_parent

from .layout import process_started

__all__ = ["Child", "Supervisor", "reap"]

_BACKOFFS_S = (0.2, 1.0, 3.0, 10.0)
_KILLED_S = 1.0
"""The longest wait for a child that was ready and then killed from outside: the others' leases lapse meanwhile. Longer
ones are for what fails by itself or doesn't come up."""
_STABLE_S = 10.0
"""Seconds after which a child that had become ready counts as running: its end is news, not a crash loop."""
STOP_S = 20.0
_TOO_SOON_S = 5.0
_START_TRIES = 2


@dataclass
class Child:
    """One process. `ready_file` is written by it; `ready` asks in another way (NATS). `env` holds additions."""

    name: str
    argv: list[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    ready_file: Path | None = None
    ready: Callable[[], bool] | None = None
    start_timeout_s: float = 120.0
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    failures: int = 0
    came_up: bool = False
    restart_at: float = 0.0
    logged: int = 0
    """Bytes in its log from before its last process."""

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def facts(self) -> dict[str, object] | None:
        """What it told in its ready file; None until it's there and by this very process."""
        if self.ready_file is None or self.process is None:
            return None
        try:
            told: dict[str, object] = orjson.loads(self.ready_file.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return None
        return told if told.get("pid") == self.process.pid else None

    def is_ready(self) -> bool:
        if self.ready is not None:
            return self.ready()
        return self.ready_file is None or self.facts() is not None

    def tail(self, size: int = 1500) -> str:
        """The end of what its last process logged."""
        try:
            return self.log.read_bytes()[self.logged :][-size:].decode(errors="replace").strip()
        except OSError:
            return ""


class Supervisor:
    """Starts and watches children. All methods are called from one thread."""

    def __init__(self, run_dir: Path, base_env: dict[str, str]) -> None:
        self._run = run_dir
        self._env = base_env
        self.children: list[Child] = []
        self.stopping = False

    def spawn(self, child: Child) -> Child:
        """Start without waiting; `wait` for it later."""
        self.children.append(child)
        self._spawn(child)
        return child

    def start(self, child: Child) -> Child:
        """Start and wait until it's ready. Raises ConfigError with the end of its log."""
        return self.wait(self.spawn(child))

    def wait(self, child: Child) -> Child:
        """Until a spawned child is ready. Raises ConfigError with the end of its log."""
        deadline = time.monotonic() + child.start_timeout_s
        while not child.is_ready():
            if self.stopping:
                raise ConfigError("interrupted", child.name)
            if not child.alive:
                # What is wrong in the settings ends at once and would again; later it was the machine, too busy.
                if time.monotonic() - child.started_at < _TOO_SOON_S or child.failures >= _START_TRIES:
                    raise ConfigError(f"ended; see {child.log}\n{child.tail()}", child.name)
                child.failures += 1
                self._spawn(child)
            if time.monotonic() > deadline:
                late = f"not ready after {child.start_timeout_s:.0f} s; see {child.log}\n{child.tail()}"
                raise ConfigError(late, child.name)
            time.sleep(0.05)
        return child

    def watch(self) -> list[str]:
        """Restart what has died and whose backoff has passed; returns what happened, for the log."""
        happened = []
        now = time.monotonic()
        for child in self.children:
            if self.stopping:
                continue
            if not child.came_up and (child.alive or child.ready is None):
                child.came_up = child.is_ready()
            if child.alive:
                continue
            if child.restart_at == 0.0:
                if child.came_up and now - child.started_at > _STABLE_S:
                    child.failures = 0
                delay = _BACKOFFS_S[min(child.failures, len(_BACKOFFS_S) - 1)]
                code = child.process.returncode if child.process else None
                if child.came_up and code == -signal.SIGKILL:
                    delay = min(delay, _KILLED_S)
                child.failures += 1
                child.restart_at = now + delay
                happened.append(f"{child.name} ended ({code}); again in {delay:g} s")
            elif now >= child.restart_at:
                self._spawn(child)
                happened.append(f"{child.name} restarted")
        return happened

    def stop(self) -> None:
        """Stop all: the services together, then the first child, the log, which so hears the last of it."""
        self.stopping = True
        self._end(self.children[1:])
        self._end(self.children[:1])

    def _end(self, children: list[Child]) -> None:
        for child in children:
            if child.process is not None and child.alive:
                child.process.terminate()
        deadline = time.monotonic() + STOP_S
        for child in children:
            if child.process is None:
                continue
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()
            self._label(child).unlink(missing_ok=True)

    def _spawn(self, child: Child) -> None:
        if child.ready_file is not None:
            child.ready_file.unlink(missing_ok=True)
        with child.log.open("ab") as log:
            child.logged = log.tell()
            child.process = subprocess.Popen(
                child.argv,
                env=self._env | child.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        child.started_at, child.restart_at, child.came_up = time.monotonic(), 0.0, False
        told = {"pid": child.process.pid, "started": process_started(child.process.pid), "name": child.name}
        self._label(child).write_bytes(orjson.dumps(told))

    def _label(self, child: Child) -> Path:
        return self._run / f"{child.name}.pid"


def reap(run_dir: Path) -> list[str]:
    """End processes that an earlier house left behind; returns their names."""
    found = []
    for label in run_dir.glob("*.pid"):
        try:
            told = orjson.loads(label.read_bytes())
            pid, started = int(told["pid"]), int(told["started"])
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            label.unlink(missing_ok=True)
            continue
        if started and process_started(pid) == started:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)
                _wait_gone(pid, started)
            found.append(str(told.get("name")))
        label.unlink(missing_ok=True)
    return found


def _wait_gone(pid: int, started: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while process_started(pid) == started:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.05)
