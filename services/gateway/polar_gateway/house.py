"""What all attempts of one gateway share: its connections, sizes, and where runtimes and harnesses come from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.settings import docker_host
from polar_runtime import Runtime, RuntimeSpec, make_runtime

from .clock import LogClock
from .harnesses import registry, toolchain
from .harnesses.base import Harness
from .models import ModelHosts
from .patience import Patience
from .pools import Pools
from .settings import GatewaySettings

__all__ = ["House", "make_house"]


async def _toolchain(harness: Harness) -> Path | None:
    return await asyncio.to_thread(toolchain.ensure, harness)


@dataclass(slots=True)
class House:
    settings: GatewaySettings
    bus: Bus
    blobs: Blobs
    clock: LogClock
    pools: Pools
    models: ModelHosts
    patience: Patience
    gateway: str
    """This instance's name in `claimed`."""
    make_runtime: Callable[[RuntimeSpec], Runtime] = make_runtime
    find_harness: Callable[[str], Harness] = registry.find
    toolchain: Callable[[Harness], Awaitable[Path | None]] = _toolchain


def make_house(settings: GatewaySettings, bus: Bus, gateway: str) -> House:
    """A house with the pools that the settings ask for."""
    pools = Pools(
        settings.gateway_init_slots,
        settings.gateway_ready,
        settings.gateway_slots,
        settings.gateway_postrun_slots,
    )
    models = ModelHosts((*settings.gateway_engines, *settings.gateway_model_hosts))
    was_there = Path(docker_host().removeprefix("unix://")).exists()
    patience = Patience(settings.gateway_daemon_wait_s, was_there=was_there)
    return House(settings, bus, Blobs(bus, settings.segment), LogClock(), pools, models, patience, gateway)
