"""Whether the log has room for new sessions. While it hasn't, nothing is admitted or released, and what runs may end:
a server without space takes nothing more, also of what was begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import nats.errors
import structlog
from prometheus_client import Gauge

from polar_common.bus import Bus
from polar_common.errors import BusError
from polar_common.room import room
from polar_common.tasks import checkpoint

from .settings import IngestSettings

__all__ = ["Headroom"]

_PAUSE_S = 2.0
_log = structlog.get_logger(__name__)
_left = Gauge("polar_ingest_headroom_bytes", "What the log still takes, where anybody tells")


class Headroom:
    """`short` says why nothing is admitted; empty while there is room, or nobody tells."""

    def __init__(self, bus: Bus, settings: IngestSettings) -> None:
        self.short = ""
        self._bus = bus
        self._segment = settings.segment
        self._wanted = settings.ingest_headroom
        self._directory = _directory(settings)

    async def watch(self, changed: Callable[[], None]) -> None:
        """Look for ever; `changed` is called when there is room again, or no more."""
        while True:
            checkpoint()
            await asyncio.sleep(_PAUSE_S)
            before = self.short
            await self.look()
            if bool(before) != bool(self.short):
                changed()

    async def look(self) -> None:
        """A log that doesn't answer leaves what was known."""
        try:
            left = await room(self._bus, self._segment, self._directory)
        except (BusError, nats.errors.Error) as error:
            _log.info("no word of the log's room", error=repr(error))
            return
        before, self.short = self.short, ""
        if left is not None:
            _left.set(left.bytes)
            if left.bytes < self._wanted:
                self.short = (
                    f"{_size(left.bytes)} are left {left.where}, less than {_size(self._wanted)}: nothing is admitted "
                    "until there is more (POLAR_INGEST_HEADROOM)"
                )
        if self.short and not before:
            _log.error("the log is nearly full", detail=self.short)
        elif before and not self.short:
            _log.info("the log has room again")


def _directory(settings: IngestSettings) -> Path | None:
    """Where the log lies, if `polar up` runs it on this machine."""
    directory = settings.data / "nats"
    here = urlsplit(settings.nats.split(",")[0]).hostname in ("127.0.0.1", "::1", "localhost")
    return directory if here and directory.is_dir() else None


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{max(0, count) / 1e6:.1f} MB"
