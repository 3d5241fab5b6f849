"""The layout of an archive: a directory with `manifest.json` and, per stream, numbered files of messages.

A file is one zstd stream of records; a record is two little-endian lengths, a JSON head (subject, sequence, time, body
hash) and the body as it was. Times are RFC 3339 with microseconds. The manifest names every complete file with its
SHA-256; it is replaced whole after each file, so an interrupted export loses at most the file under way.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Literal

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from polar_common.bus.read import Stored
from polar_common.errors import BlobError, ConfigError

__all__ = [
    "FileEntry",
    "Manifest",
    "StreamEntry",
    "file_hash",
    "flush",
    "flush_archive",
    "make_directory",
    "pack_record",
    "read_manifest",
    "records",
    "write_manifest",
]

FORMAT = 1
MANIFEST = "manifest.json"
_LENGTHS = struct.Struct("<II")
_MAX_HEAD = 1 << 16
_MAX_BODY = 1 << 26


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FileEntry(_Model):
    """One complete file: sequences first to last, compressed bytes, hash of the file."""

    name: str
    first: int
    last: int
    messages: int
    bytes: int
    sha256: str


class StreamEntry(_Model):
    """One stream: its files in order. `last`: everything up to this sequence is here."""

    name: str
    kind: Literal["events", "blobs", "traces", "dlq"]
    files: list[FileEntry] = []
    last: int = 0

    @property
    def messages(self) -> int:
        return sum(f.messages for f in self.files)


class Manifest(_Model):
    """What an archive holds. `complete`: the last export went to the end of each stream."""

    format: int = FORMAT
    segment: str
    streams: dict[str, StreamEntry] = {}
    complete: bool = False


def read_manifest(directory: Path) -> Manifest:
    """Raises ConfigError if there is no archive, or one that this code can't read."""
    try:
        found = Manifest.model_validate_json((directory / MANIFEST).read_bytes())
    except OSError as error:
        raise ConfigError(f"{directory} holds no archive: {error.strerror}", "archive") from error
    except ValidationError as error:
        raise ConfigError(f"{directory / MANIFEST} isn't a manifest: {error}", "archive") from error
    if found.format != FORMAT:
        raise ConfigError(f"{directory} has format {found.format}; this code reads {FORMAT}", "archive")
    return found


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace it, durably."""
    draft = directory / f"{MANIFEST}.new"
    with draft.open("wb") as file:
        file.write(orjson.dumps(manifest.model_dump(), option=orjson.OPT_INDENT_2))
        file.flush()
        os.fsync(file.fileno())
    draft.rename(directory / MANIFEST)
    flush(directory)


def flush(path: Path) -> None:
    """A file's content, or a directory's names, onto the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def flush_archive(directory: Path, manifest: Manifest) -> None:
    """Everything that the manifest speaks of, itself and their names."""
    for stream in manifest.streams.values():
        for entry in stream.files:
            flush(directory / entry.name)
    flush(directory / MANIFEST)
    flush(directory)


def make_directory(directory: Path) -> None:
    """With those above it, each name on disk."""
    missing = [d for d in (directory, *directory.parents) if not d.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for made in missing:
        flush(made.parent)


def pack_record(stored: Stored) -> bytes:
    """One message."""
    head = {"s": stored.subject, "n": stored.sequence, "t": stored.time.isoformat(), "h": stored.body_hash}
    written = orjson.dumps(head)
    return _LENGTHS.pack(len(written), len(stored.body)) + written + stored.body


def records(file: BinaryIO, name: str) -> Iterator[Stored]:
    """The messages of an uncompressed stream. Raises BlobError where it is damaged or cut."""
    while lengths := file.read(_LENGTHS.size):
        if len(lengths) < _LENGTHS.size:
            raise BlobError(f"{name} ends inside a record")
        size, body_size = _LENGTHS.unpack(lengths)
        if size > _MAX_HEAD or body_size > _MAX_BODY:
            raise BlobError(f"{name}: a record of {size} + {body_size} bytes")
        written, body = file.read(size), file.read(body_size)
        if len(written) < size or len(body) < body_size:
            raise BlobError(f"{name} ends inside a record")
        try:
            head = orjson.loads(written)
            yield Stored(str(head["s"]), int(head["n"]), datetime.fromisoformat(head["t"]), body, str(head["h"]))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise BlobError(f"{name}: a damaged record head: {error!r}") from error


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hex. Raises BlobError if it isn't there."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BlobError(f"{path} can't be read: {error.strerror}") from error
