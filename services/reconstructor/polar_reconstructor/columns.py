"""Token columns straight from parsed JSON: what `polar_common.packing.unpack` does, without a model per column.

A long session has hundreds of columns; building validated models for them would cost more than the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import zstandard
from pybase64 import b64decode
from zstandard import frame_content_size

from polar_common.errors import BlobError, TraceError

__all__ = ["Floats", "Ids", "Mask", "blob_of", "floats", "ids"]

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint8]

_decompress = zstandard.ZstdDecompressor().decompress
_I32, _F32 = np.dtype("<i4"), np.dtype("<f4")
_MAX = 1 << 28
"""Numbers in one column; a context is far shorter."""


def blob_of(column: Any) -> str:
    """The hash of the blob that a column (or another holder of one) needs, or ""."""
    if isinstance(column, dict) and column.get("data") is None and isinstance(blob := column.get("blob"), dict):
        return str(blob.get("sha256", ""))
    return ""


def ids(column: object, blobs: Mapping[str, bytes], completion: str, label: str) -> Ids:
    """Read-only int32 ids. Damage raises TraceError or BlobError naming completion and column."""
    return cast(Ids, _numbers(column, "i32", _I32, blobs, completion, label))


def floats(column: object, blobs: Mapping[str, bytes], completion: str, label: str) -> Floats:
    """Read-only float32 numbers; errors as in `ids`."""
    return cast(Floats, _numbers(column, "f32", _F32, blobs, completion, label))


def _numbers(
    column: object, kind: str, dtype: np.dtype[Any], blobs: Mapping[str, bytes], completion: str, label: str
) -> npt.NDArray[np.generic]:
    if not isinstance(column, dict) or column.get("type") != kind:
        raise TraceError(f"completion {completion}, {label}: no column of {kind}")
    count, data = column.get("n"), column.get("data")
    if type(count) is not int or not 0 <= count <= _MAX:
        raise TraceError(f"completion {completion}, {label}: a column of {count!r} numbers")
    size = count * 4
    try:
        body = blobs[blob_of(column)] if data is None else b64decode(data, validate=True)
        if frame_content_size(body) > size:
            raise BlobError(f"completion {completion}, {label}: the column says {count} numbers and holds more")
        raw = _decompress(body, size or 1)
    except KeyError:
        raise BlobError(f"completion {completion}, {label}: blob {blob_of(column)} is missing") from None
    except (zstandard.ZstdError, ValueError, TypeError) as error:
        raise BlobError(f"completion {completion}, {label}: damaged column: {error}") from error
    if len(raw) != size:
        raise BlobError(f"completion {completion}, {label}: the column says {count} numbers, holds {len(raw) // 4}")
    return np.frombuffer(raw, dtype)
