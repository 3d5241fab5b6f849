"""Bus in, bus out: artifacts become an evaluation. The first one on the log counts; a later one is a repeat."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog
from prometheus_client import Counter, Histogram

from polar_common import subjects
from polar_common.blobs import Blobs
from polar_common.bus import Bus, Lease
from polar_common.bus.poison import BACKOFFS_S
from polar_common.errors import BusError, ConfigError, Conflict, EvaluationError, Poison, PolarError
from polar_common.events import EvaluationEvaluated, SessionArtifacts
from polar_common.packing import BlobRef
from polar_common.session_state import Attempt, SessionState, fold
from polar_common.tasks import cancel_and_wait
from polar_runtime import Runtime, RuntimeSpec, make_runtime

from .clean import Copies
from .domain import outcome_of, reward_of, unusable, wanted
from .evaluators.base import Case, Evaluator, Verdict
from .evaluators.registry import find
from .prewarm import Prewarmed
from .settings import EvaluatorSettings

__all__ = ["LIVE", "Evaluations"]

LIVE = "live"
"""The evaluation that counts for a session's outcome; later ones have names of their own."""
_DETAIL = 4000
_log = structlog.get_logger(__name__)
_seconds = Histogram("polar_evaluation_seconds", "Time of an evaluation", ["evaluator"])
_outcomes = Counter("polar_evaluations", "Evaluations", ["evaluator", "outcome"])


class Evaluations:
    """The handler of one evaluator process."""

    def __init__(
        self,
        bus: Bus,
        settings: EvaluatorSettings,
        make: Callable[[RuntimeSpec], Runtime] = make_runtime,
        find_evaluator: Callable[[str], Evaluator] = find,
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._blobs = Blobs(bus, settings.segment)
        self._find = find_evaluator
        self.copies = Copies(settings, self._blobs, make)
        self.prewarmed = Prewarmed(bus, self.copies, settings.segment, settings.evaluator_prewarmed)
        self.prewarmed.on_cancelled = self._give_up
        self._under_way: dict[str, asyncio.Future[EvaluationEvaluated]] = {}

    async def on_artifacts(self, lease: Lease) -> None:
        """One delivery of an attempt's `artifacts`."""
        artifacts = lease.stored.event
        if not isinstance(artifacts, SessionArtifacts):
            raise Poison(f"{lease.stored.subject} holds a {artifacts.kind}")
        session, attempt = artifacts.session, artifacts.attempt
        state = await self._state(session, lease.stored.sequence)
        if not wanted(state, attempt) or await self._done(session, attempt):
            await self.prewarmed.drop(session)
            return
        current = state.attempts[attempt]
        try:
            event = await self._unless_cancelled(artifacts, current)
        except BusError:
            raise
        except PolarError as error:
            if lease.deliveries <= _retries(error):
                raise
            _log.error("not evaluated", session=session, attempt=attempt, error=str(error), tries=lease.deliveries)
            event = _failed(artifacts, current, error)
        if event is not None:
            await self._publish(event)

    async def _unless_cancelled(self, artifacts: SessionArtifacts, attempt: Attempt) -> EvaluationEvaluated | None:
        """None where the session is cancelled meanwhile: nobody waits for it any more."""
        work = self._under_way[artifacts.session] = asyncio.ensure_future(self._evaluated(artifacts, attempt))
        try:
            await asyncio.wait({work})
            return None if work.cancelled() else work.result()
        finally:
            self._under_way.pop(artifacts.session, None)
            await cancel_and_wait(work)

    def _give_up(self, session: str) -> None:
        if session in self._under_way:
            self._under_way[session].cancel()

    async def _state(self, session: str, at_least: int) -> SessionState:
        return fold(session, await self._bus.read_session(session, completions=False, at_least=at_least))

    async def _done(self, session: str, attempt: int) -> bool:
        subject = subjects.evaluation(session, attempt, LIVE, "evaluated")
        return await self._bus.last(subject) is not None

    async def _evaluated(self, artifacts: SessionArtifacts, attempt: Attempt) -> EvaluationEvaluated:
        queued, exited = attempt.queued, attempt.exited
        if queued is None or exited is None:
            raise Poison(f"{artifacts.session}.{artifacts.attempt} has artifacts and no beginning or end")
        spec = queued.spec
        evaluator = self._find(spec.evaluator.kind)
        patch, answer = await self._body(artifacts.patch), await self._body(artifacts.answer)
        began = time.monotonic()

        @asynccontextmanager
        async def clean() -> AsyncIterator[Runtime]:
            warm = await self.prewarmed.take(artifacts.session)
            async with self.copies.clean(queued, patch, warm) as filled:
                yield filled

        log_bytes = int(self._settings.evaluator_log_mb * (1 << 20))
        verdict = await _asked(evaluator, Case(spec, answer, patch, clean, log_bytes))
        eval_s = time.monotonic() - began
        outcome = outcome_of(exited, verdict, acted=bool(patch or answer.strip()))
        _seconds.labels(spec.evaluator.kind).observe(eval_s)
        _outcomes.labels(spec.evaluator.kind, outcome).inc()
        return EvaluationEvaluated(
            **_about(artifacts),
            evaluator=spec.evaluator.kind,
            outcome=outcome,
            reward=reward_of(verdict),
            trace_rewards=dict(verdict.trace_rewards),
            exit_code=verdict.exit_code,
            detail=verdict.detail[:_DETAIL],
            log=await self._blobs.put(verdict.log, "text/plain") if verdict.log else None,
            details=dict(verdict.details),
            eval_s=eval_s,
        )

    async def _body(self, ref: BlobRef | None) -> bytes:
        return b"" if ref is None else await self._blobs.get(ref)

    async def _publish(self, event: EvaluationEvaluated) -> None:
        try:
            await self._bus.once(event)
        except Conflict:
            _log.info("a repeat: the first evaluation counts", session=event.session, attempt=event.attempt)


async def _asked(evaluator: Evaluator, case: Case) -> Verdict:
    try:
        evaluator.check(case.spec)
        verdict = await evaluator.evaluate(case)
    except PolarError:
        raise
    except (Exception, SystemExit) as error:
        # A user's own evaluator may raise anything, and scripts end themselves; that says nothing about the agent.
        raise EvaluationError(f"{case.spec.kind}: {error!r}") from error
    if wrong := unusable(verdict):
        raise EvaluationError(f"{case.spec.kind} returned {wrong}")
    return verdict


def _retries(error: PolarError) -> int:
    """How often an evaluation that failed in this way is tried again: a host may come back, a flaky step may work the
    next time, a wrong spec stays wrong."""
    if isinstance(error, ConfigError):
        return 0
    return len(BACKOFFS_S) if error.retryable else 2


def _about(artifacts: SessionArtifacts) -> dict[str, str | int]:
    return {
        "session": artifacts.session,
        "attempt": artifacts.attempt,
        "run": artifacts.run,
        "task": artifacts.task,
        "causation": artifacts.event_id,
        "evaluation": LIVE,
    }


def _failed(artifacts: SessionArtifacts, attempt: Attempt, error: PolarError) -> EvaluationEvaluated:
    """The session ends all the same, as an infrastructure error, which is never trained."""
    return EvaluationEvaluated(
        **_about(artifacts),
        evaluator=attempt.queued.spec.evaluator.kind if attempt.queued else "",
        outcome="infra_error",
        reward=None,
        detail=str(error)[:_DETAIL],
        details={"cause": "config" if isinstance(error, ConfigError) else "evaluator"},
    )
