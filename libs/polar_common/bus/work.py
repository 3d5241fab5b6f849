"""Leased work: a consumer's messages handed to a handler, at most `slots` at a time, renewed while it runs.

A lease that the server hasn't confirmed for two thirds of the consumer's ack wait (20 of 30 seconds, monotonic clock)
is lost: `Lease.lost` is set and the handler is cancelled, before the server gives the work to somebody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import nats.errors
import structlog
from nats.aio.msg import Msg
from opentelemetry.context import attach, detach

from polar_common.context import trace_of
from polar_common.errors import BusError, Unavailable
from polar_common.tasks import cancel_and_wait, checkpoint, spawn
from polar_common.topology import ACK_WAIT_S, ConsumerSpec

from .client import Bus
from .poison import settle
from .pull import Pull
from .read import Stored, from_delivery

__all__ = ["Lease", "Worker"]

_log = structlog.get_logger(__name__)


class Lease:
    """One message under lease."""

    def __init__(self, bus: Bus, msg: Msg, ack_wait: float = ACK_WAIT_S) -> None:
        self._bus = bus
        self._msg = msg
        self._ack_wait = ack_wait
        self.stored: Stored = from_delivery(msg)
        self.deliveries = msg.metadata.num_delivered
        self.trace = trace_of(msg.headers)
        """The trace context under which the work was published; the handler runs in it."""
        self.lost = asyncio.Event()
        """Set when the lease may have passed to somebody else."""

    async def keep(self) -> None:
        """Renew every third of the ack wait until cancelled; returns when the lease is lost."""
        loop = asyncio.get_running_loop()
        lost_at, pause = loop.time() + self._ack_wait * 2 / 3, self._ack_wait / 3
        while (left := lost_at - loop.time()) > 0:
            checkpoint()
            await asyncio.sleep(min(pause, left))
            asked = loop.time()
            if asked >= lost_at:
                # Perhaps this process was stopped. The server would confirm, though somebody else has the work.
                break
            try:
                timeout = max(0.05, min(self._ack_wait / 6, lost_at - asked))
                await self._bus.reply(self._msg, b"+WPI", timeout=timeout)
                lost_at, pause = asked + self._ack_wait * 2 / 3, self._ack_wait / 3
            except Unavailable as error:
                pause = self._ack_wait / 30
                _log.warning("lease not confirmed", subject=self.stored.subject, error=repr(error))
        self.lost.set()

    async def ack(self) -> None:
        """The work is done; waits for the server's confirmation."""
        await self._bus.reply(self._msg, b"+ACK")

    async def fail(self, consumer: str, error: BaseException) -> None:
        """Hand the message to the poison policy."""
        await settle(self._bus, consumer, self._msg, error)


class Worker:
    """Runs `handler` for each message of a durable consumer. `slots()` says how many more it may take right now."""

    def __init__(
        self,
        bus: Bus,
        spec: ConsumerSpec,
        handler: Callable[[Lease], Awaitable[None]],
        slots: int | Callable[[], int] = 1,
    ) -> None:
        self._bus = bus
        self._spec = spec
        self._handler = handler
        self._slots: Callable[[], int] = slots if callable(slots) else _constant(slots)
        self._ack_wait = spec.ack_wait
        self._running: set[asyncio.Task[None]] = set()
        self._pull: Pull | None = None
        self._wake = asyncio.Event()
        self.paused = False
        """While set, nothing new is taken; what was asked for is taken back."""

    @property
    def active(self) -> int:
        """Messages being handled."""
        return len(self._running)

    @property
    def pending(self) -> int:
        """Messages asked for that haven't come yet."""
        return self._pull.pending if self._pull is not None else 0

    def wake(self) -> None:
        """Call when `slots()` may have grown."""
        self._wake.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set; then take nothing new and wait for what runs."""
        while not stop.is_set():
            self._pull = pull = Pull(self._bus.nc, self._spec.stream, self._spec.durable)
            try:
                info = await self._bus.js.consumer_info(self._spec.stream, self._spec.durable)
                # The server's own value decides when it gives the work to somebody else.
                self._ack_wait = info.config.ack_wait or self._spec.ack_wait
                await self._pulling(pull, stop)
            except (BusError, nats.errors.Error) as error:
                if self._bus.nc.is_closed:
                    break
                _log.info("pulling again", consumer=self._spec.durable, error=repr(error))
                await asyncio.sleep(0.5)
            finally:
                await self._give_back(pull)
        if self._running:
            await asyncio.gather(*self._running, return_exceptions=True)

    async def abandon(self) -> None:
        """Cancel what runs; its leases lapse and others take over."""
        await cancel_and_wait(*self._running)

    async def _pulling(self, pull: Pull, stop: asyncio.Event) -> None:
        while not stop.is_set():
            if self.paused:
                await self._give_back(pull)
                await asyncio.sleep(0.25)
                continue
            free = self._slots() - len(self._running) - pull.pending
            if free > 0:
                await pull.want(free)
            if pull.pending == 0:
                self._wake.clear()
                try:
                    await asyncio.wait_for(self._wake.wait(), 0.25)
                except TimeoutError:
                    continue
                continue
            msg = await pull.next(0.5)
            if msg is not None and (stop.is_set() or self.paused):
                await self._bus.reply(msg, b"-NAK")
            elif msg is not None:
                task = spawn(self._one(msg), name=f"{self._spec.durable}:{msg.subject}")
                self._running.add(task)
                task.add_done_callback(self._done)

    async def _give_back(self, pull: Pull) -> None:
        """End the standing requests; what has been delivered already goes to somebody else at once."""
        try:
            while pull.pending and (msg := await pull.next(0.01)) is not None:
                await self._bus.reply(msg, b"-NAK")
        except (BusError, nats.errors.Error) as error:
            _log.info("not given back", consumer=self._spec.durable, error=repr(error))
        finally:
            await pull.close()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._wake.set()

    async def _one(self, msg: Msg) -> None:
        lease = Lease(self._bus, msg, self._ack_wait)
        keeper = spawn(lease.keep(), name="lease")
        work = spawn(_call(self._handler, lease), name="handler")
        try:
            await asyncio.wait({keeper, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                _log.error("lease lost", subject=msg.subject)
                await cancel_and_wait(work)
                return
            error = work.result()
            if error is None:
                await lease.ack()
            else:
                await lease.fail(self._spec.durable, error)
        except BusError as error:
            # The server will deliver it again; handlers are idempotent by state.
            _log.warning("settling failed", subject=msg.subject, error=repr(error))
        finally:
            await cancel_and_wait(keeper, work)


async def _call(handler: Callable[[Lease], Awaitable[None]], lease: Lease) -> Exception | None:
    """The handler's error as a value: it belongs to the poison policy, not to the task's log line."""
    token = attach(lease.trace)
    try:
        await handler(lease)
    except Exception as error:
        return error
    finally:
        detach(token)
    return None


def _constant(value: int) -> Callable[[], int]:
    return lambda: value
