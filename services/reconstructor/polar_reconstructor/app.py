"""Wiring: two durable consumers, one build."""

from __future__ import annotations

import asyncio

import structlog
import uvloop

from polar_common.bus import Stored
from polar_common.errors import Unavailable
from polar_common.events import GroupClosed, SessionArtifacts, SessionCancelled, SessionFailed
from polar_common.service import Service
from polar_common.topology import Topology, consumers

from .handlers import Reconstructor
from .rules import load
from .settings import ReconstructorSettings

__all__ = ["build_service", "run"]

_log = structlog.get_logger(__name__)


def build_service(settings: ReconstructorSettings) -> Service:
    """The service, unstarted. Raises ConfigError for a rule set that isn't one."""
    rules = load(settings.reconstructor_rules)
    service = Service("reconstructor", settings)
    topology = Topology(segment=settings.segment, build=settings.build)
    ended, closed = (c for c in consumers(topology) if c.owner == "reconstructor")
    handler: list[Reconstructor] = []

    def reconstructor() -> Reconstructor:
        if not handler:
            handler.append(Reconstructor(service.bus, settings.build, rules))
        return handler[0]

    async def on_ended(stored: Stored) -> None:
        """A session ended: publish its traces, their manifest, and the fact."""
        await reconstructor().on_ended(stored)

    async def on_group_closed(stored: Stored) -> None:
        """A group closed: publish what this build's trainers see of it."""
        await reconstructor().on_group_closed(stored)

    service.on(ended, SessionArtifacts | SessionFailed | SessionCancelled, on_ended)
    service.on(closed, GroupClosed, on_group_closed)
    return service


async def _claim(service: Service, settings: ReconstructorSettings) -> None:
    """The build stays one rule set's. Raises ConfigError where it was begun under another one."""
    maker = Reconstructor(service.bus, settings.build, load(settings.reconstructor_rules))
    while not service.stop.is_set():
        try:
            await maker.claim()
            return
        except Unavailable as error:
            _log.warning("the log doesn't answer yet", error=str(error))
            await asyncio.sleep(1.0)


def run(argv: list[str] | None = None) -> None:
    """Entry point of `polar run-service reconstructor`."""
    settings = ReconstructorSettings()
    service = build_service(settings)
    uvloop.run(service.run(lambda: _claim(service, settings)))
