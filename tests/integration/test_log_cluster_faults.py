"""Three servers in trouble together: killed at once, with full stores, and out of reach of their clients.

`test_log_server.py` and `test_log_disk.py` ask the same of one server.
"""

from __future__ import annotations

import asyncio
import base64
import random
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import nats.errors
import orjson
import pytest
from ingest_fakes import start_edge, task
from nats.js.errors import APIError
from test_log_disk import Disk, disks, fill
from test_log_server import Wire, traffic
from tests.conftest import replicated
from tests.integration import gateway_kit as kit

from polar_common.bus import Bus, scan
from polar_common.errors import Unavailable
from polar_common.events import SessionAccepted
from polar_common.ids import new_id
from polar_common.nats_server import NatsCluster
from polar_common.topology import Topology, events_stream

pytestmark = [pytest.mark.nats, pytest.mark.timeout(240)]
STREAM = events_stream("s1")


def text(name: str, size: int) -> str:
    """What takes so many bytes on the log, though it lies compressed."""
    return base64.b85encode(random.Random(name).randbytes(size)).decode()


def accepted(name: str, size: int = 8) -> SessionAccepted:
    return SessionAccepted(session=f"s1-{name}-0", attempt=0, index=0, work_class=text(name, size))


@contextmanager
def three(directory: Path) -> Iterator[NatsCluster]:
    """Servers of the test's own, not started yet."""
    cluster = NatsCluster(directory)
    try:
        yield cluster
    finally:
        cluster.stop("kill")


@pytest.fixture
def cluster() -> Iterator[NatsCluster]:
    with tempfile.TemporaryDirectory(prefix="polar-three-") as name, three(Path(name)) as made:
        yield made


async def whole(bus: Bus) -> None:
    """Until the stream has a leader and its replicas have caught up."""
    async with asyncio.timeout(60):
        while True:
            try:
                found = (await bus.js.stream_info(STREAM)).cluster
                if found is not None and found.leader and all(r.current for r in found.replicas or ()):
                    return
            except (APIError, TimeoutError, nats.errors.Error):
                pass
            await asyncio.sleep(0.2)


async def led_by(bus: Bus, name: str) -> None:
    """Make that server the leader of the events."""
    wish = orjson.dumps({"placement": {"preferred": name}})
    async with asyncio.timeout(90):
        while True:
            # A server that has just come back may leave questions unanswered.
            with suppress(APIError, TimeoutError, nats.errors.Error):
                found = (await bus.js.stream_info(STREAM)).cluster
                if found is not None and found.leader == name:
                    break
                await bus.nc.request(f"$JS.API.STREAM.LEADER.STEPDOWN.{STREAM}", wish, timeout=5)
            await asyncio.sleep(0.5)
    await whole(bus)


async def written(bus: Bus, acknowledged: dict[str, int], numbers: range) -> int:
    """Publish events of 20 kB and remember what was acknowledged; returns how many were refused."""
    refused = 0
    for number in numbers:
        event = accepted(f"n{number}", 20_000)
        try:
            acknowledged[event.subject()] = (await bus.once(event)).sequence
        except Unavailable:
            refused += 1
            if refused == 2:
                break
    return refused


async def held(bus: Bus) -> dict[str, int]:
    async with asyncio.timeout(60):
        return {s.subject: s.sequence async for s in scan(bus, STREAM, [">"])}


async def test_r3_servers_killed_together_lose_nothing_acknowledged(cluster: NatsCluster) -> None:
    """More than a block of the store, and a leader that changed in between: each replays its log into a block that is
    complete."""
    cluster.start()
    bus = await replicated(cluster)
    acknowledged: dict[str, int] = {}
    await written(bus, acknowledged, range(460))
    leader = (await bus.js.stream_info(STREAM)).cluster.leader
    await led_by(bus, next(s.config.name for s in cluster.servers if s.config.name != leader))
    assert await written(bus, acknowledged, range(460, 900)) == 0
    await bus.close()
    cluster.stop("kill")
    cluster.start()
    bus = await Bus.connect(cluster.url, "test/bus")
    await whole(bus)
    assert await held(bus) == acknowledged and len(acknowledged) == 900
    await bus.close()


# -- full stores, bounded by small disks


@asynccontextmanager
async def on_disks(directory: Path, small: int) -> AsyncIterator[tuple[NatsCluster, list[Disk], Bus]]:
    """Three servers; the disks of the first `small` are too small for what is to come."""
    with disks([directory / f"n{number}" for number in range(small)], 12) as made, three(directory) as cluster:
        cluster.start()
        bus = await replicated(cluster, Topology(replicas=3, dlq_bytes=-1))
        await led_by(bus, cluster.servers[0].config.name)
        yield cluster, made, bus


@pytest.mark.slow
async def test_r3_the_leaders_full_store_costs_it_the_lead_and_nothing_else(tmp_path: Path) -> None:
    async with on_disks(tmp_path, 1) as (cluster, made, bus):
        acknowledged: dict[str, int] = {}
        full = cluster.servers[0]
        # The one that found its store full may be refused; what comes then is taken by another leader.
        assert await written(bus, acknowledged, range(700)) <= 1
        assert len(acknowledged) >= 699
        full.stop("kill")
        made[0].grow(64)
        full.start()
        await led_by(bus, full.config.name)
        there = await held(bus)
        assert acknowledged.items() <= there.items() and len(there) <= 700
        await bus.close()


