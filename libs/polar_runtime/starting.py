"""The steps of a start that may be stopped or cancelled at any moment.

Threads and daemons go on when their caller is cancelled: what they make would outlive a removal that didn't wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from polar_common.errors import RuntimeFault

__all__ = ["Starting"]

T = TypeVar("T")


class Starting:
    """Of one runtime, used by its `start` and `stop`."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._broken_off = False
        self._under_way: asyncio.Future[Any] | None = None

    async def step(self, work: Coroutine[Any, Any, T]) -> T:
        """Do one, to its end also where the caller is cancelled. RuntimeFault once it is broken off."""
        if self._broken_off:
            work.close()
        self.check()
        self._under_way = asyncio.ensure_future(work)
        done: T = await asyncio.shield(self._under_way)
        self.check()
        return done

    def check(self) -> None:
        """RuntimeFault once it is broken off."""
        if self._broken_off:
            raise RuntimeFault(f"{self._label} was stopped while it started")

    async def break_off(self) -> None:
        """Let no further step begin, and wait for the one under way."""
        self._broken_off = True
        if self._under_way is not None:
            await asyncio.gather(self._under_way, return_exceptions=True)
