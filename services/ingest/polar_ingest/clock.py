"""Log time on the local monotonic clock.

While history is read, an event's age is the server's clock minus its timestamp, asked for once; what comes later is
simply new. So a server or host whose clock jumps while we run moves no deadline.
"""

from __future__ import annotations

import asyncio
from datetime import datetime

import nats.errors
import orjson

from polar_common.bus import Bus
from polar_common.bus.read import parse_time
from polar_common.errors import Unavailable

__all__ = ["LogClock", "server_time"]


async def server_time(bus: Bus, stream: str) -> datetime:
    """The server's clock, UTC. Raises Unavailable."""
    try:
        answer = orjson.loads((await bus.nc.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=5)).data)
    except (TimeoutError, nats.errors.Error) as error:
        raise Unavailable(f"{stream} doesn't answer: {error!r}") from error
    if "ts" not in answer:
        raise Unavailable(f"{stream}: {answer.get('error', {}).get('description', 'no time in the answer')}")
    return parse_time(answer["ts"])


class LogClock:
    """`at` turns a log timestamp into seconds of the loop's clock."""

    def __init__(self) -> None:
        self._server: datetime | None = None
        self._local = 0.0
        self._live = False

    def calibrate(self, server: datetime) -> None:
        """Call before history is read."""
        self._server, self._local = server, asyncio.get_running_loop().time()

    def caught_up(self) -> None:
        """From here on events are new when they come."""
        self._live = True

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def at(self, time: datetime) -> float:
        """When an event with this log time happened, never in the future."""
        now = self.now()
        if self._live or self._server is None:
            return now
        age = (self._server - time).total_seconds() + (now - self._local)
        return now - max(0.0, age)
