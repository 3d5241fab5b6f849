"""Waiting for a stage's work while the attempt may be cancelled, drained, or run out of time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

from polar_common.tasks import cancel_and_wait, spawn

__all__ = ["Interrupt", "Interrupted", "Interrupts"]

Interrupt = Literal["cancelled", "drained", "lost", "timeout"]
T = TypeVar("T")


class Interrupted(Exception):
    """The work was given up; `why` says for what."""

    def __init__(self, why: Interrupt) -> None:
        super().__init__(why)
        self.why: Interrupt = why


class Interrupts:
    """What may end an attempt from outside. Times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._why: Interrupt = "timeout"

    @property
    def lost(self) -> bool:
        """Whether the attempt may be somebody else's by now."""
        return self._why == "lost"

    def set(self, why: Interrupt) -> None:
        """The first one counts, but `lost` comes before all."""
        if not self._came.done():
            self._came.set_result(None)
            self._why = why
        elif why == "lost":
            self._why = why

    async def first(self, work: asyncio.Task[T], until: float) -> Interrupt | None:
        """None when `work` is over first (it goes on otherwise), else what came before."""
        if self._came.done() and not work.done():
            return self._why
        waited: set[asyncio.Future[Any]] = {work, self._came}
        timeout = max(0.0, until - time.monotonic())
        await asyncio.wait(waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return None
        return self._why if self._came.done() else "timeout"

    async def within(self, work: Coroutine[Any, Any, T], until: float, name: str, *, grace: float = 0.0) -> T:
        """`work`'s result or error. Raises Interrupted, with `work` cancelled and ended, if something comes first.

        What comes from outside lets it go on for `grace` seconds more.
        """
        task = spawn(_outcome(work), name=name)
        why: Interrupt | None = "timeout"
        try:
            why = await self.first(task, until)
            if why not in (None, "timeout") and grace:
                await asyncio.wait({task}, timeout=grace)
        finally:
            await cancel_and_wait(task)
        if task.cancelled():
            raise Interrupted(why or "timeout")
        result, error = task.result()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]


async def _outcome(work: Coroutine[Any, Any, T]) -> tuple[T | None, Exception | None]:
    """Its error as a value: it is judged by whoever waits, and is no defect to be logged."""
    try:
        return await work, None
    except Exception as error:
        return None, error
