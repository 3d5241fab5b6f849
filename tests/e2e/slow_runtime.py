"""Runtimes of a user's that take for ever in one stage; a house loads them by `module:Class`."""

from __future__ import annotations

import asyncio

from polar_runtime.local import LocalRuntime

__all__ = ["SlowDiff", "SlowStart"]


class SlowStart(LocalRuntime):
    """A host that doesn't get it ready."""

    async def start(self) -> None:
        await super().start()
        await asyncio.sleep(600)


class SlowDiff(LocalRuntime):
    """A working directory of which no patch can be made in time."""

    async def diff(self, base: str | None = None) -> bytes:
        await asyncio.sleep(600)
        return b""
