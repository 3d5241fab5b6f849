"""Where a replay reads: the log on its server, or an archive of it where that server, or the segment, is gone.

Both give the same messages under the same sequences and times, so the traces made from them are the same.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from pathlib import Path
from typing import Protocol

from polar_common import subjects
from polar_common.archive import ArchiveSource, check_archive, read_manifest
from polar_common.blobs import Blobs
from polar_common.bus import Bus, Stored, scan
from polar_common.errors import ConfigError
from polar_common.packing import BlobRef
from polar_common.topology import events_stream
from polar_common.verify import fetch_blob

__all__ = ["Archived", "Log", "Origin"]

_KINDS = ("session", "completion", "group")


class Origin(Protocol):
    """One segment's events and blobs."""

    @property
    def segment(self) -> str: ...

    async def last(self) -> int:
        """The highest sequence that is there now."""
        ...

    def messages(self, sessions: Collection[str], until: int) -> AsyncGenerator[Stored, None]:
        """Sessions, completions and closed groups up to a sequence, in order; of the named sessions alone, if any."""
        ...

    async def blob(self, ref: BlobRef) -> bytes:
        """A body. Raises BlobError if it's missing or damaged."""
        ...


class Log:
    """A segment on its server."""

    def __init__(self, bus: Bus, segment: str) -> None:
        self.segment = segment
        self._bus = bus
        self._blobs = Blobs(bus, segment)

    async def last(self) -> int:
        return int((await self._bus.js.stream_info(events_stream(self.segment))).state.last_seq)

    async def messages(self, sessions: Collection[str], until: int) -> AsyncGenerator[Stored, None]:
        filters = [subjects.ANY_SESSION, subjects.ANY_COMPLETION, subjects.ANY_GROUP_CLOSED]
        if sessions:
            filters = [f(s) for s in sorted(sessions) for f in (subjects.session_filter, subjects.completion_filter)]
        async for stored in scan(self._bus, events_stream(self.segment), filters, until=until):
            yield stored

    async def blob(self, ref: BlobRef) -> bytes:
        return await self._blobs.get(ref)


class Archived:
    """A segment's archive, as `polar log export` writes it.

    `check`: refuse one that isn't whole or whose files aren't those that were written. What is wrong with an archive
    must stop the replay: session by session it would be published as the sessions' own failure. Raises ConfigError.
    """

    def __init__(self, directory: Path, *, check: bool = True) -> None:
        self.directory = directory
        manifest = read_manifest(directory)
        if check:
            if not manifest.complete:
                raise ConfigError(f"{directory}: the export wasn't finished; start it again", "from")
            if wrong := check_archive(directory)[1]:
                raise ConfigError("; ".join(wrong[:5]), "from")
        self.segment = manifest.segment
        self._stream = events_stream(manifest.segment)
        self._last = manifest.streams[self._stream].last
        self._source = ArchiveSource(directory)

    async def last(self) -> int:
        return self._last

    async def messages(self, sessions: Collection[str], until: int) -> AsyncGenerator[Stored, None]:
        async for stored in self._source.messages(self._stream):
            if stored.sequence > until:
                return
            tokens = stored.subject.split(".", 5)
            if tokens[3] in _KINDS and (not sessions or tokens[4] in sessions):
                yield stored

    async def blob(self, ref: BlobRef) -> bytes:
        return await fetch_blob(self._source, ref)
