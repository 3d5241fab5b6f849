"""One HTTP request and its answer, seen from the call flow: is the caller still there, and bytes towards it.

uvicorn keeps the connection's state in the object whose bound method it passes as `receive`; reading it costs nothing,
whereas waiting for `http.disconnect` takes a task per call. Under another server the waiting is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from polar_common.tasks import spawn

__all__ = ["Exchange", "Message", "Sweeper"]

Message = dict[str, Any]
_SWEEP_S = 0.05


class Exchange:
    """An ASGI request whose body has been read."""

    __slots__ = ("_cycle", "_gone", "_receive", "_send", "_stall_s", "_watch", "on_gone", "started", "task")

    def __init__(
        self,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
        stall_s: float = 60.0,
    ) -> None:
        self._stall_s = stall_s
        self._receive = receive
        self._send = send
        self._cycle = getattr(receive, "__self__", None)
        self._gone = False
        self._watch: asyncio.Task[None] | None = None
        self.started = False
        self.on_gone: Callable[[], None] | None = None
        self.task = asyncio.current_task()
        if not hasattr(self._cycle, "disconnected"):
            self._cycle = None

    @property
    def gone(self) -> bool:
        """The caller has closed its connection."""
        return self._gone or (self._cycle is not None and bool(self._cycle.disconnected))

    def watch(self) -> None:
        """Needed where the server doesn't tell: wait for the disconnect in the background."""
        if self._cycle is None and self._watch is None:
            self._watch = spawn(self._wait(), name="disconnect")

    def unwatch(self) -> None:
        self.on_gone = None
        if self._watch is not None:
            self._watch.cancel()

    async def _wait(self) -> None:
        while (await self._receive()).get("type") != "http.disconnect":
            pass
        self._gone = True

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Status line and headers. A client that is gone is no error here."""
        self.started = True
        pairs = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
        await self._sent({"type": "http.response.start", "status": status, "headers": pairs})

    async def send(self, data: bytes, *, more: bool = True) -> None:
        await self._sent({"type": "http.response.body", "body": data, "more_body": more})

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """A whole answer."""
        await self.start(status, {**headers, "content-length": str(len(body))})
        await self.send(body, more=False)

    async def _sent(self, message: Message) -> None:
        flow = getattr(self._cycle, "flow", None)
        with suppress(OSError):
            if flow is None or not flow.write_paused:
                await self._send(message)
                return
            try:
                async with asyncio.timeout(self._stall_s):
                    await self._send(message)
            except TimeoutError:
                self._drop()

    def _drop(self) -> None:
        """Give up on a client that doesn't read: its buffers are full, so nothing can be told to it."""
        self._gone = True
        transport = getattr(self._cycle, "transport", None)
        if transport is not None:
            transport.abort()


class Sweeper:
    """Tells running calls that their caller has gone, by looking at all of them twenty times a second."""

    def __init__(self) -> None:
        self._running: set[Exchange] = set()

    def __len__(self) -> int:
        return len(self._running)

    def add(self, exchange: Exchange, on_gone: Callable[[], None]) -> None:
        exchange.on_gone = on_gone
        exchange.watch()
        self._running.add(exchange)

    def remove(self, exchange: Exchange) -> None:
        self._running.discard(exchange)
        exchange.unwatch()

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            for exchange in [e for e in self._running if e.gone]:
                self._running.discard(exchange)
                if exchange.on_gone is not None:
                    exchange.on_gone()
