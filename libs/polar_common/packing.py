"""Token columns on the wire: little-endian int32, float32 or uint8, zstd, base64 inside JSON.

A column under 16 kB is inline, a larger one is a blob; `pack` decides, nobody else.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import zstandard
from pydantic import BaseModel, ConfigDict, Field

from .errors import BlobError

__all__ = ["INLINE_LIMIT", "BlobRef", "Column", "ColumnType", "compress", "pack", "pack_bytes", "unpack", "unzip"]

INLINE_LIMIT = 16_000
_MAX_EXPANDED = 1 << 31
ColumnType = Literal["i32", "f32", "u8"]
_TYPES: dict[str, np.dtype[np.generic]] = {"i32": np.dtype("<i4"), "f32": np.dtype("<f4"), "u8": np.dtype("u1")}


class BlobRef(BaseModel):
    """A content-addressed body in the blob stream."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Hash of the stored (possibly compressed) bytes."""
    size: Annotated[int, Field(ge=0)]
    """Stored bytes."""
    media_type: str = "application/octet-stream"


class Column(BaseModel):
    """`n` numbers of one type, compressed; either inline (`data`) or in a blob."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: ColumnType
    n: Annotated[int, Field(ge=0)]
    data: str | None = None
    blob: BlobRef | None = None


def pack_bytes(column: Sequence[float] | npt.NDArray[np.generic], type: ColumnType) -> bytes:
    """The compressed bytes of a column."""
    return compress(np.asarray(column, dtype=_TYPES[type]).tobytes())


class _PerThread(threading.local):
    """A compressor costs a hundred times what compressing a short column does, and belongs to one thread."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=3)
        self.decompressor = zstandard.ZstdDecompressor()


_per_thread = _PerThread()


def compress(raw: bytes) -> bytes:
    """One zstd frame; `unzip` undoes it."""
    return _per_thread.compressor.compress(raw)


def pack(
    column: Sequence[float] | npt.NDArray[np.generic], type: ColumnType
) -> tuple[Column, tuple[BlobRef, bytes] | None]:
    """The column, and the blob that has to be stored (and acknowledged) before the column may be published."""
    body = pack_bytes(column, type)
    if len(body) < INLINE_LIMIT:
        return Column(type=type, n=len(column), data=base64.b64encode(body).decode()), None
    ref = BlobRef(sha256=hashlib.sha256(body).hexdigest(), size=len(body), media_type=f"application/x-polar-{type}")
    return Column(type=type, n=len(column), blob=ref), (ref, body)


def unzip(body: bytes, limit: int = _MAX_EXPANDED) -> bytes:
    """Decompress with a bound. Raises BlobError."""
    try:
        params = zstandard.get_frame_parameters(body)
        if params.content_size > limit:
            raise BlobError(f"body would expand to {params.content_size} bytes")
        return _per_thread.decompressor.decompress(body, max_output_size=limit)
    except zstandard.ZstdError as error:
        raise BlobError(f"damaged body: {error}") from error


def unpack(column: Column, body: bytes | None = None) -> npt.NDArray[np.generic]:
    """The numbers of a column, read-only. `body` is needed iff the column is in a blob. Raises BlobError."""
    if column.data is not None:
        try:
            body = base64.b64decode(column.data, validate=True)
        except ValueError as error:
            raise BlobError("a column isn't base64") from error
    elif body is None:
        raise BlobError("the column's blob wasn't given")
    dtype = _TYPES[column.type]
    raw = unzip(body, max(1, column.n * dtype.itemsize))
    if len(raw) != column.n * dtype.itemsize:
        raise BlobError(f"column says {column.n} numbers, holds {len(raw) // dtype.itemsize}")
    return np.frombuffer(raw, dtype=dtype)
