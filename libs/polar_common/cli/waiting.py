"""Waiting for sessions: progress until they have ended, and what a signal means meanwhile.

Sessions are the house's: they go on whoever stops watching them. So a command that is interrupted says how they are
ended, or ends those that nobody else wants.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .ingest import Ingest
from .output import console

__all__ = ["Interrupted", "interruptible", "watch"]


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM. `code` is the exit code by which a shell knows it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = 128 + number


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise Interrupted inside. For the main thread."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watch(ingest: Ingest, run: str, sessions: int, timeout_s: float, *, quiet: bool) -> bool:
    """Progress until every group is closed. False at the timeout."""
    deadline = time.monotonic() + timeout_s
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=quiet, transient=True) as progress:
        bar = progress.add_task("sessions", total=sessions)
        told = ""
        while time.monotonic() < deadline:
            state = ingest.get(f"/v1/runs/{run}")
            ended = sum(state["outcomes"].values())
            live = "  ".join(f"{n} {phase}" for phase, n in sorted(state["phases"].items()))
            progress.update(bar, completed=ended, description=live or "closing groups")
            # A pipe shows no bar: a line whenever something changed keeps a log readable.
            if not console.is_terminal and not quiet and (line := f"{ended}/{sessions} ended  {live}") != told:
                console.print(line, markup=False)
                told = line
            if state["finished"]:
                return True
            time.sleep(0.5)
    return False
