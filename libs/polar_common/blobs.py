"""Content-addressed bodies in the blob stream. A blob is acknowledged before the event that names it."""

from __future__ import annotations

import hashlib

import orjson

from . import subjects
from .bus import Bus
from .errors import BlobError
from .packing import BlobRef, Column, unpack
from .topology import blobs_stream

__all__ = ["Blobs"]

PART = 6_000_000
"""Bytes per message; the server's `max_payload` is 8 MB."""
_CACHE_BYTES = 64 << 20


class Blobs:
    """Puts and gets of one segment's bodies, with a small cache of what was read."""

    def __init__(self, bus: Bus, segment: str) -> None:
        self._bus = bus
        self._segment = segment
        self._cache: dict[str, bytes] = {}
        self._cached = 0

    async def put(self, body: bytes, media_type: str = "application/octet-stream") -> BlobRef:
        """Store a body; one that is there already costs one refused publish."""
        ref = BlobRef(sha256=hashlib.sha256(body).hexdigest(), size=len(body), media_type=media_type)
        await self.put_as(ref, body)
        return ref

    async def put_as(self, ref: BlobRef, body: bytes) -> None:
        """Store a body under the reference that `pack` made for it."""
        if len(body) <= PART:
            await self._bus.once_raw(subjects.blob(self._segment, ref.sha256), body, ref.sha256)
            return
        parts = [body[i : i + PART] for i in range(0, len(body), PART)]
        for number, part in enumerate(parts):
            subject = subjects.blob(self._segment, ref.sha256, number)
            await self._bus.once_raw(subject, part, f"{ref.sha256}.{number}")
        manifest = orjson.dumps({"polar_parts": len(parts), "size": len(body)})
        await self._bus.once_raw(subjects.blob(self._segment, ref.sha256), manifest, ref.sha256)

    async def get(self, ref: BlobRef) -> bytes:
        """The body. Raises BlobError if it's missing or its hash is wrong."""
        if (hit := self._cache.get(ref.sha256)) is not None:
            return hit
        stored = await self._bus.last(subjects.blob(self._segment, ref.sha256), blobs_stream(self._segment))
        if stored is None:
            raise BlobError(f"blob {ref.sha256} is missing")
        body = stored.body if ref.size <= PART else await self._parts(ref, stored.body)
        if hashlib.sha256(body).hexdigest() != ref.sha256:
            raise BlobError(f"blob {ref.sha256} is damaged")
        self._remember(ref.sha256, body)
        return body

    async def has(self, ref: BlobRef) -> bool:
        """Whether the body is there, whole."""
        return await self._bus.last(subjects.blob(self._segment, ref.sha256), blobs_stream(self._segment)) is not None

    async def column(self, column: Column) -> bytes | None:
        """The body that `unpack` needs for a column; None where it's inline."""
        return None if column.blob is None else await self.get(column.blob)

    async def numbers(self, column: Column) -> list[float]:
        """A column's numbers as Python values."""
        return unpack(column, await self.column(column)).tolist()  # type: ignore[no-any-return]

    async def _parts(self, ref: BlobRef, manifest: bytes) -> bytes:
        try:
            count = int(orjson.loads(manifest)["polar_parts"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise BlobError(f"blob {ref.sha256}: damaged manifest") from error
        found = []
        for number in range(count):
            subject = subjects.blob(self._segment, ref.sha256, number)
            part = await self._bus.last(subject, blobs_stream(self._segment))
            if part is None:
                raise BlobError(f"blob {ref.sha256}: part {number} of {count} is missing")
            found.append(part.body)
        return b"".join(found)

    def _remember(self, key: str, body: bytes) -> None:
        if len(body) > _CACHE_BYTES // 4:
            return
        self._cache[key] = body
        self._cached += len(body)
        while self._cached > _CACHE_BYTES:
            oldest = next(iter(self._cache))
            self._cached -= len(self._cache.pop(oldest))
