"""Reading an archive: message by message, in a log's order, with every file's hash checked first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import zstandard

from polar_common.bus.read import Stored
from polar_common.errors import BlobError

from .format import FileEntry, Manifest, file_hash, read_manifest, records

__all__ = ["ArchiveSource", "check_archive", "read_archive"]

_KINDS = ("events", "blobs", "traces", "dlq")
_CACHED_FILES = 2


def read_archive(directory: Path, kind: str = "events", *, after: int = 0, check: bool = True) -> Iterator[Stored]:
    """The messages of a kind of stream (events, blobs, traces or dlq), in order, from sequence `after` + 1.

    `check`: hash each file before it is read. Raises ConfigError if there is no archive, BlobError if it is damaged.
    """
    manifest = read_manifest(directory)
    for stream in manifest.streams.values():
        if stream.kind != kind:
            continue
        for entry in stream.files:
            if entry.last > after:
                for stored in _read_file(directory, entry, check):
                    if stored.sequence > after:
                        yield stored


def check_archive(directory: Path) -> tuple[Manifest, list[str]]:
    """The manifest, and what is wrong: one line per missing, altered or inconsistent file."""
    manifest = read_manifest(directory)
    wrong = []
    for stream in manifest.streams.values():
        last = 0
        for entry in stream.files:
            try:
                _check_file(directory, entry)
            except BlobError as error:
                wrong.append(str(error))
            if entry.first <= last:
                wrong.append(f"{entry.name} begins at {entry.first}, the file before it ends at {last}")
            last = entry.last
        if last > stream.last or (stream.kind in ("events", "blobs") and last != stream.last):
            wrong.append(f"{stream.name}: the manifest goes to {stream.last}, its files to {last}")
    return manifest, wrong


def _check_file(directory: Path, entry: FileEntry) -> None:
    if file_hash(directory / entry.name) != entry.sha256:
        raise BlobError(f"{entry.name} is not the file that was written: its hash differs")


def _read_file(directory: Path, entry: FileEntry, check: bool) -> Iterator[Stored]:
    if check:
        _check_file(directory, entry)
    count = 0
    try:
        with (directory / entry.name).open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
            for stored in records(reader, entry.name):
                count += 1
                yield stored
    except (OSError, zstandard.ZstdError) as error:
        raise BlobError(f"{entry.name} can't be read: {error}") from error
    if count != entry.messages:
        raise BlobError(f"{entry.name} holds {count} messages, the manifest says {entry.messages}")


class ArchiveSource:
    """An archive, or the archives of several segments, as `polar verify` and other readers of whole logs want it."""

    def __init__(self, *directories: Path) -> None:
        """Raises ConfigError for a directory without an archive."""
        self._directories = directories
        self._where: dict[str, Path] = {}
        self._kinds: dict[str, str] = {}
        for directory in directories:
            for stream in read_manifest(directory).streams.values():
                self._where.setdefault(stream.name, directory)
                self._kinds[stream.name] = stream.kind
        self._index: dict[str, dict[str, tuple[Path, FileEntry]]] = {}
        self._newest = datetime.fromtimestamp(0, UTC)
        self._cached: dict[Path, dict[str, bytes]] = {}

    async def streams(self, kind: str) -> list[str]:
        """Names of the streams of a kind."""
        return [name for name, of in self._kinds.items() if of == kind]

    async def messages(self, stream: str) -> AsyncIterator[Stored]:
        """Everything in a stream, in order."""
        directory, kind = self._where[stream], self._kinds[stream]
        for count, stored in enumerate(read_archive(directory, kind)):
            self._newest = max(self._newest, stored.time)
            yield stored
            if count % 256 == 0:
                await asyncio.sleep(0)

    async def message(self, stream: str, subject: str) -> bytes:
        """The body on a subject, by way of an index of the stream's files. Raises BlobError if it's missing."""
        if stream not in self._index:
            self._index[stream] = self._indexed(stream)
        found = self._index[stream].get(subject)
        if found is None:
            raise BlobError(f"{subject} is missing from the archive")
        directory, entry = found
        path = directory / entry.name
        if path not in self._cached:
            # Neighbours in the log are asked for together, and at a border between two files in turns.
            while len(self._cached) >= _CACHED_FILES:
                del self._cached[next(iter(self._cached))]
            self._cached[path] = {s.subject: s.body for s in _read_file(directory, entry, False)}
        return self._cached[path][subject]

    def _indexed(self, stream: str) -> dict[str, tuple[Path, FileEntry]]:
        directory = self._where[stream]
        found = {}
        for entry in read_manifest(directory).streams[stream].files:
            for stored in _read_file(directory, entry, True):
                found[stored.subject] = (directory, entry)
        return found

    def now(self) -> datetime:
        """The time of the newest message read: an archive's sessions don't age."""
        return self._newest
