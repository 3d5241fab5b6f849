"""What a harness writes, kept in bounded memory, and the removal of its session key from all that is kept."""

from __future__ import annotations

import tempfile
from types import TracebackType
from typing import Self

from polar_runtime import Stream

__all__ = ["OutputLog", "redact"]

_IN_MEMORY = 128 << 10
_MARK = b"[session key removed]"


def redact(data: bytes, key: str) -> bytes:
    """`data` without the key. The length stays, so that patches still fit and offsets still count."""
    if not key:
        return data
    # A log may be cut within the key, and programs print parts of it: what authenticates is the end.
    for secret in (key, key.rpartition(".")[2]):
        raw = secret.encode()
        data = data.replace(raw, _MARK.ljust(len(raw), b"x")[: len(raw)])
    return data


class OutputLog:
    """Both streams in order of arrival, up to `limit` bytes; small ones stay in memory, large ones in an unnamed file,
    which disappears with the process."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115
        self.bytes = 0
        """All that was written, kept or not."""

    def write(self, _stream: Stream, data: bytes) -> None:
        """Take a piece of output."""
        room = self._limit - self.bytes
        self.bytes += len(data)
        if room > 0:
            self._file.write(data[:room])

    def read(self) -> bytes:
        """What was kept, with a last line that counts what wasn't."""
        self._file.seek(0)
        kept = self._file.read()
        dropped = self.bytes - len(kept)
        return kept + (b"\n[%d bytes more were written]\n" % dropped if dropped > 0 else b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
