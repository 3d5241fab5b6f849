"""The scheduler: follows the log, decides through `domain.py`, publishes behind fences.

Any number may run. Each folds the whole log for itself; whoever publishes a transition first wins, the others learn of
it by following and hold back for a moment, so that one of them leads without being elected. All state is in the log: a
scheduler that dies at any instant is replaced by reading it again.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import structlog
from prometheus_client import Counter, Gauge

from polar_common.bus import Bus, Stored, follow
from polar_common.errors import BusError, Conflict, FromTheFuture, Poison, Stale
from polar_common.events import Event
from polar_common.subjects import LIFECYCLE
from polar_common.tasks import cancel_and_wait, checkpoint, spawn
from polar_common.topology import DLQ, events_stream

from .clock import LogClock, server_time
from .dead_letters import bury, verdict
from .decisions import applied, group_event, session_event
from .domain import CloseGroup, Decision, Queue, Rules, decide, decide_group, release
from .headroom import Headroom
from .settings import IngestSettings
from .specs import Specs
from .state import World
from .timers import Timers

__all__ = ["Scheduler", "rules_of"]

_PUBLISHING = 16
"""Publishes under way at once; JetStream commits one after the other anyway."""
_AGAIN_S = 2.0
_SILENT_S = 10.0
_Job = Callable[[], Awaitable[object]]
_log = structlog.get_logger(__name__)
_decisions = Counter("polar_scheduler_decisions", "Published decisions", ["decision"])
_lost_races = Counter("polar_scheduler_lost_races", "Decisions somebody else had made first")
_failures = Counter("polar_scheduler_failures", "Decisions that couldn't be published", ["error"])
_sessions = Gauge("polar_scheduler_sessions", "Remembered sessions", ["state"])
_groups = Gauge("polar_scheduler_open_groups", "Groups with a released session, not closed")


def rules_of(settings: IngestSettings) -> Rules:
    """The domain's rules from the settings."""
    return Rules(
        release_ahead=settings.ingest_release_ahead,
        postrun_bound=settings.ingest_postrun_bound,
        retry_delay_s=settings.ingest_retry_delay_s,
        exited_patience_s=settings.ingest_exited_patience_s,
        owner_grace_s=settings.ingest_owner_grace_s,
        evaluation_patience_s=settings.ingest_evaluation_patience_s,
        obey_demand=settings.ingest_obey_demand,
    )


