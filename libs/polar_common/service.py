"""How every service process lives: settings, logs, a bus, a FastStream broker for plain handlers, signals, readiness.

A service's `app.py` builds a `Service`, adds background work and HTTP, and calls `run`. SIGTERM and SIGINT set `stop`;
the service then takes nothing new, ends what runs within `grace_s`, and closes the connection.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import nats.errors
import orjson
import structlog
import uvicorn
from faststream import AckPolicy
from faststream.nats import JStream, NatsBroker, NatsMessage, PullSub
from faststream.security import BaseSecurity, SASLPlaintext
from nats.aio.client import Client

from .bus import Bus, Stored
from .bus.poison import settle
from .bus.read import from_delivery
from .connection import Connection, connection
from .errors import BusError, Unavailable
from .ids import new_id
from .logs import configure
from .settings import HouseSettings
from .tasks import cancel_and_wait, spawn
from .topology import ConsumerSpec

__all__ = ["Service", "die_with_parent", "own_process", "serve_http", "tell_ready"]

_BACKLOG = 2048
_LEAVING_S = 3.0
_log = structlog.get_logger(__name__)


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent dies (Linux); a house leaves no process behind."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)


_alone = False
"""Whether this process is one service's own (`own_process`)."""
_announced = False
"""Whether standard output is told when it is ready."""


def own_process(*, announce: bool = False) -> None:
    """Say that this process exists for one service: it then ends in time, whatever hangs while it leaves."""
    global _alone, _announced
    _alone, _announced = True, announce


def tell_ready(path: Path | None, **facts: Any) -> None:
    """Log that a service is ready; its facts go into `path` and, of an announced one, onto standard output."""
    _log.info("ready", **facts)
    body = orjson.dumps({"pid": os.getpid(), **facts})
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        draft.write_bytes(body)
        draft.rename(path)
    if _announced:
        sys.stdout.write(body.decode() + "\n")
        sys.stdout.flush()


def _end_in(seconds: float) -> None:
    """A service that can't say goodbye, because the log died with the house, mustn't stay for ever."""

    def end() -> None:
        time.sleep(seconds)
        _log.error("didn't end by itself", after_s=seconds)
        os._exit(70)

    threading.Thread(target=end, daemon=True, name="last-resort").start()


