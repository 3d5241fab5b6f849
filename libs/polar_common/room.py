"""How much more the log takes: what its servers say of their stores, and the disk where the log lies on this machine.

A server bounds its store (by `max_file_store`, else three quarters of the disk that it found) and tells bound and use
to whom the accounts of `permissions.py` let ask; one without users tells nobody. What others write onto its disk it
doesn't see.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import nats.errors
import orjson

from .bus import Bus
from .errors import Unavailable
from .permissions import STORES
from .topology import events_stream

__all__ = ["Room", "room"]

_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, order=True)
class Room:
    """Bytes that are left, and where."""

    bytes: int
    where: str


async def room(bus: Bus, segment: str, directory: Path | None = None) -> Room | None:
    """The least that is left; None where nobody tells. `directory`: of a server on this machine. Raises Unavailable."""
    found = await _stores(bus)
    try:
        info = await bus.js.stream_info(events_stream(segment))
    except (TimeoutError, nats.errors.Error) as error:
        raise Unavailable(f"{events_stream(segment)} doesn't answer: {error!r}") from error
    if (bound := info.config.max_bytes or -1) > 0:
        found.append(Room(bound - info.state.bytes, f"below the bound of {events_stream(segment)}"))
    if directory is not None:
        with suppress(OSError):
            found.append(Room(shutil.disk_usage(directory).free, "on the log's disk"))
    return min(found, default=None)


async def _stores(bus: Bus) -> list[Room]:
    """What is left in the server's store; of several, what most of them have: the log goes on with those."""
    inbox = bus.nc.new_inbox()
    answers: list[Room] = []
    servers = 1
    sub = await bus.nc.subscribe(inbox)
    try:
        await bus.nc.publish(STORES, b"", reply=inbox)
        async with asyncio.timeout(_TIMEOUT_S):
            while len(answers) < servers:
                told = _told((await sub.next_msg(timeout=_TIMEOUT_S)).data)
                servers = max(servers, told[1])
                answers += told[0]
    except (TimeoutError, nats.errors.Error):
        # Nobody may ask here, or some server is away.
        pass
    finally:
        with suppress(OSError, nats.errors.Error):
            await sub.unsubscribe()
    return _most(answers, servers)


def _told(body: bytes) -> tuple[list[Room], int]:
    """One server's store, and how many servers there are."""
    if not body:
        raise TimeoutError
    answer = orjson.loads(body)
    data = answer.get("data") or {}
    servers = int((data.get("meta_cluster") or {}).get("cluster_size") or 1)
    bound = int((data.get("config") or {}).get("max_storage") or 0)
    left = Room(bound - int(data.get("storage") or 0), f"in the store of server {answer['server']['name']}")
    return [left] if bound > 0 else [], servers


def _most(stores: Sequence[Room], servers: int) -> list[Room]:
    enough = servers // 2 + 1
    return [sorted(stores, reverse=True)[enough - 1]] if len(stores) >= enough else []
