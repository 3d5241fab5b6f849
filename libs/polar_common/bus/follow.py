"""Following a stream in order from a sequence on: what schedulers, seal followers and projections fold.

An ephemeral pull consumer, made anew behind the last seen sequence whenever it is gone or silent; so nothing is missed
and nothing comes twice, across reconnects and server restarts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import nats.errors
import structlog
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from polar_common.errors import BusError, NotFound, Unavailable

from .client import Bus
from .pull import Pull
from .read import Stored, from_delivery

__all__ = ["follow", "scan"]

_PAGE = 512
_SILENCE_S = 8.0
_log = structlog.get_logger(__name__)


async def follow(
    bus: Bus,
    stream: str,
    filters: Sequence[str],
    *,
    after: int = 0,
    on_caught_up: Callable[[], None] | None = None,
    on_alive: Callable[[], None] | None = None,
) -> AsyncIterator[Stored]:
    """Messages that match, in order, from sequence `after` + 1, for ever.

    `on_caught_up` is called each time everything stored at (re)connection has been yielded, `on_alive` whenever the
    server has been heard.
    """
    position = after
    while True:
        pull: Pull | None = None
        try:
            name, waiting = await _create(bus, stream, filters, position)
            pull = Pull(bus.nc, stream, name)
            if waiting == 0 and on_caught_up is not None:
                on_caught_up()
            async for stored, pending in _messages(pull, on_alive):
                position = stored.sequence
                yield stored
                if pending == 0 and on_caught_up is not None:
                    on_caught_up()
        except (BusError, nats.errors.Error, TimeoutError) as error:
            if bus.nc.is_closed:
                return
            _log.info("following again", stream=stream, after=position, error=repr(error))
            await asyncio.sleep(0.2)
        finally:
            if pull is not None:
                await pull.close()


async def scan(
    bus: Bus, stream: str, filters: Sequence[str], *, after: int = 0, until: int = 0
) -> AsyncIterator[Stored]:
    """Messages that match and are there now, in order, from `after` + 1 up to `until` (0: the newest); then it ends.

    Raises NotFound where there is no such stream, Unavailable if the connection is closed meanwhile.
    """
    position = after
    while True:
        pull: Pull | None = None
        try:
            name, waiting = await _create(bus, stream, filters, position)
            if not waiting:
                return
            pull = Pull(bus.nc, stream, name)
            async for stored, pending in _messages(pull, None):
                if until and stored.sequence > until:
                    return
                position = stored.sequence
                yield stored
                if not pending or position == until:
                    return
        except NotFoundError as error:
            raise NotFound(f"there is no stream {stream}") from error
        except (BusError, nats.errors.Error, TimeoutError) as error:
            if bus.nc.is_closed:
                raise Unavailable(f"{stream}: the connection was closed while reading") from error
            _log.info("reading on", stream=stream, after=position, error=repr(error))
            await asyncio.sleep(0.2)
        finally:
            if pull is not None:
                await pull.close()


async def _create(bus: Bus, stream: str, filters: Sequence[str], after: int) -> tuple[str, int]:
    config = ConsumerConfig(
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE if after else DeliverPolicy.ALL,
        opt_start_seq=after + 1 if after else None,
        ack_policy=AckPolicy.NONE,
        filter_subjects=list(filters) if len(filters) > 1 else None,
        filter_subject=filters[0] if len(filters) == 1 else None,
        inactive_threshold=60.0,
        mem_storage=True,
        num_replicas=1,
    )
    info = await bus.js.add_consumer(stream, config)
    return info.name, info.num_pending or 0


async def _messages(pull: Pull, on_alive: Callable[[], None] | None) -> AsyncIterator[tuple[Stored, int]]:
    loop = asyncio.get_running_loop()
    expected = 1
    while True:
        if pull.pending <= _PAGE // 2:
            await pull.want(_PAGE - pull.pending)
        before = pull.heard
        msg = await pull.next(1.0)
        if pull.heard != before and on_alive is not None:
            on_alive()
        if loop.time() - pull.heard > _SILENCE_S:
            raise Unavailable("the consumer is silent")
        if msg is None:
            continue
        if msg.metadata.sequence.consumer != expected:
            raise Unavailable("deliveries were lost on the way")
        expected += 1
        yield from_delivery(msg), int(msg.metadata.num_pending)