async def test_r3_the_leaders_disk_without_space_costs_it_the_lead_and_nothing_else(tmp_path: Path) -> None:
    """ENOSPC: somebody else's file takes what the store may still have."""
    async with on_disks(tmp_path, 1) as (cluster, made, bus):
        made[0].grow(64)
        rest = fill(made[0], 4 << 20)
        acknowledged: dict[str, int] = {}
        full = cluster.servers[0]
        assert await written(bus, acknowledged, range(400)) <= 1
        assert len(acknowledged) >= 399
        assert "no space left on device" in full.log.read_text()
        full.stop("kill")
        rest.unlink()
        full.start()
        await whole(bus)
        await led_by(bus, full.config.name)
        there = await held(bus)
        assert acknowledged.items() <= there.items() and len(there) <= 400
        await bus.close()


async def test_r3_full_stores_refuse_stop_admission_and_keep_what_was_acknowledged(tmp_path: Path) -> None:
    async with on_disks(tmp_path, 3) as (cluster, made, bus):
        edge = await start_edge(cluster.url)
        assert (await edge.client.post("/v1/tasks?run=r", json=task("before"))).status_code == 202
        acknowledged: dict[str, int] = {}
        assert await written(bus, acknowledged, range(700)) == 2
        assert len(acknowledged) > 100
        answer = await edge.client.post("/v1/tasks?run=r", json=task("later", instruction=text("later", 60_000)))
        assert answer.status_code == 503 and answer.json()["error"], answer.text
        await edge.kill()
        await bus.close()
        cluster.stop("kill")
        for disk in made:
            disk.grow(64)
        cluster.start()
        bus = await Bus.connect(cluster.url, "test/bus")
        await whole(bus)
        assert acknowledged.items() <= (await held(bus)).items()
        edge = await start_edge(cluster.url)
        assert (await edge.client.post("/v1/tasks?run=r", json=task("later"))).status_code == 202
        await edge.kill()
        await bus.close()


# -- out of reach


class Wires:
    """A relay in front of each server; the servers tell clients of no other way to them."""

    def __init__(self, cluster: NatsCluster) -> None:
        self.wires = [Wire(server.config.port) for server in cluster.servers]
        for server, wire in zip(cluster.servers, self.wires, strict=True):
            server.config = replace(server.config, extra={"client_advertise": f'"127.0.0.1:{wire.port}"'})

    @property
    def url(self) -> str:
        return ",".join(wire.url for wire in self.wires)

    async def up(self) -> None:
        await asyncio.gather(*(wire.up() for wire in self.wires))

    async def down(self) -> None:
        await asyncio.gather(*(wire.down() for wire in self.wires))


@asynccontextmanager
async def wired(cluster: NatsCluster) -> AsyncIterator[tuple[Wires, Bus, Bus]]:
    """The relays, a bus beside them, and one that has no other way."""
    wires = Wires(cluster)
    cluster.start()
    near = await replicated(cluster)
    await wires.up()
    far = await Bus.connect(wires.url, "test/far")
    yield wires, near, far
    await far.close()
    await near.close()
    await wires.down()


@pytest.mark.parametrize("cut_s", [7, pytest.param(30, marks=pytest.mark.slow)])
async def test_r3_clients_cut_off_from_all_servers_lose_and_double_nothing(cluster: NatsCluster, cut_s: float) -> None:
    """Cut for longer than a publish waits for its answer, and for half a minute."""
    async with wired(cluster) as (wires, near, far):
        async with traffic(far):
            await wires.down()
            await asyncio.sleep(1)
            before = len(await held(near))
            await asyncio.sleep(cut_s - 1)
            # Nobody found another way.
            assert len(await held(near)) == before < 120
            await wires.up()
        assert len(await held(near)) == 120


async def test_r3_a_gateway_cut_off_from_all_servers_kills_its_runtime_and_stays_silent(
    cluster: NatsCluster, tmp_path: Path
) -> None:
    async with wired(cluster) as (wires, near, far):
        await kit.short_leases(near, 3.0)
        mark = new_id()
        async with kit.gateway(far, kit.settings(tmp_path / "far")) as gateway:
            session = await kit.release(near, kit.script(f"exec sh -c 'sleep 300; : {mark}'"))
            assert await kit.there(mark)
            state = await kit.phase(near, session, "running")
            await wires.down()
            # Two thirds of the lease, and then the time to kill.
            assert await kit.gone(mark, 6.0)
            async with asyncio.timeout(5):
                while gateway.live:
                    await asyncio.sleep(0.02)
            async with kit.gateway(near, kit.settings(tmp_path / "near")):
                settled = await kit.over(near, session)
            assert settled.attempts[1].lost is not None and settled.attempts[1].exited is None
            await wires.up()
            await asyncio.sleep(2)
            after = await kit.load(near, session)
            assert after.last_seq == settled.last_seq and kit.names(after)[: len(kit.names(state))] == kit.names(state)
