"""Long-poll pulls of a consumer: messages as they come, a heartbeat while there are none, and a notice when it's gone.

nats-py's `fetch(n)` waits for all n messages or its timeout; here each message is handed out as it arrives. Its
`next_msg` makes a task for each: a third of what reading costs, so messages are taken by callback.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

import nats.errors
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from polar_common.errors import NotFound, Unavailable
from polar_common.tasks import checkpoint

__all__ = ["Pull"]

_EXPIRES_S = 10.0
_HEARTBEAT_S = 2.5
_SILENCE_S = 3 * _HEARTBEAT_S + 0.5
"""Without a heartbeat for this long, the server doesn't know our request any more."""


class Pull:
    """Pull requests against one consumer. Ask for messages with `want`, take them with `next`."""

    def __init__(self, nc: Client, stream: str, consumer: str) -> None:
        self._nc = nc
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._name = f"{stream}/{consumer}"
        self._inbox = nc.new_inbox()
        self._sub: Subscription | None = None
        self._arrived: deque[Msg] = deque()
        self._arrival = asyncio.Event()
        self._pending = 0
        self.heard = asyncio.get_running_loop().time()
        """Loop time at which the server last sent anything, heartbeats included."""
        self._asked = self.heard
        self._connection = self._connects

    @property
    def pending(self) -> int:
        """Messages asked for and neither delivered nor expired."""
        return self._pending

    @property
    def _connects(self) -> int:
        """How often the connection was made anew: standing requests die with the old one."""
        return int(self._nc.stats["reconnects"])

    async def want(self, count: int) -> None:
        """Ask for `count` more messages; the request stands for ten seconds.

        Raises Unavailable while there is no connection: a request that waits for one may be answered to nobody.
        """
        if not self._nc.is_connected:
            raise Unavailable(f"{self._name}: not connected")
        if not self._pending:
            self._asked, self._connection = asyncio.get_running_loop().time(), self._connects
        if self._sub is None:
            self._sub = await self._nc.subscribe(
                self._inbox, cb=self._take, pending_msgs_limit=-1, pending_bytes_limit=-1
            )
        body = {"batch": count, "expires": int(_EXPIRES_S * 1e9), "idle_heartbeat": int(_HEARTBEAT_S * 1e9)}
        self._pending += count
        await self._nc.publish(self._subject, orjson.dumps(body), reply=self._inbox)

    async def next(self, timeout: float) -> Msg | None:
        """The next message, or None after `timeout` seconds, at a heartbeat, or when a request expired.

        Raises NotFound if the consumer is gone, Unavailable if the server is silent.
        """
        checkpoint()
        if self._sub is None:
            await asyncio.sleep(timeout)
            return None
        if not self._arrived:
            if self._nc.is_closed:
                raise Unavailable(f"{self._name}: the connection is closed")
            self._arrival.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._arrival.wait()
            except TimeoutError:
                self._check()
                return None
        msg = self._arrived.popleft()
        self.heard = asyncio.get_running_loop().time()
        status = (msg.headers or {}).get("Status", "") if not msg.data else ""
        if not status:
            self._pending = max(0, self._pending - 1)
            return msg
        if status == "100":
            return None
        left = (msg.headers or {}).get("Nats-Pending-Messages")
        self._pending = max(0, self._pending - int(left)) if left else 0
        description = (msg.headers or {}).get("Description", "")
        if status == "503" or (status == "409" and "Consumer Deleted" in description):
            raise NotFound(f"{self._name} is gone: {status} {description}")
        return None

    async def _take(self, msg: Msg) -> None:
        self._arrived.append(msg)
        self._arrival.set()

    def _check(self) -> None:
        """Nothing came: because there is nothing, or because nobody knows our requests?"""
        if not self._pending:
            return
        if self._connection != self._connects:
            raise Unavailable(f"{self._name}: the connection was made anew")
        if asyncio.get_running_loop().time() - max(self.heard, self._asked) > _SILENCE_S:
            raise Unavailable(f"{self._name}: the consumer is silent")

    async def close(self) -> None:
        if self._sub is not None and not self._nc.is_closed:
            # A connection that is just being lost forgets its subscriptions anyway.
            with suppress(OSError, nats.errors.Error):
                await self._sub.unsubscribe()
        self._sub = None
        self._arrived.clear()
        self._pending = 0
