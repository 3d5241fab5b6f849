"""How commands reach the log: the house's, as one of its users, or the one that `POLAR_NATS` names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from polar_common.bus import Bus
from polar_common.errors import ConfigError
from polar_common.house import find_house
from polar_common.permissions import TOOLS

from .house import _DATA

__all__ = ["with_bus"]

T = TypeVar("T")


def with_bus(data: Path, work: Callable[[Bus], Awaitable[T]], user: str = TOOLS) -> T:
    """Connect, work, disconnect. Raises ConfigError if no log is to be found."""
    url = find_house(data if data != _DATA else None, user).nats
    if not url:
        raise ConfigError("a remote house's log is reached by POLAR_NATS", "nats")

    async def run() -> T:
        bus = await Bus.connect(url, "cli", wait_s=5.0)
        try:
            return await work(bus)
        finally:
            await bus.close()

    return asyncio.run(run())
