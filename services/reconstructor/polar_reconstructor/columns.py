"""Token columns straight from parsed JSON: what `polar_common.packing.unpack` does, without a model per column.

A long session has hundreds of columns; building validated models for them would cost more than the numbers themselves.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import zstandard

from polar_common.errors import BlobError, TraceError

__all__ = ["Floats", "Ids", "Mask", "blob_of", "floats", "ids"]

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint8]

_DECOMPRESSOR = zstandard.ZstdDecompressor()
_I32, _F32 = np.dtype("<i4"), np.dtype("<f4")
_MAX = 1 << 28
"""Numbers in one column; a context is far shorter."""


def blob_of(column: Any) -> str:
    """The hash of the blob that a column (or another holder of one) needs, or ""."""
    if isinstance(column, dict) and column.get("data") is None and isinstance(blob := column.get("blob"), dict):
        return str(blob.get("sha256", ""))
    return ""


def ids(column: object, blobs: Mapping[str, bytes], place: str) -> Ids:
    """Read-only int32 ids. `place` is named by the TraceError or BlobError that a damaged column raises."""
    return cast(Ids, _numbers(column, "i32", _I32, blobs, place))


def floats(column: object, blobs: Mapping[str, bytes], place: str) -> Floats:
    """Read-only float32 numbers; errors as in `ids`."""
    return cast(Floats, _numbers(column, "f32", _F32, blobs, place))


def _numbers(
    column: object, kind: str, dtype: np.dtype[Any], blobs: Mapping[str, bytes], place: str
) -> npt.NDArray[np.generic]:
    if not isinstance(column, dict) or column.get("type") != kind:
        raise TraceError(f"{place}: no column of {kind}")
    count = column.get("n")
    if type(count) is not int or not 0 <= count <= _MAX:
        raise TraceError(f"{place}: a column of {count!r} numbers")
    body = _body(column, blobs, place)
    size = count * 4
    try:
        if zstandard.frame_content_size(body) > size:
            raise BlobError(f"{place}: the column says {count} numbers and holds more")
        raw = _DECOMPRESSOR.decompress(body, max_output_size=max(1, size))
    except zstandard.ZstdError as error:
        raise BlobError(f"{place}: damaged column: {error}") from error
    if len(raw) != size:
        raise BlobError(f"{place}: the column says {count} numbers and holds {len(raw) // 4}")
    return np.frombuffer(raw, dtype)


def _body(column: dict[str, Any], blobs: Mapping[str, bytes], place: str) -> bytes:
    data = column.get("data")
    if data is None:
        key = blob_of(column)
        try:
            return blobs[key]
        except KeyError:
            raise BlobError(f"{place}: blob {key or '(unnamed)'} is missing") from None
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except (ValueError, TypeError) as error:
        raise BlobError(f"{place}: a column isn't base64") from error
