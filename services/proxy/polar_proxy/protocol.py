"""HTTP connections with bounds that uvicorn doesn't have: the size of a request's head, and the time it may take.

A request costs the proxy nothing until its head is complete; one that trickles in is cut off. What one turn of the
loop writes leaves in one piece: uvicorn alone sends the head of an answer by itself, a system call and a packet more.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import unquote, urlsplit

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from polar_common.errors import RequestError
from polar_proxy.dialects import route

from .metrics import METRICS

__all__ = ["BoundedProtocol"]

_FIRST_S = 75.0


class _Corked:
    """A transport whose writes of one turn of the loop are joined."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._waiting: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(data)

    def _flush(self) -> None:
        if self._waiting:
            data, self._waiting = b"".join(self._waiting), []
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedProtocol(HttpToolsProtocol):
    """Use `bounded` to make a class with limits; uvicorn makes one instance per connection."""

    head_limit = 64 << 10
    head_s = 30.0

    @classmethod
    def bounded(cls, head_limit: int, head_s: float) -> type[BoundedProtocol]:
        """`head_limit` in bytes, `head_s` in seconds from a head's first byte to its last."""
        return type("BoundedProtocol", (cls,), {"head_limit": head_limit, "head_s": head_s})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_bytes = 0
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Corked(transport, self.loop))  # type: ignore[arg-type]
        self._timer = self.loop.call_later(_FIRST_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if not self._in_head:
            if self._timer is not None:
                self._disarm()
            return
        self._head_bytes += len(data)
        if self._head_bytes > self.head_limit:
            self._refuse(431, "the request's head is too large")
        elif self._timer is None or self._head_bytes == len(data):
            self._disarm()
            self._timer = self.loop.call_later(self.head_s, self._too_slow)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.head_limit:
            self._refuse(431, "the request's head is too large")
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._in_head:
            self._refuse(408, "the request's head didn't arrive in time")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        self._refused = True
        self._disarm()
        METRICS.rejected.labels(str(status)).inc()
        if self.transport.is_closing():
            return
        path = unquote(urlsplit(self.url.decode("latin-1")).path)
        if path.startswith("/s/"):
            path = "/" + path[3:].partition("/")[2]
        _, headers, body = route("POST", path, {}, {})[0].error(RequestError(message, status=status))
        lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
        head = f"HTTP/1.1 {status} Refused\r\n{lines}connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
