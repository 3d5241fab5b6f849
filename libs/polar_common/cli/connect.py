"""How commands reach the log: the house's, as one of its users, or the one that `POLAR_NATS` names."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from polar_common.bus import Bus
from polar_common.errors import ConfigError
from polar_common.house import find_house
from polar_common.permissions import TOOLS

from .house import _DATA

__all__ = ["log_url", "with_bus"]

T = TypeVar("T")


def log_url(data: Path | None, user: str = TOOLS) -> str:
    """The log's address with who connects. Raises ConfigError if no log is to be found."""
    url = find_house(data if data != _DATA else None, user).nats
    if not url:
        raise ConfigError("a remote house's log is reached by POLAR_NATS", "nats")
    return url


def with_bus(data: Path | None, work: Callable[[Bus], Coroutine[Any, Any, T]], user: str = TOOLS) -> T:
    """Connect, work, disconnect. Raises ConfigError if no log is to be found, or it forbids the work to this user."""
    url = log_url(data, user)

    async def run() -> T:
        bus = await Bus.connect(url, "cli", wait_s=5.0)
        try:
            return await bus.allowed(work(bus))
        finally:
            await bus.close()

    return uvloop.run(run())
