"""The least HTTP/1.1 client that engines need: keep-alive connections, bodies as they come, abort by closing.

It exists because the client library costs more per call than all else that the proxy does with an engine (see
`bench/proxy.py`); parsing is `httptools`', as in the server. Bytes only: no redirects, cookies, proxies, compression.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httptools

from polar_common.errors import EngineDown

__all__ = ["Connections", "Response"]

_PAUSE_BYTES = 4 << 20
_IDLE_S = 30.0


class Response(asyncio.Protocol):
    """A connection, and the answer that is read from it. Header names are lower case."""

    def __init__(self, idle_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle_s = idle_s
        self._transport: Any = None
        self._parser: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._blocks: list[bytes] = []
        self._held = 0
        self._paused = False
        self._heard = 0.0
        self._opened = False
        self._complete = True
        self._keep = False
        self._error: Exception | None = None
        self.closed = False
        self.parked = 0.0
        self.over = False
        """All that matters of a stream was read."""
        self.on_end: Callable[[], None] | None = None
        self.status = 0
        self.headers: dict[str, str] = {}

    # -- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self.on_end is not None:
            self.on_end()
        if not self._complete:
            self._fail(exc or ConnectionError("the engine closed the connection"))
        self._disarm()

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        if self._parser is None or self._complete:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)
            self.close()

    def eof_received(self) -> None:
        """An answer without a length ends with its connection."""
        if self._opened and not self._complete and not self._keep and "content-length" not in self.headers:
            self.on_message_complete()

    # -- the parser's side

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower().decode("latin-1")] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._keep = self._parser.should_keep_alive()
        self._opened = True
        self._wake()

    def on_body(self, body: bytes) -> None:
        self._blocks.append(body)
        self._held += len(body)
        if self._held > _PAUSE_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        self._complete = True
        self._disarm()
        self._wake()
        if self.on_end is not None:
            self.on_end()

    # -- the caller's side

    def send(self, request: bytes) -> None:
        """Begin a request on a free connection."""
        self._parser = httptools.HttpResponseParser(self)
        self._blocks, self._held, self._error = [], 0, None
        self._opened = self._complete = self.over = False
        self.status, self.headers = 0, {}
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(self._idle_s, self._check)
        self._transport.write(request)

    @property
    def untouched(self) -> bool:
        """Nothing of the answer has arrived."""
        return not self._opened

    async def opened(self) -> None:
        """Wait for the status line and headers. Raises EngineDown."""
        while not self._opened:
            await self._more()

    async def block(self) -> bytes:
        """What has arrived of the body since the last call; b"" at its end. Raises EngineDown."""
        while not self._blocks:
            if self._complete:
                return b""
            await self._more()
        found = self._blocks[0] if len(self._blocks) == 1 else b"".join(self._blocks)
        self._blocks, self._held = [], 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return found

    async def read(self) -> bytes:
        """The whole body."""
        parts: list[bytes] = []
        while part := await self.block():
            parts.append(part)
        return b"".join(parts)

    @property
    def reusable(self) -> bool:
        return self._complete and self._keep and not self.closed and not self._paused

    def close(self) -> None:
        """Give the connection up; an engine takes that for an abort."""
        self._disarm()
        self._complete = True
        if not self.closed:
            self.closed = True
            self._transport.abort()

    async def _more(self) -> None:
        if self._error is not None:
            raise EngineDown(f"the engine's connection broke: {self._error!r}") from self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None:
            raise EngineDown(f"the engine's connection broke: {self._error!r}") from self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._wake()

    def _check(self) -> None:
        left = self._heard + self._idle_s - self._loop.time()
        if left > 0 or self._paused:
            self._timer = self._loop.call_later(max(left, 1.0), self._check)
            return
        self._timer = None
        self._fail(TimeoutError(f"nothing for {self._idle_s} s"))
        if not self.closed:
            self.closed = True
            self._transport.abort()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Connections:
    """Connections to one base URL. `idle_s`: an answer that stands still for so long is given up."""

    def __init__(self, url: str, *, connect_s: float, idle_s: float, token: str = "") -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or "127.0.0.1"
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/")
        self._connect_s = connect_s
        self._idle_s = idle_s
        name = f"[{self._host}]" if ":" in self._host else self._host
        login = f"authorization: Bearer {token}\r\n" if token else ""
        self._head = f"host: {name}:{self._port}\r\ncontent-type: application/json\r\n{login}content-length: "
        self._free: list[Response] = []
        self._used: set[Response] = set()

    async def request(self, method: str, path: str, body: bytes = b"", headers: str = "") -> Response:
        """The answer, its headers read. Give it back with `release`. Raises EngineDown."""
        head = f"{method} {self._base}{path} HTTP/1.1\r\n{headers}{self._head}{len(body)}\r\n\r\n".encode("latin-1")
        while True:
            connection, fresh = await self._take()
            self._used.add(connection)
            try:
                connection.send(head + body)
                await connection.opened()
                return connection
            except EngineDown:
                self._drop(connection)
                # The server may close a parked connection just when it's used; then it hasn't seen the request.
                if fresh or not connection.untouched:
                    raise
            except BaseException:
                self._drop(connection)
                raise

    def release(self, connection: Response, *, ending: bool = False) -> None:
        """Done with an answer. One that isn't read to its end takes its connection with it.

        `ending`: all that matters was read, the end is on its way.
        """
        connection.on_end = None
        if ending and not connection.reusable and not connection.closed:
            connection.on_end = lambda: self.release(connection)
            return
        self._used.discard(connection)
        if connection.reusable:
            connection.parked = asyncio.get_running_loop().time()
            self._free.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        for connection in (*self._free, *self._used):
            connection.close()
        self._free.clear()
        self._used.clear()

    def _drop(self, connection: Response) -> None:
        self._used.discard(connection)
        connection.close()

    async def _take(self) -> tuple[Response, bool]:
        now = asyncio.get_running_loop().time()
        while self._free:
            connection = self._free.pop()
            if not connection.closed and now - connection.parked < _IDLE_S:
                return connection, False
            connection.close()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, made = await loop.create_connection(
                    lambda: Response(self._idle_s), self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            raise EngineDown(f"the engine can't be reached: {error!r}") from error
        return made, True
