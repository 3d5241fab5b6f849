"""Requests whose answers come to one inbox of our own: what a publish costs is mostly waiting for its acknowledgement.

nats-py's `request` makes a name, a timer task and two hops per answer; this makes a number and a future.
"""

from __future__ import annotations

import asyncio

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

__all__ = ["Acks"]


class Acks:
    """One connection's pending answers."""

    def __init__(self, nc: Client) -> None:
        self._nc = nc
        self._prefix = ""
        self._number = 0
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self._starting = asyncio.Lock()

    async def request(self, subject: str, body: bytes, headers: dict[str, str], timeout: float) -> Msg:
        """The answer. Raises TimeoutError, NoRespondersError, or what publishing raises."""
        if not self._prefix:
            await self._start()
        self._number += 1
        name = str(self._number)
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[name] = answer
        try:
            await self._nc.publish(subject, body, reply=self._prefix + name, headers=headers)
            async with asyncio.timeout(timeout):
                msg = await answer
        finally:
            self._waiting.pop(name, None)
        if not msg.data and msg.headers and msg.headers.get("Status") == "503":
            raise nats.errors.NoRespondersError
        return msg

    async def _start(self) -> None:
        async with self._starting:
            if not self._prefix:
                prefix = self._nc.new_inbox() + "."
                await self._nc.subscribe(prefix + "*", cb=self._heard)
                self._prefix = prefix

    async def _heard(self, msg: Msg) -> None:
        answer = self._waiting.get(msg.subject[len(self._prefix) :])
        if answer is not None and not answer.done():
            answer.set_result(msg)
