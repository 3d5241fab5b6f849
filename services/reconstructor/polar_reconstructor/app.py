"""Wiring: two durable consumers, one build."""

from __future__ import annotations

import asyncio

from polar_common.events import GroupClosed, SessionArtifacts, SessionCancelled, SessionFailed
from polar_common.service import Service
from polar_common.topology import Topology, consumers

from .handlers import Reconstructor
from .rules import load
from .settings import ReconstructorSettings

__all__ = ["build_service", "run"]


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

    service.on(
        ended,
        SessionArtifacts | SessionFailed | SessionCancelled,
        lambda stored: reconstructor().on_ended(stored),
    )
    service.on(closed, GroupClosed, lambda stored: reconstructor().on_group_closed(stored))
    return service


def run(argv: list[str] | None = None) -> None:
    """Entry point of `polar run-service reconstructor`."""
    service = build_service(ReconstructorSettings())
    asyncio.run(service.run())
