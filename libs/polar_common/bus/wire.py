"""How an event's body lies in its message.

A server compresses the blocks of a stream that isn't replicated; where it doesn't, whoever publishes an event
compresses the body: one zstd frame, told by the header `Content-Encoding: zstd`. Everybody reads both, and hashes are
of the body itself. Traces and blobs always lie as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

from polar_common.errors import BlobError
from polar_common.packing import compress, unzip

__all__ = ["ENCODING", "WORTH", "compressed", "plain"]

ENCODING = "Content-Encoding"
_ZSTD = "zstd"
WORTH = 1_000
"""Bytes from which on compressing saves more than the header costs."""
_MAX_BODY = 1 << 26


def compressed(body: bytes) -> tuple[bytes, dict[str, str]]:
    """The body as it travels, and the header that says so."""
    return compress(body), {ENCODING: _ZSTD}


def plain(headers: Mapping[str, str], data: bytes) -> bytes:
    """The body. What isn't what its header says is left as it is: no version of an event, so a dead letter."""
    if headers.get(ENCODING) != _ZSTD:
        return data
    try:
        return unzip(data, _MAX_BODY)
    except BlobError:
        return data
