"""One attempt from INIT to its artifacts.

The order at the end is what everything else relies on: `sealed` before anything is killed, artifacts stored while the
directories are there, the runtime stopped, then `exited` and `artifacts` in one batch. So an attempt whose gateway
dies is either complete on the log or has no `exited` and is lost: its work is never judged by half of it.

A handler that is cancelled (its lease is lost, or the process ends at once) stops the runtime and publishes nothing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import structlog

from polar_common.errors import BlobError, BusError, ConfigError, HarnessError, PolarError, RuntimeFault
from polar_common.errors import RuntimeUnavailable as Unavailable
from polar_common.events import (
    SessionArtifacts,
    SessionEvent,
    SessionExited,
    SessionInitialized,
    SessionLost,
    SessionQueued,
    SessionReady,
    SessionRunning,
    SessionSealed,
)
from polar_common.tasks import cancel_and_wait, spawn
from polar_runtime import Runtime, RuntimeStats

from . import metrics
from .collect import Artifacts, collect
from .domain import Deadlines, Ending, SealReason, blame_init
from .harness_run import HarnessEnd, execute, judged
from .house import House
from .ledger import SessionLedger, Superseded
from .output import OutputLog, redact
from .pools import Place
from .preparing import Preparation, Prepared, session_key
from .waiting import Interrupt, Interrupted, Interrupts

__all__ = ["Attempt", "about"]

_TAIL = 4000
_KILL_S = 30.0
_COLLECT_S, _COLLECT_LEAST_S = 60.0, 5.0
_HURRY_S = 5.0
_log = structlog.get_logger(__name__)


class _GaveUp(Exception):
    """The gateway leaves, and `lost` is published; or the lease is lost, and nothing more may be."""


def about(queued: SessionQueued) -> dict[str, Any]:
    """What every event of an attempt says of where it belongs."""
    return {
        "session": queued.session,
        "attempt": queued.attempt,
        "run": queued.run,
        "task": queued.task,
        "causation": queued.event_id,
    }


class Attempt:
    """Runs once."""

    def __init__(self, house: House, ledger: SessionLedger, queued: SessionQueued, deadlines: Deadlines) -> None:
        self.label = f"{queued.session}.{queued.attempt}"
        self.session = queued.session
        self.deadlines = deadlines
        self._house = house
        self._ledger = ledger
        self._queued = queued
        self._key = session_key(house.settings, queued, deadlines)
        self._preparation = Preparation(house, queued, self.label, self._key)
        self._interrupts = Interrupts()
        self._output = OutputLog(int(house.settings.gateway_log_mb * (1 << 20)))
        self._end: HarnessEnd | None = None
        self._began = time.monotonic()
        self._until = house.clock.monotonic(deadlines.harness)

    def interrupt(self, why: Interrupt) -> None:
        """End it soon: `cancelled` by its user, `drained` because this gateway leaves, `lost` with its lease."""
        self._interrupts.set(why)
        self._ledger.silent = self._interrupts.lost

    async def run(self, place: Place) -> None:
        """From the claim on. `place` is in INIT."""
        self._ledger.on_cancel = lambda: self.interrupt("cancelled")
        try:
            with self._output:
                ending = await self._live(place)
                await self._postrun(place, ending)
        except _GaveUp:
            _log.warning("given up", attempt=self.label)
        except Superseded:
            _log.warning("superseded", attempt=self.label)
        except BusError:
            raise
        except Exception as error:
            # A user's own runtime may raise anything. Left to redelivery, nobody would learn what it was.
            _log.exception("the attempt failed", attempt=self.label)
            await self._broke(error)
        finally:
            # Not cancelled with us: what was started must be stopped, whoever is in a hurry.
            await asyncio.shield(spawn(self._stop(), name=f"stop:{self.label}"))

    # -- INIT, READY, RUNNING

    async def _live(self, place: Place) -> Ending:
        """How it ended; sealed. Raises _GaveUp."""
        try:
            prepared = await self._init()
            await self._move(place)
        except Interrupted as interrupted:
            return await self._never_ran(interrupted.why)
        except (PolarError, OSError) as error:
            if not _blamable(error):
                raise
            verdict = blame_init(error)
            await self._seal("failed")
            tail = str(getattr(error, "tail", ""))
            return Ending(fault=verdict.fault, cause=verdict.cause, detail=verdict.detail, log_tail=tail)
        return await self._run_harness(prepared, self._runtime())

    async def _init(self) -> Prepared:
        until = min(self._until, time.monotonic() + self._house.settings.gateway_init_s)
        prepared = await self._interrupts.within(self._preparation.run(), until, f"init:{self.label}")
        init_s = time.monotonic() - self._began
        metrics.stage_s.labels("init").observe(init_s)
        await self._publish(
            SessionInitialized,
            runtime=self._queued.spec.runtime.kind,
            isolation=self._runtime().isolation,
            harness=self._queued.spec.harness.name,
            harness_version=prepared.harness.version,
            harness_config_hash=prepared.config_hash,
            init_s=init_s,
        )
        return prepared

    async def _move(self, place: Place) -> None:
        pools = self._house.pools
        await self._interrupts.within(place.move(pools.ready), self._until, f"ready:{self.label}")
        since = time.monotonic()
        await self._publish(SessionReady)
        await self._interrupts.within(place.move(pools.running), self._until, f"running:{self.label}")
        ready_s = time.monotonic() - since
        metrics.stage_s.labels("ready").observe(ready_s)
        await self._publish(SessionRunning, ready_s=ready_s)

    async def _never_ran(self, why: Interrupt) -> Ending:
        if why in ("drained", "lost"):
            await self._lose()
        if why == "cancelled":
            await self._seal("cancelled")
            return Ending(cancelled=True)
        await self._seal("timeout")
        # No agent ran, and waiting for this gateway's places or its host is nothing an agent can bring about.
        detail = "its time ran out before the harness could start"
        return Ending(timed_out=True, fault="infra", cause="queue_expired", detail=detail)

    async def _run_harness(self, prepared: Prepared, runtime: Runtime) -> Ending:
        began = time.monotonic()
        work = spawn(execute(runtime, prepared, self._output.write), name=f"harness:{self.label}")
        try:
            why = await self._interrupts.first(work, self._until)
            if why in ("drained", "lost"):
                await self._lose()
            if why is not None:
                await self._seal("cancelled" if why == "cancelled" else "timeout")
                await self._killed(work, runtime)
            unkillable = RuntimeFault("the harness couldn't be killed")
            self._end = end = work.result() if work.done() else HarnessEnd(fault=unkillable)
        finally:
            await cancel_and_wait(work)
        run_s = time.monotonic() - began
        metrics.stage_s.labels("running").observe(run_s)
        await self._seal("limit" if end.exhausted else "exited")
        ending = await judged(self._house.bus, self._queued, prepared, end, why, self._key)
        return replace(ending, run_s=run_s)

    async def _killed(self, work: asyncio.Task[HarnessEnd], runtime: Runtime) -> None:
        """Again and again: a harness that is only just being started isn't there to be killed yet."""
        until = time.monotonic() + _KILL_S
        while not work.done() and time.monotonic() < until:
            await runtime.cancel()
            await asyncio.wait({work}, timeout=0.5)

    # -- POSTRUN

    async def _postrun(self, place: Place, ending: Ending) -> None:
        began = time.monotonic()
        # Who is cancelled doesn't wait for others' artifacts.
        await self._hurried(place.move(self._house.pools.postrun), math.inf)
        found, ending = await self._collected(ending)
        stopping = time.monotonic()
        stats = await self._stop()
        teardown_s = time.monotonic() - stopping
        artifacts = SessionArtifacts(
            **about(self._queued),
            patch=found.patch,
            log=found.log,
            answer=found.answer,
            files=found.files,
            postrun_s=time.monotonic() - began,
            teardown_s=teardown_s,
        )
        bypass = await self._house.models.among(stats.peers)
        if bypass:
            metrics.bypasses.inc()
            _log.warning("bypassed the proxy", attempt=self.label, models=bypass)
        await self._ledger.publish(self._exited(ending, stats, bypass), artifacts)
        metrics.stage_s.labels("postrun").observe(time.monotonic() - began)
        metrics.attempts.labels(ending.fault, ending.cause).inc()

    def _exited(self, ending: Ending, stats: RuntimeStats, bypass: tuple[str, ...]) -> SessionExited:
        return SessionExited(
            **about(self._queued),
            exit_code=ending.exit_code,
            timed_out=ending.timed_out,
            cancelled=ending.cancelled or self._ledger.state.cancel is not None,
            fault=ending.fault,
            cause=ending.cause,
            detail=self._redacted(ending.detail)[:_TAIL],
            log_tail=self._redacted(ending.log_tail)[-_TAIL:],
            run_s=ending.run_s,
            peak_rss_mb=stats.peak_rss / (1 << 20),
            cpu_s=stats.cpu_s,
            peers=stats.peers,
            bypass=bypass,
        )

    async def _hurried(self, work: Coroutine[Any, Any, None], until: float) -> Interrupt | None:
        """None when it is over, else `timeout`, or `cancelled` some seconds after a cancel. Raises _GaveUp so long
        after a drain."""
        try:
            await self._interrupts.within(work, until, f"postrun:{self.label}", grace=_HURRY_S)
        except Interrupted as interrupted:
            if interrupted.why in ("drained", "lost"):
                await self._lose()
            return interrupted.why
        return None

    async def _collected(self, ending: Ending) -> tuple[Artifacts, Ending]:
        runtime, found = self._preparation.runtime, Artifacts()
        if runtime is None:
            return found, ending
        left = self._house.clock.monotonic(self.deadlines.attempt) - time.monotonic()
        limit = max(_COLLECT_LEAST_S, min(_COLLECT_S, left))
        work = collect(
            found,
            runtime,
            self._house.blobs,
            key=self._key,
            log=self._output.read(),
            answer=self._end.result.stdout if self._end and self._end.result else b"",
            files=self._queued.spec.artifacts,
            files_bytes=self._house.settings.gateway_files_mb << 20,
            started=self._end is not None,
        )
        try:
            why = await self._hurried(work, time.monotonic() + limit)
        except Unavailable as error:
            return found, replace(ending, fault="infra", cause=error.cause, detail=str(error))
        if why == "timeout":
            found.trouble, found.exhausted = f"collecting took more than {limit:.0f} s", "disk"
        ending = replace(ending, cancelled=ending.cancelled or why == "cancelled")
        if found.trouble and ending.fault == "none" and not ending.cancelled:
            cause = "resource_exhausted" if found.exhausted else "environment_broken"
            ending = replace(ending, fault="agent", cause=cause, detail=found.trouble)
        return found, ending

    async def _broke(self, error: Exception) -> None:
        with suppress(_GaveUp, Superseded):
            await self._lose(self._redacted(f"its gateway failed at it: {error!r}")[:_TAIL])

    async def _lose(self, detail: str = "its gateway was drained") -> NoReturn:
        """Give up before the attempt has ended; the scheduler decides on another. Raises _GaveUp or Superseded."""
        lost = SessionLost(**about(self._queued), detail=detail)
        sealed = [] if self._sealed() else [SessionSealed(**about(self._queued), reason="lost")]
        await self._ledger.publish(lost, *sealed)
        metrics.attempts.labels("infra", "node_lost").inc()
        raise _GaveUp

    async def _stop(self) -> RuntimeStats:
        try:
            return await self._preparation.stop()
        except RuntimeFault as error:
            # The reaper tries again; the attempt's own result stands.
            _log.error("the runtime couldn't be removed", attempt=self.label, error=str(error))
            return RuntimeStats()

    # -- small things

    def _runtime(self) -> Runtime:
        runtime = self._preparation.runtime
        if runtime is None:
            raise RuntimeFault(f"{self.label} has no runtime")
        return runtime

    def _redacted(self, text: str) -> str:
        return redact(text.encode(), self._key).decode(errors="replace")

    def _sealed(self) -> bool:
        attempt = self._ledger.state.attempts.get(self._queued.attempt)
        return attempt is not None and attempt.sealed is not None

    async def _seal(self, reason: SealReason) -> None:
        if not self._sealed():
            await self._publish(SessionSealed, reason=reason)

    async def _publish(self, kind: type[SessionEvent], **fields: Any) -> None:
        await self._ledger.publish(kind(**about(self._queued), **fields))


def _blamable(error: Exception) -> bool:
    """Whether it tells something about the attempt, and not about the log or this code."""
    kinds = (BlobError, ConfigError, HarnessError, RuntimeFault, OSError)
    return isinstance(error, kinds) and not isinstance(error, BusError)
