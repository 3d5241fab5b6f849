"""Where an audit reads from: a running log here, an archive in `polar_common.archive`."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Protocol

from polar_common import subjects
from polar_common.blobs import PART
from polar_common.bus import Bus, scan
from polar_common.bus.read import Stored, leader_get
from polar_common.errors import BlobError
from polar_common.events import now
from polar_common.packing import BlobRef
from polar_common.topology import BLOBS, DLQ, EVENTS, TRACES

__all__ = ["LiveSource", "Source", "fetch_blob"]


class Source(Protocol):
    """A log, whole. `kind` of a stream: events, blobs, traces or dlq."""

    async def streams(self, kind: str) -> list[str]:
        """Names of the streams of a kind, oldest segment first."""
        ...

    def messages(self, stream: str) -> AsyncIterator[Stored]:
        """Everything in a stream, in order, once."""
        ...

    async def message(self, stream: str, subject: str) -> bytes:
        """The body on a subject. Raises BlobError if it's missing."""
        ...

    def now(self) -> datetime:
        """The instant by which deadlines are judged."""
        ...


async def fetch_blob(source: Source, ref: BlobRef) -> bytes:
    """A body from whichever segment holds it, put together from its parts, with its hash checked. Raises BlobError."""
    error = BlobError(f"blob {ref.sha256} is missing")
    for stream in await source.streams("blobs"):
        segment = stream.rpartition("_")[2]
        try:
            body = await source.message(stream, subjects.blob(segment, ref.sha256))
            if ref.size > PART:
                parts = range(-(-ref.size // PART))
                body = b"".join([await source.message(stream, subjects.blob(segment, ref.sha256, p)) for p in parts])
        except BlobError as missing:
            error = missing
            continue
        if hashlib.sha256(body).hexdigest() != ref.sha256:
            raise BlobError(f"blob {ref.sha256} is damaged")
        return body
    raise error


_PREFIX = {"events": EVENTS, "blobs": BLOBS, "traces": TRACES, "dlq": DLQ}


class LiveSource:
    """A log on a server."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def streams(self, kind: str) -> list[str]:
        prefix = _PREFIX[kind]
        names = await self._names()
        return sorted((n for n in names if n == prefix or n.startswith(f"{prefix}_")), key=_age)

    async def _names(self) -> Sequence[str]:
        found: list[str] = []
        while True:
            page = await self.bus.js.streams_info(offset=len(found))
            found += [str(s.config.name) for s in page]
            if len(page) < 256:
                return found

    async def messages(self, stream: str) -> AsyncIterator[Stored]:
        async for stored in scan(self.bus, stream, [">"]):
            yield stored

    async def message(self, stream: str, subject: str) -> bytes:
        stored = await leader_get(self.bus.nc, stream, subject)
        if stored is None:
            raise BlobError(f"{subject} is missing")
        return stored.body

    def now(self) -> datetime:
        return now()


def _age(stream: str) -> tuple[int, str]:
    """Segments are called s1, s2, …: by number, not by text."""
    digits = "".join(c for c in stream.rpartition("_")[2] if c.isdigit())
    return int(digits or 0), stream
