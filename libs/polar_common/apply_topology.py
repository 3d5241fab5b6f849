"""Create the streams and consumers on a server or cluster: `python -m polar_common.apply_topology`.

Run once before the services, as the user who may (`POLAR_NATS`, `POLAR_NATS_USER`, `POLAR_REPLICAS`, …). What exists is
left as it is; `polar up` does the same for its own server.
"""

from __future__ import annotations

import asyncio

from .bus import Bus
from .settings import HouseSettings
from .topology import Topology, apply

__all__ = ["main"]


async def _apply(settings: HouseSettings) -> None:
    password = settings.nats_password.get_secret_value()
    bus = await Bus.connect(settings.nats, "topology", user=settings.nats_user, password=password)
    try:
        topology = Topology(
            segment=settings.segment,
            replicas=settings.replicas,
            work_classes=settings.work_classes,
            build=settings.build,
        )
        await apply(bus.js, topology)
    finally:
        await bus.close()


def main() -> None:
    """Apply and return; the exit code says whether it worked."""
    asyncio.run(_apply(HouseSettings()))


if __name__ == "__main__":
    main()
