"""A segment that is rolled while tasks come in: whoever was told "accepted" is in it, nobody else, and it is served."""

from __future__ import annotations

import asyncio

import pytest
from ingest_fakes import start_edge, task

from polar_common.archive import segments as life
from polar_common.bus import Bus, scan
from polar_common.errors import ConfigError
from polar_common.nats_server import NatsServer
from polar_common.topology import Topology, events_stream

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]
WORKERS, TASKS = 8, 160


async def test_a_roll_amid_submissions_loses_none_and_takes_no_more(bus: Bus, nats_server: NatsServer) -> None:
    edge = await start_edge(nats_server.url)
    taken: set[str] = set()
    refused: set[str] = set()
    waiting = [f"n{number}" for number in range(TASKS)]

    async def submit() -> None:
        while waiting:
            name = waiting.pop()
            answer = await edge.client.post("/v1/tasks?run=r", json=task(name, samples=2))
            assert answer.status_code in (202, 503), answer.text
            if answer.status_code == 202:
                taken.add(name)
            else:
                assert "rolled" in answer.json()["error"]["message"], answer.text
                refused.add(name)

    submitting = [asyncio.ensure_future(submit()) for _ in range(WORKERS)]
    while len(taken) < TASKS // 4:
        await asyncio.sleep(0.005)
    assert await life.roll(bus, Topology()) == "s2"
    await asyncio.gather(*submitting)
    assert taken and refused and len(taken) + len(refused) == TASKS
    accepted = [s.event async for s in scan(bus, events_stream("s1"), ["polar.events.s1.task.*.accepted"])]
    assert sorted(e.spec.id for e in accepted) == sorted(taken)  # type: ignore[attr-defined]
    assert (await bus.js.stream_info(events_stream("s2"))).state.messages == 0
    # What was taken has to come to its end first.
    found = await life.survey(bus, "s1")
    assert (found.state, found.tasks, found.sessions) == ("rolled", len(taken), 2 * len(taken))
    assert found.live == found.sessions and await life.active(bus) == ("s1", ["s1", "s2"])
    with pytest.raises(ConfigError, match="haven't ended"):
        await life.seal(bus, "s1")
    await edge.kill()
