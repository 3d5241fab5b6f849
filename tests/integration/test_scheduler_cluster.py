"""Two schedulers on a log of three replicas, whose leader is killed in mid-run."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from ingest_fakes import FakeHouse, jitter, start_edge, task, until

from polar_common.bus import Bus
from polar_common.ids import new_id
from polar_common.nats_server import NatsConfig, NatsServer, free_port
from polar_common.topology import Topology, apply, events_stream

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(300)]
STREAM = events_stream("s1")
TASKS, SAMPLES = 8, 4


@pytest.fixture
def servers() -> Iterator[list[NatsServer]]:
    with tempfile.TemporaryDirectory(prefix="polar-nats-") as directory:
        ports = [free_port() for _ in range(3)]
        routes = tuple(f"nats://127.0.0.1:{p}" for p in ports)
        name = f"test-{new_id()[:8]}"
        made = []
        for number, port in enumerate(ports):
            data = Path(directory) / str(number) / "js"
            config = NatsConfig(
                data=data, port=free_port(), name=f"{name}-{number}", sync="2m",
                cluster_name=name, cluster_port=port, routes=routes,
            )  # fmt: skip
            made.append(NatsServer(config))
            made[-1].start()
        yield made
        for server in made:
            server.stop("kill")


async def ready(bus: Bus) -> bool:
    """Create the topology; a cluster without a meta leader yet refuses."""
    try:
        await apply(bus.js, Topology(replicas=3))
    except Exception:
        await asyncio.sleep(0.5)
        return False
    return True


async def leader(bus: Bus, servers: list[NatsServer]) -> NatsServer:
    info = await bus.js.stream_info(STREAM)
    assert info.cluster is not None
    return next(s for s in servers if s.config.name == info.cluster.leader)


async def test_a_killed_leader_costs_nothing(servers: list[NatsServer]) -> None:
    # One address is enough to come in: the servers tell their clients of each other.
    url = servers[0].url
    bus = await Bus.connect(url, "test/cluster")
    await until(lambda: ready(bus), 60)
    edges = [await start_edge(url, f"ingest/{i}", replicas=3, ingest_retry_delay_s=0.05) for i in range(2)]
    house = FakeHouse(bus, jitter(5), slots=4)
    async with house.open():
        made = []
        for number in range(TASKS):
            answer = await edges[number % 2].client.post("/v1/tasks?run=r", json=task(f"t{number}", samples=SAMPLES))
            assert answer.status_code == 202, answer.text
            made += answer.json()["tasks"]
        victim = await leader(bus, servers)
        victim.stop("kill")
        await asyncio.sleep(1.0)
        victim.start()

        async def all_closed() -> bool:
            return all(e.scheduler.world.runs["r"].groups_closed == TASKS for e in edges)

        await until(all_closed, 200)
    ended: Counter[str] = Counter()
    for end in ("completed", "failed", "cancelled"):
        ended.update(s.subject.split(".")[4] for s in await bus.read(STREAM, [f"polar.events.s1.session.*.0.{end}"]))
    assert ended == Counter(s for m in made for s in m["sessions"])
    assert not house.doubled
    assert Counter(house.claims).most_common(1)[0][1] == 1
    for edge in edges:
        await edge.kill()
    await bus.close()
