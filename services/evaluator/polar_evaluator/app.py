"""Wiring of an evaluator process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from polar_common import subjects
from polar_common.bus import Bus, Worker
from polar_common.errors import ConfigError, PolarError
from polar_common.ids import segment_of
from polar_common.service import Service
from polar_common.session_state import newest_state
from polar_common.tasks import cancel_and_wait, spawn
from polar_common.topology import Topology, consumers
from polar_runtime import is_owned, reap

from .domain import moot
from .handlers import LIVE, Evaluations
from .settings import EvaluatorSettings

__all__ = ["EvaluatorService", "run"]

_LEAVING_S = 10.0
_log = structlog.get_logger(__name__)


class EvaluatorService:
    """One evaluator: a worker on the artifacts, and a reaper of its clean copies."""

    def __init__(self, settings: EvaluatorSettings) -> None:
        self.settings = settings
        self.service = Service("evaluator", settings, grace_s=settings.evaluator_drain_s + _LEAVING_S)

    async def run(self) -> None:
        await self.service.run(self._setup)

    async def _setup(self) -> None:
        settings, service = self.settings, self.service
        settings.root.mkdir(parents=True, exist_ok=True)
        evaluations = Evaluations(service.bus, settings)
        topology = Topology(segment=settings.segment, work_classes=settings.work_classes, build=settings.build)
        spec = next(c for c in consumers(topology) if c.durable == "evaluator")
        worker = Worker(service.bus, spec, evaluations.on_artifacts, settings.evaluator_slots)
        service.background("work", lambda: self._work(worker))
        service.background("prewarm", lambda: self._prewarm(evaluations))
        service.background("reaper", lambda: self._reap(evaluations))

    async def _work(self, worker: Worker) -> None:
        """After SIGTERM what runs may finish for a while; then it is left to others."""
        stop = self.service.stop
        working = asyncio.ensure_future(worker.run(stop))
        try:
            await stop.wait()
            await asyncio.wait({working}, timeout=self.settings.evaluator_drain_s)
        finally:
            await worker.abandon()
            await asyncio.gather(working, return_exceptions=True)

    async def _prewarm(self, evaluations: Evaluations) -> None:
        following = spawn(evaluations.prewarmed.follow(), name="prewarm")
        stopping = spawn(self.service.stop.wait(), name="stopping")
        try:
            await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            await cancel_and_wait(following, stopping)

    async def _reap(self, evaluations: Evaluations) -> None:
        settings, stop = self.settings, self.service.stop
        while not stop.is_set():
            try:
                await reap(settings.root, lambda label: is_live(self.service.bus, evaluations, settings.root / label))
            except (PolarError, OSError) as error:
                _log.warning("reaping failed", error=repr(error))
            try:
                await asyncio.wait_for(stop.wait(), settings.evaluator_reap_s)
            except TimeoutError:
                continue


async def is_live(bus: Bus, evaluations: Evaluations, base: Path) -> bool:
    """In doubt it lives: evaluators of one host see each other's copies, also those made ahead for what still runs."""
    label = base.name
    session, _, rest = label.partition(".")
    attempt, _, _ = rest.partition(".")
    if label in evaluations.copies.live or not attempt.isdigit():
        return True
    try:
        segment = segment_of(session)
    except ConfigError:
        return True
    if not await bus.holds(segment):
        # It was dropped, for all of it was over.
        return False
    if await bus.last(subjects.evaluation(session, int(attempt), LIVE, "evaluated")) is not None:
        return False
    state = await newest_state(bus, session)
    if int(attempt) not in state.attempts:
        # Another log's.
        return is_owned(base)
    return not moot(state, int(attempt))


def run(argv: list[str] | None = None) -> None:
    """Entry point of `polar run-service evaluator`. All settings come from the environment."""
    asyncio.run(EvaluatorService(EvaluatorSettings()).run())
