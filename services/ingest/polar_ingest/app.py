"""The ingest process: HTTP edge, scheduler, callbacks."""

from __future__ import annotations

import asyncio
import sys

import httpx

from polar_common.bus import Worker
from polar_common.errors import BusError, ConfigError
from polar_common.service import Service, serve_http
from polar_common.topology import ConsumerSpec, Topology, consumers

from .api import Api, check_exposure
from .handlers import CONSUMER, Callbacks
from .scheduler import Scheduler
from .settings import IngestSettings

__all__ = ["main", "run"]


def _callbacks_spec(settings: IngestSettings) -> ConsumerSpec:
    topology = Topology(segment=settings.segment, work_classes=settings.work_classes, build=settings.build)
    return next(c for c in consumers(topology) if c.durable == CONSUMER)


async def main(settings: IngestSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError before anything is opened."""
    check_exposure(settings.host, settings.token.get_secret_value())
    service = Service("ingest", settings)

    async def setup() -> None:
        scheduler = Scheduler(service.bus, settings)
        api = Api(service.bus, scheduler, settings)
        client = httpx.AsyncClient(timeout=settings.ingest_callback_timeout_s, trust_env=False)
        callbacks = Callbacks(service.bus, scheduler.specs, settings, client)
        worker = Worker(service.bus, _callbacks_spec(settings), callbacks.handle, slots=settings.ingest_callback_slots)

        async def deliver() -> None:
            async with client:
                await worker.run(service.stop)

        async def schedule() -> None:
            await scheduler.run(service.stop)

        service.background("scheduler", schedule)
        service.background("callbacks", deliver)
        try:
            serving = await serve_http(api.app(), service, host=settings.host, port=settings.port)
        except OSError as error:
            raise ConfigError(f"{settings.port} on {settings.host}: {error.strerror}", "port") from error
        service.background("http", serving)

    await service.run(setup)


def run(argv: list[str] | None = None) -> None:
    """Entry point of `polar run-service ingest`."""
    try:
        asyncio.run(main(IngestSettings()))
    except (ConfigError, BusError, OSError) as error:
        sys.exit(f"ingest: {error}")
