"""A command's output: handed on up to a limit, counted beyond it, with its head and tail kept."""

from __future__ import annotations

from polar_runtime.base import OnOutput, Stream

__all__ = ["Output"]

TAIL_BYTES = 8192
HEAD_BYTES = 1 << 20


class Output:
    """Collects one command's streams in bounded memory. `feed` is called in order of arrival."""

    def __init__(self, on_output: OnOutput | None, limit: int) -> None:
        self.bytes = 0
        self._on_output = on_output
        self._limit = limit
        self._tail = bytearray()
        self._stdout = bytearray()

    def feed(self, stream: Stream, data: bytes) -> None:
        """Take a piece. The callback's own error is the caller's."""
        room = self._limit - self.bytes
        self.bytes += len(data)
        self._tail += data[-TAIL_BYTES:]
        del self._tail[:-TAIL_BYTES]
        if stream == "stdout" and len(self._stdout) < HEAD_BYTES:
            self._stdout += data[: HEAD_BYTES - len(self._stdout)]
        if self._on_output is None or room <= 0:
            return
        self._on_output(stream, data[:room])
        if len(data) >= room:
            self._on_output(stream, b"\n[polar: output beyond %d bytes is counted, not kept]\n" % self._limit)

    @property
    def tail(self) -> str:
        """The last 8 KiB of both streams; bytes that aren't UTF-8 are replaced."""
        return self._tail.decode(errors="replace")

    @property
    def stdout(self) -> bytes:
        """The first MiB of standard output."""
        return bytes(self._stdout)
