"""The log's clock on this host: the server's time, carried on by the monotonic clock, so that host clocks may jump."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import nats.errors
import orjson

from polar_common.bus import Bus
from polar_common.bus.read import parse_time
from polar_common.errors import Unavailable

__all__ = ["LogClock"]


class LogClock:
    """Before the first `sync` it is the host's own clock."""

    def __init__(self) -> None:
        self._at = datetime.now(UTC)
        self._mono = time.monotonic()

    async def sync(self, bus: Bus, stream: str) -> None:
        """Ask the server for its time. Raises Unavailable."""
        asked = time.monotonic()
        try:
            answer = await bus.nc.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=5.0)
        except (TimeoutError, nats.errors.Error) as error:
            raise Unavailable(f"no time from {stream}: {error!r}") from error
        told = orjson.loads(answer.data).get("ts")
        if told:
            self._at, self._mono = parse_time(told), (asked + time.monotonic()) / 2

    def now(self) -> datetime:
        """Now, as the log would stamp it."""
        return self._at + timedelta(seconds=time.monotonic() - self._mono)

    def monotonic(self, at: datetime) -> float:
        """The monotonic time of a moment of the log."""
        return self._mono + (at - self._at).total_seconds()

    def after(self, seconds: float) -> datetime:
        """So many seconds from now."""
        return self.now() + timedelta(seconds=seconds)
