"""Background asyncio tasks that are never lost: a reference is kept, and a failure is logged.

`asyncio.create_task` alone is banned by lint: the loop keeps only weak references, and an unretrieved exception
surfaces when the task is collected, if at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

__all__ = ["cancel_and_wait", "checkpoint", "spawn"]

T = TypeVar("T")
_live: set[asyncio.Task[Any]] = set()
_log = structlog.get_logger(__name__)


def spawn(coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
    """Run `coro` in the background. A failure is logged under `name`; awaiting the task still raises it."""
    task = asyncio.get_running_loop().create_task(coro, name=name)
    _live.add(task)
    task.add_done_callback(_finished)
    return task


def _finished(task: asyncio.Task[Any]) -> None:
    _live.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("background task failed", task=task.get_name(), error=repr(error))


def checkpoint() -> None:
    """Raise CancelledError if the current task has been asked to end.

    For endless loops: Python 3.11's `asyncio.wait_for` forgets a cancellation that comes together with its result. Not
    for code that runs while a task cleans up.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def cancel_and_wait(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel the tasks and wait until each has ended; their errors have been logged by `spawn`."""
    live = [t for t in tasks if t is not None and not t.done()]
    for task in live:
        task.cancel()
    await asyncio.gather(*live, return_exceptions=True)