class Scheduler:
    """One process manager. `world` is its fold; `run` works until stopped."""

    def __init__(self, bus: Bus, settings: IngestSettings) -> None:
        self.world = World(settings.build, demand=settings.ingest_obey_demand)
        self.specs = Specs(bus)
        self.headroom = Headroom(bus, settings)
        self._rules = rules_of(settings)
        self._clock = LogClock()
        self._bus = bus
        self._stream = events_stream(settings.segment)
        demand = tuple(f"polar.events.{settings.segment}.{of}.>" for of in ("trainer", "policy"))
        self._filters = (*LIFECYCLE, *demand) if settings.ingest_obey_demand else LIFECYCLE
        self._build = settings.build
        self._caught_up = asyncio.Event()
        self._heard = 0.0
        self._position = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._timers = Timers()
        self._unburied: list[tuple[Stored, Poison]] = []
        self._yield_until = 0.0

    @property
    def ready(self) -> bool:
        """Everything stored has been folded and the server has been heard lately."""
        return self._caught_up.is_set() and self._clock.now() - self._heard < _SILENT_S

    async def run(self, stop: asyncio.Event) -> None:
        """Follow and decide until `stop` is set. Raises Unavailable if the log can't be asked at the start."""
        self._clock.calibrate(await server_time(self._bus, self._stream))
        await self.headroom.look()
        work = [
            spawn(self.headroom.watch(self._wake.set), name="scheduler:headroom"),
            spawn(self._follow(), name="scheduler:follow"),
            spawn(self._follow_dead_letters(), name="scheduler:dead-letters"),
            spawn(self._deciding(), name="scheduler:decide"),
        ]
        stopping = spawn(_wait(stop), name="scheduler:stop")
        try:
            done, _ = await asyncio.wait({*work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await cancel_and_wait(*work, stopping)

    async def seen(self, sequence: int, timeout: float = 10.0) -> bool:
        """Wait until the fold contains everything up to a sequence; False after `timeout` seconds."""
        if self._position >= sequence:
            return True
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append((sequence, waiter))
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters = [w for w in self._waiters if w[1] is not waiter]
        return True

    # -- following

    async def _follow(self) -> None:
        count = 0
        async for stored in follow(
            self._bus, self._stream, self._filters, on_caught_up=self._on_caught_up, on_alive=self._on_alive
        ):
            self._fold(stored)
            count += 1
            if count % 64 == 0:
                await asyncio.sleep(0)

    def _fold(self, stored: Stored) -> None:
        try:
            self.world.apply(stored, self._clock.at(stored.time))
        except FromTheFuture as error:
            _log.error("a newer version wrote this; upgrade ingest", subject=stored.subject, error=str(error))
        except Poison as error:
            self._unburied.append((stored, error))
        self._position = stored.sequence
        self._wake.set()
        for sequence, waiter in self._waiters:
            if sequence <= self._position and not waiter.done():
                waiter.set_result(None)

    def _on_alive(self) -> None:
        self._heard = self._clock.now()

    def _on_caught_up(self) -> None:
        self._heard = self._clock.now()
        if not self._caught_up.is_set():
            _log.info("log folded", tasks=len(self.world.tasks), sessions=len(self.world.sessions))
        self._clock.caught_up()
        self._caught_up.set()
        self._wake.set()

    async def _follow_dead_letters(self) -> None:
        """A session of which a message went to a dead letter ends as `infra_error`, cause `poison`."""
        await self._caught_up.wait()
        async for stored in follow(self._bus, DLQ, ["polar.dlq.>"]):
            found = verdict(stored.body, self._build)
            if found is not None:
                self.world.poison(found.session, found.reason, build=found.build, attempt=found.attempt)
                self._wake.set()

    # -- deciding

    async def _deciding(self) -> None:
        await self._caught_up.wait()
        while True:
            checkpoint()
            await self._work_or_time()
            await self._step()

    async def _work_or_time(self) -> None:
        now = self._clock.now()
        if now < self._yield_until:
            await asyncio.sleep(self._yield_until - now)
            return
        timeout = self._timers.next_at - now
        with suppress(TimeoutError):
            async with asyncio.timeout(None if math.isinf(timeout) else max(0.0, timeout)):
                await self._wake.wait()

    async def _step(self) -> None:
        self._wake.clear()
        await self._bury()
        for key in self._timers.due(self._clock.now()):
            (self.world.dirty if key in self.world.sessions else self.world.dirty_tasks).add(key)
        jobs = [*self._session_jobs(), *self._group_jobs(), *self._release_jobs()]
        for start in range(0, len(jobs), _PUBLISHING):
            await asyncio.gather(*(job() for job in jobs[start : start + _PUBLISHING]))
        for state, count in self.world.buckets.items():
            _sessions.labels(state).set(count)
        _groups.set(self.world.open_groups)

    def _session_jobs(self) -> list[_Job]:
        world, now = self.world, self._clock.now()
        jobs: list[_Job] = []
        dirty, world.dirty = world.dirty, set()
        for key in dirty:
            session = world.sessions.get(key)
            if session is None:
                continue
            found = decide(session, world.tasks[session.task], now, self._rules)
            if isinstance(found, float):
                self._timers.at(found, key)
            else:
                jobs.append(partial(self._transition, key, session.seq, found))
        return jobs

    def _group_jobs(self) -> list[_Job]:
        world, now = self.world, self._clock.now()
        jobs: list[_Job] = []
        dirty, world.dirty_tasks = world.dirty_tasks, set()
        for key in dirty:
            task = world.tasks.get(key)
            if task is None:
                continue
            found = decide_group(task, now)
            if isinstance(found, float):
                self._timers.at(found, key)
            else:
                jobs.append(partial(self._close, key, found))
        return jobs

    def _release_jobs(self) -> list[_Job]:
        if self.headroom.short:
            return []
        picked = (self.world.sessions[s] for s in release(self.world, self._rules))
        return [partial(self._release, s.id, s.seq) for s in picked]

    # -- publishing

    async def _transition(self, key: str, fence: int, decision: Decision) -> bool:
        """Publish a decision about a session; False if it wasn't this instance that made it."""
        session = self.world.sessions.get(key)
        if session is None or session.seq != fence:
            self.world.dirty.add(key)
            return False
        task = self.world.tasks[session.task]
        try:
            accepted = await self.specs.get(task.id) if isinstance(decision, Queue) else None
            event = session_event(session, task, decision, accepted)
            published = await self._bus.transition(event, fence)
        except (Stale, Conflict):
            self._outrun(key)
            if session.seq != fence:
                self.world.dirty.add(key)
            return False
        except Poison as error:
            self.world.poison(key, str(error))
            return False
        except BusError as error:
            self._failed(key, error)
            return False
        self._apply(event, published.sequence)
        _decisions.labels(event.kind).inc()
        return True

    async def _release(self, key: str, fence: int) -> None:
        if not await self._transition(key, fence, Queue(1)) and self.world.is_waiting(key):
            self.world.wait(self.world.sessions[key])

    async def _close(self, key: str, decision: CloseGroup) -> None:
        task = self.world.tasks.get(key)
        if task is None:
            # Another closed it while earlier decisions were published.
            return
        event = group_event(task, [self.world.sessions[s] for s in task.sessions if s in self.world.sessions], decision)
        try:
            published = await self._bus.once(event)
        except (Stale, Conflict):
            self._outrun(key)
        except BusError as error:
            self._failed(key, error)
        else:
            self._apply(event, published.sequence)
            _decisions.labels(event.kind).inc()

    def _apply(self, event: Event, sequence: int) -> None:
        """Know it at once: the follower brings it again, which changes nothing."""
        self.world.apply(applied(event, sequence), self._clock.now())
        self._wake.set()

    def _outrun(self, key: str) -> None:
        """Somebody was first. The follower will say who; another scheduler may lead for a moment."""
        _lost_races.inc()
        now = self._clock.now()
        self._yield_until = now + random.uniform(0.02, 0.2)
        self._timers.at(now + _AGAIN_S, key)

    def _failed(self, key: str, error: BusError) -> None:
        _failures.labels(type(error).__name__).inc()
        _log.warning("decision not published", of=key, error=str(error))
        now = self._clock.now()
        self._yield_until = now + random.uniform(0.5, 1.0)
        self._timers.at(now + random.uniform(0.5, 1.0) * _AGAIN_S, key)

    async def _bury(self) -> None:
        """Dead letters for what the fold couldn't read, unless its session has ended since."""
        unburied, self._unburied = self._unburied, []
        for stored, error in unburied:
            try:
                await bury(self._bus, self._stream, stored, error, self.world)
            except BusError as failure:
                self._unburied.append((stored, error))
                self._yield_until = self._clock.now() + _AGAIN_S
                _log.warning("burying failed", subject=stored.subject, error=str(failure))


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
