"""Export: a log's streams into an archive, file by file. Started again, it goes on behind the last complete file."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zstandard

from polar_common.bus import Bus, scan
from polar_common.bus.read import Stored
from polar_common.errors import ConfigError
from polar_common.topology import DLQ, TRACES, blobs_stream, events_stream

from .format import (
    MANIFEST,
    FileEntry,
    Manifest,
    StreamEntry,
    file_hash,
    flush,
    make_directory,
    pack_record,
    read_manifest,
    write_manifest,
)  # fmt: skip

__all__ = ["export"]

FILE_BYTES = 256 << 20
"""Uncompressed bytes of a file: what an interrupted export may have to do again."""
FILE_MESSAGES = 100_000
LOCK = ".lock"
_LEVEL = 6
Progress = Callable[[str, int], None]


async def export(
    bus: Bus,
    directory: Path,
    segment: str,
    *,
    traces: bool = True,
    file_bytes: int = FILE_BYTES,
    on_progress: Progress | None = None,
) -> Manifest:
    """Write what the archive doesn't hold yet: events and blobs of the segment, dead letters and, unless they are left
    out because a replay makes them again, traces.

    Raises ConfigError if the directory holds another segment's archive or another export is writing to it, Unavailable
    if the log doesn't answer.
    """
    make_directory(directory)
    with _alone(directory):
        return await _export(bus, directory, segment, traces, file_bytes, on_progress)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One export at a time into a directory; the lock of a process that was killed is gone with it."""
    with (directory / LOCK).open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another export is writing to {directory}", "archive") from error
        yield


async def _export(
    bus: Bus, directory: Path, segment: str, traces: bool, file_bytes: int, on_progress: Progress | None
) -> Manifest:
    manifest = read_manifest(directory) if (directory / MANIFEST).exists() else Manifest(segment=segment)
    if manifest.segment != segment:
        raise ConfigError(f"{directory} is the archive of segment {manifest.segment}", "archive")
    manifest.complete = False
    for leftover in directory.glob("*.part"):
        leftover.unlink()
    # Events before blobs: whatever an event names was stored before it.
    wanted = [StreamEntry(name=events_stream(segment), kind="events"), StreamEntry(name=DLQ, kind="dlq")]
    if traces:
        wanted.insert(0, StreamEntry(name=TRACES, kind="traces"))
    wanted.append(StreamEntry(name=blobs_stream(segment), kind="blobs"))
    for fresh in wanted:
        stream = manifest.streams.setdefault(fresh.name, fresh)
        await _export_stream(bus, directory, manifest, stream, file_bytes, on_progress)
    manifest.complete = True
    write_manifest(directory, manifest)
    return manifest


async def _export_stream(
    bus: Bus, directory: Path, manifest: Manifest, stream: StreamEntry, file_bytes: int, on_progress: Progress | None
) -> None:
    writer: _Writer | None = None
    count, seen = stream.messages, stream.last
    async for stored in scan(bus, stream.name, [">"], after=stream.last):
        seen = stored.sequence
        if not _belongs(stream.kind, manifest.segment, stored.subject):
            continue
        if writer is None:
            writer = _Writer(directory, f"{stream.name}.{len(stream.files) + 1:06d}.zst", stored.sequence)
        writer.add(stored)
        count += 1
        if on_progress is not None and count % 1000 == 0:
            on_progress(stream.name, count)
        if writer.size >= file_bytes or writer.messages >= FILE_MESSAGES:
            _close(directory, manifest, stream, writer)
            writer = None
            if on_progress is not None:
                on_progress(stream.name, count)
    if writer is not None:
        _close(directory, manifest, stream, writer)
    stream.last = seen


def _belongs(kind: str, segment: str, subject: str) -> bool:
    """Traces and dead letters of all segments share a stream."""
    tokens = subject.split(".")
    if kind == "traces":
        return tokens[4].startswith(f"{segment}-")
    return kind != "dlq" or tokens[3] == TRACES or tokens[3].rpartition("_")[2] == segment


def _close(directory: Path, manifest: Manifest, stream: StreamEntry, writer: _Writer) -> None:
    entry = writer.close()
    stream.files.append(entry)
    stream.last = entry.last
    write_manifest(directory, manifest)


class _Writer:
    """One file under way, beside its final name."""

    def __init__(self, directory: Path, name: str, first: int) -> None:
        self._path = directory / name
        self._part = directory / f"{name}.part"
        self._file = self._part.open("wb")
        self._stream = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).stream_writer(
            self._file, closefd=False
        )
        self._first = self._last = first
        self.messages = 0
        self.size = 0

    def add(self, stored: Stored) -> None:
        record = pack_record(stored)
        self._stream.write(record)
        self._last = stored.sequence
        self.messages += 1
        self.size += len(record)

    def close(self) -> FileEntry:
        """On disk under its own name, before the manifest may speak of it."""
        self._stream.close()  # type: ignore[no-untyped-call]
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.rename(self._path)
        flush(self._path.parent)
        return FileEntry(
            name=self._path.name,
            first=self._first,
            last=self._last,
            messages=self.messages,
            bytes=self._path.stat().st_size,
            sha256=file_hash(self._path),
        )
