"""Stand-ins for the other services, written against the log alone: gateway, evaluator, reconstructor, and a client."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import httpx

from polar_common.bus import Bus, Lease, Worker
from polar_common.errors import Conflict, Stale
from polar_common.events import (
    BuildReconstructed,
    EvaluationEvaluated,
    Outcome,
    SessionArtifacts,
    SessionClaimed,
    SessionEvent,
    SessionExited,
    SessionLost,
    SessionQueued,
    SessionRunning,
    SessionSealed,
    now,
)
from polar_common.session_state import Attempt, SessionState, fold
from polar_common.tasks import cancel_and_wait, spawn
from polar_common.topology import Topology, consumers, work_consumer
from polar_ingest.api import Api
from polar_ingest.scheduler import Scheduler
from polar_ingest.settings import IngestSettings


def task(id: str = "t", **fields: Any) -> dict[str, Any]:
    """A valid task as a client writes it."""
    harness = {"name": "command", "args": {"argv": ["agent"]}}
    return {"id": id, "instruction": "do it", "harness": harness, "evaluator": {"command": "true"}, **fields}


@dataclass
class Play:
    """How a session's attempt goes in the fake world."""

    fault: str = "none"
    cause: str = ""
    lost: bool = False
    vanish: bool = False
    """Claimed, then nothing, for ever."""
    run_s: float = 0.0
    outcome: Outcome = "passed"
    reward: float = 1.0
    traces: int = 1


@dataclass
class FakeHouse:
    """Gateway, evaluator and reconstructor in one process. `script(session, attempt)` says how it goes."""

    bus: Bus
    script: Callable[[str, int], Play] = lambda session, attempt: Play()
    slots: int = 32
    claims: list[tuple[str, int]] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    doubled: list[str] = field(default_factory=list)
    """Sessions of which two attempts were live at once."""

    @asynccontextmanager
    async def open(self, *, evaluate: bool = True, reconstruct: bool = True) -> AsyncIterator[FakeHouse]:
        specs = {c.durable: c for c in consumers(Topology())}
        workers = [Worker(self.bus, work_consumer("local"), self._gateway, self.slots)]
        if evaluate:
            workers.append(Worker(self.bus, specs["evaluator"], self._evaluate, self.slots))
        if reconstruct:
            workers.append(Worker(self.bus, specs["reconstructor-live"], self._reconstruct, self.slots))
        stop = asyncio.Event()
        running = [spawn(w.run(stop), name="fake") for w in workers]
        try:
            yield self
        finally:
            stop.set()
            for worker in workers:
                await worker.abandon()
            await cancel_and_wait(*running)

    async def _state(self, session: str) -> SessionState:
        return fold(session, await self.bus.read_session(session, completions=False))

    async def _say(self, state: SessionState, event: SessionEvent) -> bool:
        """Publish a transition; again behind whatever else happened, unless the session has ended."""
        while not state.terminal:
            try:
                published = await self.bus.transition(event, state.last_seq)
            except Stale:
                fresh = await self._state(state.session)
                state.end, state.last_seq, state.cancel = fresh.end, fresh.last_seq, fresh.cancel
                continue
            state.last_seq = published.sequence
            return True
        return False

    async def _gateway(self, lease: Lease) -> None:
        event = lease.stored.event
        assert isinstance(event, SessionQueued)
        state = await self._state(event.session)
        about = {"run": event.run, "task": event.task, "session": event.session, "attempt": event.attempt}
        if state.terminal:
            return
        if (earlier := state.attempts.get(event.attempt)) is not None and earlier.claimed:
            await self._take_over(state, about, earlier)
            return
        deadline = now() + timedelta(seconds=60)
        claimed = SessionClaimed(**about, gateway="fake", attempt_deadline=deadline, session_deadline=deadline)
        try:
            state.last_seq = (await self.bus.transition(claimed, state.last_seq)).sequence
        except Stale:
            if not (await self._state(event.session)).terminal:
                raise
            return
        self.claims.append((event.session, event.attempt))
        if event.session in self.live:
            self.doubled.append(event.session)
        self.live.add(event.session)
        await self._attempt(state, about, self.script(event.session, event.attempt))

    async def _take_over(self, state: SessionState, about: dict[str, Any], earlier: Attempt) -> None:
        """A claimed attempt that is delivered again, because its answer or its acknowledgement was lost with the
        server, is never run again: what its end lacks is told."""
        self.live.discard(state.session)
        if earlier.exited and not earlier.over:
            await self._say(state, SessionArtifacts(**about))
        elif not earlier.over:
            sealed = [] if earlier.sealed else [SessionSealed(**about, reason="lost")]
            told = [SessionLost(**about, cause="node_lost"), *sealed]
            await self.bus.batch(told, fence=(state.session, state.last_seq))

    async def _attempt(self, state: SessionState, about: dict[str, Any], play: Play) -> None:
        if play.vanish:
            return
        if play.lost:
            pair = [SessionLost(**about, cause="node_lost"), SessionSealed(**about, reason="lost")]
            self.live.discard(state.session)
            await self.bus.batch(pair, fence=(state.session, state.last_seq))
            return
        await self._say(state, SessionRunning(**about))
        cancelled = state.cancel is not None
        waited = 0.0
        while waited < play.run_s and not cancelled:
            await asyncio.sleep(0.02)
            waited += 0.02
            cancelled = (await self._state(state.session)).cancel is not None
        await self._say(state, SessionSealed(**about, reason="cancelled" if cancelled else "exited"))
        self.live.discard(state.session)
        exited = SessionExited(
            **about, exit_code=0, fault=play.fault, cause=play.cause, cancelled=cancelled, log_tail="the end"
        )
        await self._say(state, exited)
        await self._say(state, SessionArtifacts(**about))

    async def _evaluate(self, lease: Lease) -> None:
        event = lease.stored.event
        assert isinstance(event, SessionEvent)
        state = await self._state(event.session)
        exited = state.attempts[event.attempt].exited
        if exited is None or exited.fault not in ("none", "agent") or exited.cancelled:
            return
        play = self.script(event.session, event.attempt)
        try:
            await self.bus.once(
                EvaluationEvaluated(
                    run=event.run,
                    task=event.task,
                    session=event.session,
                    attempt=event.attempt,
                    evaluator="fake",
                    outcome=play.outcome,
                    reward=play.reward,
                )
            )
        except Conflict:
            return

    async def _reconstruct(self, lease: Lease) -> None:
        event = lease.stored.event
        assert isinstance(event, SessionEvent)
        state = await self._state(event.session)
        last = max(state.attempts, default=0)
        if isinstance(event, SessionArtifacts):
            exited = state.attempts[event.attempt].exited
            if exited is None or exited.fault not in ("none", "agent"):
                return
        traces = self.script(event.session, max(1, last)).traces if last else 0
        built = BuildReconstructed(
            run=event.run,
            task=event.task,
            session=event.session,
            attempt=last,
            build="live",
            rules="exact",
            rules_hash="0" * 64,
            manifest_hash="0" * 64,
            traces=traces,
            trained_completions=traces,
            excluded={},
            sampled_tokens=traces * 7,
            exact_spans=traces,
            drifted_spans=0,
        )
        await self.bus.once(built)


