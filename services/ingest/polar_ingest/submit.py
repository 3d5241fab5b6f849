"""Taking tasks in: all of a request is checked, then admitted, then published, task by task, each in one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import structlog
from prometheus_client import Counter

from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.catalogue import Catalogue
from polar_common.errors import Conflict, RequestError, Stale
from polar_common.events import SessionCancelRequested, TaskAccepted
from polar_common.ids import FIRST_SEGMENT, sessions_of

from .entries import Session
from .intake import Submission, pack_files, parse, task_events
from .scheduler import Scheduler
from .settings import IngestSettings
from .views import CancelView, SubmittedTask, SubmittedView

__all__ = ["Full", "Intake", "bounded"]

_AT_ONCE = 8
"""Below JetStream's bound of open batches per stream, shared with other instances."""
_log = structlog.get_logger(__name__)
_taken = Counter("polar_ingest_tasks", "Tasks of requests, by what became of them", ["fate"])
T = TypeVar("T")
R = TypeVar("R")


class Full(RequestError):
    """The queue is full: 429; the log is nearly full: 503."""


async def bounded(items: Sequence[T], work: Callable[[T], Awaitable[R]], at_once: int = _AT_ONCE) -> list[R]:
    """Results of `work` in order, at most `at_once` under way. The first error is raised when all have ended."""
    gate = asyncio.Semaphore(at_once)

    async def one(item: T) -> R:
        async with gate:
            return await work(item)

    results = await asyncio.gather(*(one(i) for i in items), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [r for r in results if not isinstance(r, BaseException)]


class Intake:
    """Submissions and cancellations of one ingest instance."""

    def __init__(self, bus: Bus, scheduler: Scheduler, settings: IngestSettings) -> None:
        self._bus = bus
        self._scheduler = scheduler
        self._settings = settings
        self._blobs = Blobs(bus, settings.segment)
        self._catalogue = Catalogue(bus)
        self._admitted: dict[str, int] = {}
        """Task → sessions published by this instance and not yet seen by its fold."""

    async def submit(self, body: bytes, run: str) -> SubmittedView:
        """Take in a request's tasks. Repeating it changes nothing and gets the same answer.

        Raises RequestError (4xx, nothing published unless another request interfered), Full, BusError.
        """
        settings = self._settings
        found = parse(
            body,
            run=run,
            segment=settings.segment,
            work_classes=settings.work_classes,
            spec_limit=settings.ingest_spec_limit,
        )
        known = await bounded(found, self._known)
        fresh = {s.task: s for s, there in zip(found, known, strict=True) if not there}
        if fresh:
            await self._check_segment(list(fresh.values()))
        self._admit(list(fresh.values()))
        await bounded(list(fresh.values()), self._publish)
        _taken.labels("accepted").inc(len(fresh))
        _taken.labels("repeated").inc(len(found) - len(fresh))
        return SubmittedView(run=found[0].run, tasks=tuple(_submitted(s) for s in found))

    async def _known(self, submission: Submission) -> bool:
        """Whether it's in the log already. Raises RequestError 409 if another one is there under its id."""
        accepted = await self._scheduler.specs.find(submission.task)
        if accepted is None:
            return False
        _same(submission, accepted)
        return True

    async def _check_segment(self, fresh: Sequence[Submission]) -> None:
        """Raises RequestError 503 if the log was rolled, 409 for a task that an earlier segment has or had."""
        segment = self._settings.segment
        if await self._catalogue.has(segment, "rolled"):
            raise RequestError(f"segment {segment} was rolled: start the house again", 503)
        if segment == FIRST_SEGMENT:
            return
        segments = await self._catalogue.segments()
        for one in fresh:
            if earlier := await self._catalogue.earlier(one.task, segments):
                where = f"{one.where}.id" if one.where else "id"
                text = (
                    f"{one.spec.id!r} of run {one.run!r} was accepted in segment {earlier}: give it another id or run"
                )
                raise RequestError(text, 409, where)

    def _admit(self, fresh: Sequence[Submission]) -> None:
        """Reserve room in the queue. Raises Full, or RequestError where no queue would ever be long enough."""
        if fresh and (short := self._scheduler.headroom.short):
            _taken.labels("refused").inc(len(fresh))
            raise Full(short, 503)
        world, bound = self._scheduler.world, self._settings.ingest_queue_bound
        wanted = sum(s.spec.samples for s in fresh)
        if wanted > bound:
            raise RequestError(f"{wanted} sessions in one request; the queue holds {bound}", 413, "tasks")
        waiting = world.pending + sum(self._admitted.values())
        if fresh and waiting + wanted > bound:
            _taken.labels("refused").inc(len(fresh))
            raise Full(f"{waiting} sessions wait and {wanted} more would exceed {bound}; try again later", 429)
        for one in fresh:
            self._admitted[one.task] = one.spec.samples

    async def _publish(self, submission: Submission) -> None:
        try:
            files = None
            if submission.spec.files:
                files = await self._blobs.put(pack_files(submission.spec.files), "application/x-tar")
            published = await self._bus.batch(task_events(submission, files))
            if published.duplicate:
                await self._settle(submission)
            # The reservation lasts until the fold counts the sessions itself; and whoever submits sees what he did.
            await self._scheduler.seen(published.sequence)
        except (Stale, Conflict):
            await self._settle(submission)
        finally:
            self._admitted.pop(submission.task, None)

    async def _settle(self, submission: Submission) -> None:
        """Another request was first, or this one was repeated: what is in the log decides."""
        _same(submission, await self._scheduler.specs.get(submission.task))

    # -- cancelling

    async def cancel(self, sessions: Sequence[Session], reason: str) -> CancelView:
        """Ask sessions to end. Those that have ended, or were asked before, are left as they are."""
        todo = [s for s in sessions if s.end is None and s.cancel is None]
        asked = await bounded(todo, partial(self._cancel, reason=reason), at_once=16)
        return CancelView(requested=sum(asked), sessions=len(sessions))

    async def _cancel(self, session: Session, reason: str) -> bool:
        event = SessionCancelRequested(
            run=self._run_of(session), task=session.task, session=session.id, attempt=0, reason=reason
        )
        try:
            return not (await self._bus.once(event)).duplicate
        except Conflict:
            return False

    def _run_of(self, session: Session) -> str:
        task = self._scheduler.world.tasks.get(session.task)
        return task.run if task is not None else ""


def _same(submission: Submission, accepted: TaskAccepted) -> None:
    if accepted.spec_hash != submission.spec_hash:
        where = f"{submission.where}.id" if submission.where else "id"
        raise RequestError(
            f"{submission.spec.id!r} was submitted before in run {submission.run!r}, with another body", 409, where
        )


def _submitted(submission: Submission) -> SubmittedTask:
    return SubmittedTask(
        id=submission.spec.id,
        task=submission.task,
        sessions=tuple(sessions_of(submission.task, submission.spec.samples)),
    )