class Service:
    """One service process."""

    def __init__(self, name: str, settings: HouseSettings, *, grace_s: float = 10.0) -> None:
        self.name = name
        self.settings = settings
        self.instance = settings.instance or f"{socket.gethostname()}-{os.getpid()}-{new_id()[:4]}"
        self.producer = f"{name}/{self.instance}"
        self.stop = asyncio.Event()
        self.grace_s = grace_s
        self._log = connection(settings.nats, settings.nats_user, settings.nats_password.get_secret_value(), settings)
        self.broker = _broker(self._log, self.producer)
        self._bus: Bus | None = None
        self._work: list[tuple[str, Callable[[], Awaitable[None]]]] = []
        self.facts: dict[str, Any] = {}
        """Told in the ready file beside port and pid."""

    @property
    def bus(self) -> Bus:
        """The connection; there once `run` has connected."""
        if self._bus is None:
            raise RuntimeError("the service isn't running")
        return self._bus

    def background(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Add a coroutine that runs until `stop`; if it fails, the process ends (and its supervisor restarts it)."""
        self._work.append((name, work))

    def on(self, spec: ConsumerSpec, payload: Any, handler: Callable[[Stored], Awaitable[None]]) -> None:
        """Handle a durable consumer's messages one by one: acknowledged after success, else by the poison policy.

        `payload` is the event type (or union) for the AsyncAPI document. Work that lasts needs a `bus.Worker` instead:
        here nothing renews the lease.
        """

        async def call(message):  # type: ignore[no-untyped-def]
            try:
                await handler(from_delivery(message.raw_message))
            except Exception as error:
                await _settled(self.bus, spec.durable, message, error)
            else:
                await self.bus.reply(message.raw_message, b"+ACK")

        # What arrives is the whole message (`_undecoded`); the annotation is what the AsyncAPI document shows.
        call.__annotations__ = {"message": payload, "return": None}
        call.__name__ = spec.durable.replace("-", "_")
        call.__doc__ = handler.__doc__
        subscriber = self.broker.subscriber(
            spec.filters[0],
            durable=spec.durable,
            stream=JStream(spec.stream, declare=False),
            inbox_prefix=f"{self._log.inbox}.".encode(),
            pull_sub=PullSub(batch_size=1, timeout=2.0),
            ack_policy=AckPolicy.MANUAL,
            decoder=_undecoded,
        )
        subscriber(call)

    async def run(self, setup: Callable[[], Awaitable[None]] | None = None) -> None:
        """Connect, set up, start handlers and background work, wait for `stop`."""
        die_with_parent()
        configure(self.name, self.settings.log_level)
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self.stop.set)
        self._bus = Bus(await _connected(self.broker, self._log.url), self.producer)
        tasks: list[asyncio.Task[None]] = []
        try:
            if setup is not None:
                await setup()
            await self.broker.start()
            tasks = [spawn(_as_coroutine(work), name=name) for name, work in self._work]
            self._tell_ready()
            stopping = spawn(_wait(self.stop), name="stop")
            done, _ = await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
            self.stop.set()
            if _alone:
                _end_in(self.grace_s + _LEAVING_S)
            if tasks:
                await asyncio.wait(tasks, timeout=self.grace_s)
            for task in done:
                task.result()
        finally:
            self.stop.set()
            await cancel_and_wait(*tasks)
            await self._disconnect()

    async def _disconnect(self) -> None:
        try:
            await self.broker.stop()
        except (OSError, TimeoutError, nats.errors.Error) as error:
            # The log is away, so there is nobody to say goodbye to; what wasn't acknowledged is delivered again.
            _log.warning("left without the log", error=repr(error))

    def _tell_ready(self) -> None:
        tell_ready(self.settings.ready_file, service=self.name, instance=self.instance, **self.facts)


def _broker(where: Connection, name: str) -> NatsBroker:
    """The connection of a service: reconnects for ever."""
    return NatsBroker(
        where.servers,
        name=name,
        max_reconnect_attempts=-1,
        reconnect_time_wait=1,
        connect_timeout=2,
        pending_size=64 << 20,
        inbox_prefix=where.inbox,
        security=SASLPlaintext(username=where.user, password=where.password, ssl_context=where.tls)
        if where.user
        else BaseSecurity(ssl_context=where.tls),
        logger=None,
        apply_types=False,
    )


async def _connected(broker: NatsBroker, url: str, wait_s: float = 30.0) -> Client:
    """Wait for the server. Raises Unavailable after `wait_s` seconds."""
    try:
        # With reconnects without end, `connect` itself doesn't end either.
        async with asyncio.timeout(wait_s):
            return await broker.connect()
    except (OSError, nats.errors.Error, TimeoutError) as error:
        raise Unavailable(f"no NATS server at {url}, or it refuses this service: {error!r}") from error


async def _undecoded(message: NatsMessage) -> NatsMessage:
    """Bodies are decoded by `events.decode`, which knows upcasters and tells poison from the future."""
    return message


async def _settled(bus: Bus, consumer: str, message: NatsMessage, error: Exception) -> None:
    try:
        await settle(bus, consumer, message.raw_message, error)
    except BusError as failure:
        # Unsettled: the server delivers it again after the ack wait.
        _log.warning("settling failed", consumer=consumer, error=repr(failure))


async def _as_coroutine(work: Callable[[], Awaitable[None]]) -> None:
    await work()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def serve_http(
    app: Any, service: Service, *, host: str, port: int, uds: str | None = None, fact: str = "port", **options: Any
) -> Callable[[], Awaitable[None]]:
    """Bind now (port 0: any free one, told as `fact`); the returned work serves until the service stops."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=75,
        **options,
    )
    server = uvicorn.Server(config)
    if uds is not None:
        with suppress(FileNotFoundError):
            os.unlink(uds)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(uds)
        sock.listen(_BACKLOG)
        os.chmod(uds, 0o666)
    else:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        # Whoever reads the ready file may connect at once; he waits in the backlog until the server runs.
        sock.listen(_BACKLOG)
        service.facts[fact] = sock.getsockname()[1]

    async def work() -> None:
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        serving = spawn(server._serve([sock]), name=f"http:{fact}")
        await service.stop.wait()
        server.should_exit = True
        await serving

    return work