@dataclass
class Edge:
    """One ingest instance without its process: scheduler and HTTP application on a bus of its own."""

    bus: Bus
    scheduler: Scheduler
    client: httpx.AsyncClient
    task: asyncio.Task[None]

    async def kill(self) -> None:
        """As `kill -9` would: nothing is finished, the connection is gone."""
        self.task.cancel()
        await cancel_and_wait(self.task)
        await self.client.aclose()
        await self.bus.nc.close()


async def start_edge(url: str, name: str = "ingest/test", **options: Any) -> Edge:
    """An instance that has read the log to its end."""
    bus = await Bus.connect(url, name)
    settings = IngestSettings(**options)
    scheduler = Scheduler(bus, settings)
    running = spawn(scheduler.run(asyncio.Event()), name=name)
    transport = httpx.ASGITransport(app=Api(bus, scheduler, settings).app())
    client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60)
    async with asyncio.timeout(20):
        while not scheduler.ready and not running.done():
            await asyncio.sleep(0.01)
    if running.done():
        running.result()
    return Edge(bus, scheduler, client, running)


async def until(check: Callable[[], Any], timeout: float = 30.0) -> Any:
    """Poll until `check()` (a value or an awaitable) is true. Raises TimeoutError."""
    async with asyncio.timeout(timeout):
        while True:
            found = check()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.02)


def jitter(seed: int) -> Callable[[str, int], Play]:
    """A script in which a third of first attempts are lost or fail for the house's sake, decided by a seed."""

    def script(session: str, attempt: int) -> Play:
        chance = random.Random(f"{seed}/{session}/{attempt}").random()
        if attempt == 1 and chance < 0.2:
            return Play(lost=True)
        if attempt == 1 and chance < 0.35:
            return Play(fault="infra", cause="daemon")
        if chance < 0.4:
            return Play(fault="harness", cause="missing")
        return Play(outcome="passed" if chance < 0.7 else "failed", reward=float(chance < 0.7))

    return script
