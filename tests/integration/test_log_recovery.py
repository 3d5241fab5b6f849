"""How soon a dead gateway's work goes on: within twice the lease, where another gateway stands by."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.integration import gateway_kit as kit

from polar_common.bus import Bus
from polar_common.ids import new_id
from polar_common.nats_server import NatsServer

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]
LEASE_S = 4.0


async def test_recovery_starts_within_two_leases(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> None:
    await kit.short_leases(bus, LEASE_S)
    mark = new_id()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with kit.process(nats_server.url, tmp_path / "one", instance="first") as first:
        session = await kit.release(bus, kit.script(f"exec sh -c 'sleep 300; : {mark}'"))
        assert await kit.there(mark)
        with kit.process(nats_server.url, tmp_path / "two", instance="second"):
            first.kill()
            killed = time.time()
            first.wait()
            state = await kit.over(bus, session)
    lost = state.attempts[1].at["lost"].timestamp()
    assert state.attempts[1].lost is not None
    assert lost - killed <= 2 * LEASE_S, lost - killed
