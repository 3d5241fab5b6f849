"""Wiring of a gateway process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polar_common.bus import Worker
from polar_common.errors import ConfigError, Unavailable
from polar_common.service import Service, serve_http
from polar_common.tasks import cancel_and_wait, spawn
from polar_common.topology import events_stream, work_consumer

from .handlers import Gateway
from .house import House, make_house
from .reaper import reap_once, reap_until
from .settings import GatewaySettings

__all__ = ["GatewayService", "run"]

_LEAVING_S = 15.0
_CLOCK_S = 60.0
_log = structlog.get_logger(__name__)


class GatewayService:
    """One gateway: a worker per class, cancels, clock, reaper, drain. `house` may be changed before `run`."""

    def __init__(self, settings: GatewaySettings) -> None:
        if not settings.secret.get_secret_value():
            raise ConfigError("no secret to sign session keys with; `polar up` makes one", "secret")
        self.settings = settings
        self.service = Service("gateway", settings, grace_s=settings.gateway_drain_s + _LEAVING_S)
        self._told_to_drain = False
        self._empty = asyncio.Event()
        self.gateway: Gateway | None = None
        self._workers: list[Worker] = []

    def adapt(self, house: House) -> None:
        """For tests and embedders: replace parts of the house before work begins."""

    async def run(self) -> None:
        await self.service.run(self._setup)

    async def _setup(self) -> None:
        settings, service = self.settings, self.service
        settings.root.mkdir(parents=True, exist_ok=True)
        settings.proxy_socket.parent.mkdir(parents=True, exist_ok=True)
        house = make_house(settings, service.bus, service.instance)
        self.adapt(house)
        await house.clock.sync(service.bus, events_stream(settings.segment))
        self.gateway = gateway = Gateway(house)
        await reap_once(gateway)
        for work_class in settings.gateway_classes:
            spec = work_consumer(work_class, settings.segment)
            worker = Worker(service.bus, spec, gateway.on_queued, self._slots_of(len(self._workers)))
            worker.paused = self.draining
            self._workers.append(worker)
            service.background(f"work:{work_class}", lambda w=worker: w.run(service.stop))  # type: ignore[misc]
        house.pools.init.on_free = self._wake
        service.background("cancels", lambda: self._while_needed(gateway.follow_cancels()))
        service.background("reaper", lambda: reap_until(gateway, service.stop))
        service.background("clock", lambda: self._while_needed(self._keep_time(house)))
        service.background("watch", lambda: self._while_needed(self._watch_drain()))
        service.background("drain", lambda: self._drain(gateway))
        if settings.gateway_metrics_port is not None:
            service.background("http", await self._http(settings.gateway_metrics_port))
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._told)

    def _slots_of(self, index: int) -> Callable[[], int]:
        """How many messages worker `index` may hold: those it has, and its share of the free INIT places."""

        def slots() -> int:
            worker = self._workers[index]
            if self.gateway is None:
                return worker.active
            free = self.gateway.house.pools.init.free
            if len(self._workers) > 1 and free:
                others = sum(w.pending for w in self._workers if w is not worker)
                # At least one, or a class would wait until another's standing request expires.
                free = max(1, min(-(-free // len(self._workers)), free - others))
            return worker.active + free

        return slots

    def _wake(self) -> None:
        for worker in self._workers:
            worker.wake()

    @property
    def draining(self) -> bool:
        """Told to take nothing new, by signal or file."""
        file = self.settings.gateway_drain_file
        return self._told_to_drain or (file is not None and file.exists())

    def _told(self) -> None:
        self._told_to_drain = True

    async def _watch_drain(self) -> None:
        draining = self.draining
        while True:
            if self.draining != draining:
                draining = self.draining
                _log.info("takes nothing new" if draining else "takes work again")
                for worker in self._workers:
                    worker.paused = draining
            await asyncio.sleep(0.2)

    async def _while_needed(self, work: Coroutine[Any, Any, None]) -> None:
        """Until the service has stopped and its last attempt is over."""
        task = spawn(work, name="background")
        emptied = spawn(self._empty.wait(), name="emptied")
        try:
            await asyncio.wait({task, emptied}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            await cancel_and_wait(task, emptied)

    async def _keep_time(self, house: House) -> None:
        while True:
            await asyncio.sleep(_CLOCK_S)
            try:
                await house.clock.sync(self.service.bus, events_stream(self.settings.segment))
            except Unavailable as error:
                _log.warning("the log's time is unknown", error=str(error))

    async def _drain(self, gateway: Gateway) -> None:
        """After SIGTERM the workers take nothing new; what still runs after a while is given up."""
        loop = asyncio.get_running_loop()
        await self.service.stop.wait()
        try:
            await _emptied(gateway, loop.time() + self.settings.gateway_drain_s)
            for attempt in list(gateway.live.values()):
                attempt.interrupt("drained")
            await _emptied(gateway, loop.time() + _LEAVING_S)
        finally:
            self._empty.set()

    async def _http(self, port: int) -> Callable[[], Awaitable[None]]:
        async def metrics(_: Request) -> Response:
            return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

        async def health(_: Request) -> Response:
            live = len(self.gateway.live) if self.gateway else 0
            return JSONResponse({"service": "gateway", "live": live, "draining": self.draining})

        app = Starlette(routes=[Route("/metrics", metrics), Route("/health", health)])
        return await serve_http(app, self.service, host=self.settings.host, port=port, fact="metrics_port")


async def _emptied(gateway: Gateway, until: float) -> None:
    loop = asyncio.get_running_loop()
    while gateway.live and loop.time() < until:
        await asyncio.sleep(0.05)


def run(argv: list[str] | None = None) -> None:
    """Entry point of `polar run-service gateway`. All settings come from the environment."""
    asyncio.run(GatewayService(GatewaySettings()).run())
