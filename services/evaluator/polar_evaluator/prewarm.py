"""Clean copies made while the agents still run, for tasks that ask for it.

Each evaluator prewarms for itself, at most so many at a time; a copy whose artifacts another evaluator gets, or that
nobody needs any more, is removed as soon as the log says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from polar_common import subjects
from polar_common.bus import Bus, follow
from polar_common.errors import PolarError
from polar_common.session_state import fold
from polar_common.tasks import cancel_and_wait, spawn
from polar_common.topology import events_stream
from polar_runtime import Runtime

from .clean import Copies

__all__ = ["Prewarmed"]

_OVER = (subjects.ANY_LOST, subjects.ANY_FAILED, subjects.ANY_CANCELLED, subjects.ANY_EVALUATED)
_log = structlog.get_logger(__name__)


class Prewarmed:
    """Copies by session; `limit` of them."""

    def __init__(self, bus: Bus, copies: Copies, segment: str, limit: int) -> None:
        self._bus = bus
        self._copies = copies
        self._stream = events_stream(segment)
        self._limit = limit
        self._warm: dict[str, asyncio.Task[Runtime | None]] = {}
        self.on_cancelled: Callable[[str], None] = lambda _session: None
        """Called with each session that was cancelled while `follow` runs."""

    async def follow(self) -> None:
        """Prepare and remove copies as sessions run and end, until cancelled; then remove all."""
        newest = (await self._bus.js.stream_info(self._stream)).state.last_seq
        try:
            async for stored in follow(self._bus, self._stream, [subjects.ANY_RUNNING, *_OVER], after=newest):
                session = stored.subject.split(".")[4]
                if stored.subject.endswith(".cancelled"):
                    self.on_cancelled(session)
                if not stored.subject.endswith(".running"):
                    await self.drop(session)
                elif session not in self._warm and len(self._warm) < self._limit:
                    self._warm[session] = spawn(self._prepare(session), name=f"prewarm:{session}")
        finally:
            for session in list(self._warm):
                await self.drop(session)

    async def take(self, session: str) -> Runtime | None:
        """The session's copy, now the caller's; None if there is none, or it couldn't be made."""
        task = self._warm.pop(session, None)
        return await task if task is not None else None

    async def drop(self, session: str) -> None:
        """Remove the session's copy, if there is one."""
        task = self._warm.pop(session, None)
        if task is None:
            return
        await cancel_and_wait(task)
        runtime = None if task.cancelled() else task.result()
        if runtime is not None:
            await self._copies.discard(runtime)

    async def _prepare(self, session: str) -> Runtime | None:
        try:
            state = fold(session, await self._bus.read_session(session, completions=False))
            attempt = state.last_attempt
            if attempt is None or attempt.queued is None or not attempt.queued.spec.evaluator.prewarm:
                self._warm.pop(session, None)
                return None
            return await self._copies.prepared(attempt.queued)
        except PolarError as error:
            # The evaluation itself will try again, and says so if it can't either.
            _log.info("not prewarmed", session=session, error=str(error))
            return None
