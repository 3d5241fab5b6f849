"""How events lie in the log: compressed by the server where it can, else by whoever publishes; read alike by all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from log_kit import accepted, lived, spec
from tests.conftest import either, replicated

from polar_common.archive import check_archive, export
from polar_common.archive.load import load_archive
from polar_common.archive.read import read_archive
from polar_common.bus import Bus, Lease, Stored, Worker, follow, scan
from polar_common.bus.wire import ENCODING, WORTH
from polar_common.errors import Poison
from polar_common.events import SessionQueued, TaskAccepted, encode
from polar_common.nats_server import NatsCluster, NatsServer
from polar_common.topology import DLQ, Topology, events_stream, work_consumer
from polar_common.verify import LiveSource, Options, audit

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]
STREAM = events_stream("s1")
LONG = spec(0).model_copy(update={"instruction": "Mend the test of the parser. " * 200})


@pytest.fixture(params=[1, 3])
def topology(request: pytest.FixtureRequest) -> Topology:
    return Topology(replicas=request.param)


@pytest.fixture
async def bus(topology: Topology, request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    connected = await either(request, topology)
    yield connected
    await connected.close()


async def lies(bus: Bus, sequence: int) -> tuple[bytes, str]:
    """A message as the server has it: body, and what it says of its encoding."""
    message = await bus.js.get_msg(STREAM, sequence)
    return message.data or b"", (message.headers or {}).get(ENCODING, "")


async def every_way(bus: Bus, subject: str, sequence: int) -> list[Stored]:
    """One message as each of the readers has it."""
    found: list[Stored] = []
    last = await bus.last(subject)
    assert last is not None
    found += [last, *await bus.read(STREAM, [subject], at_least=sequence)]
    found += [s async for s in scan(bus, STREAM, [subject])]
    async for stored in follow(bus, STREAM, [subject]):
        found.append(stored)
        break
    return found


async def test_a_long_body_reads_as_it_was_published(bus: Bus, topology: Topology) -> None:
    """By each way of publishing; where the server compresses, the message is the body itself."""
    task, session = accepted(0, samples=1)
    assert isinstance(task, TaskAccepted)
    task = task.model_copy(update={"spec": LONG, "producer": "test"})
    at = (await bus.batch([task, session])).sequence
    queued = SessionQueued(
        session=session.session,
        attempt=1,
        work_class="local",
        spec=LONG,
        producer="test",  # type: ignore[attr-defined]
    )
    queued_at = (await bus.transition(queued, at)).sequence
    other = accepted(1)[0].model_copy(update={"spec": LONG, "producer": "test"})
    other_at = (await bus.once(other)).sequence
    assert (await bus.once(other)).duplicate
    for event, sequence in ((task, at - 1), (queued, queued_at), (other, other_at)):
        body, encoding = await lies(bus, sequence)
        assert (body == encode(event), encoding) == ((True, "") if topology.replicas == 1 else (False, "zstd"))
        assert topology.replicas == 1 or len(body) < len(encode(event)) / 4
        found = await every_way(bus, event.subject(), sequence)
        assert {(s.body, s.sequence, s.body_hash) for s in found} == {(encode(event), sequence, event.body_hash())}
        assert len(found) == 4 and all(s.event == event for s in found)
    assert await lies(bus, at) == (encode(session.model_copy(update={"producer": bus.producer})), ""), "a short one"
    leased: list[bytes] = []
    stop = asyncio.Event()

    async def handle(lease: Lease) -> None:
        leased.append(lease.stored.body)
        stop.set()

    await asyncio.wait_for(Worker(bus, work_consumer("local"), handle).run(stop), 20)
    assert leased == [encode(queued)]


async def test_bodies_that_lie_as_they_are_are_read_beside_others(bus: Bus) -> None:
    """Those of a log that was begun before, and of publishers that don't compress."""
    event = accepted(0)[0].model_copy(update={"spec": LONG, "producer": "test"})
    await bus.nc.request(event.subject(), encode(event), headers={"Polar-Body": event.body_hash()}, timeout=5)
    assert {s.body for s in await every_way(bus, event.subject(), 1)} == {encode(event)}
    assert (await bus.once(event)).duplicate


@pytest.mark.parametrize("body", [b"\x28\xb5\x2f\xfd cut", b'{"kind": "session.queued"}', b""])
async def test_what_isnt_what_its_header_says_is_buried_and_others_go_on(bus: Bus, body: bytes) -> None:
    subject = "polar.events.s1.session.s1-bad-0.1.queued.local"
    await bus.nc.request(subject, body, headers={ENCODING: "zstd"}, timeout=5)
    at = (await bus.batch(accepted(1, samples=1))).sequence
    session = accepted(1, samples=1)[1].session  # type: ignore[attr-defined]
    await bus.transition(SessionQueued(session=session, attempt=1, work_class="local", spec=LONG), at)
    for stored in await every_way(bus, subject, 1):
        with pytest.raises(Poison):
            _ = stored.event
    stop = asyncio.Event()
    good: list[str] = []

    async def handle(lease: Lease) -> None:
        good.append(lease.stored.event.kind)
        stop.set()

    await asyncio.wait_for(Worker(bus, work_consumer("local"), handle, slots=1).run(stop), 20)
    assert good == ["session.queued"]
    assert await bus.last("polar.dlq.gateway-local.>", DLQ) is not None


async def test_a_clusters_archive_is_that_of_one_server_and_back(
    nats_cluster: NatsCluster, nats_server: NatsServer, tmp_path: Path
) -> None:
    """An archive holds bodies, whoever compressed them; each server lays them down in its own way."""
    cluster, single = await replicated(nats_cluster), await Bus.connect(nats_server.url, "test/bus")
    await lived(cluster)
    stored = [s async for s in scan(cluster, STREAM, [">"])]
    long = next(s for s in stored if len(s.body) >= WORTH and s.subject.endswith(".captured"))
    assert (await lies(cluster, long.sequence))[1] == "zstd"
    await export(cluster, tmp_path / "a", "s1")
    assert check_archive(tmp_path / "a")[1] == []
    await load_archive(single, tmp_path / "a", Topology())
    assert await lies(single, long.sequence) == (long.body, "")
    await export(single, tmp_path / "b", "s1")
    again = await replicated(nats_cluster)
    await load_archive(again, tmp_path / "b", Topology(replicas=3))
    assert (await lies(again, long.sequence))[1] == "zstd"
    for found in (
        list(read_archive(tmp_path / "a", "events")),
        list(read_archive(tmp_path / "b", "events")),
        [s async for s in scan(again, STREAM, [">"])],
    ):
        assert [(s.subject, s.sequence, s.body, s.body_hash) for s in found] == [
            (s.subject, s.sequence, s.body, s.body_hash) for s in stored
        ]
    report = await audit(LiveSource(again), Options(settled=True))
    assert report.ok, report.findings
    for one in (cluster, single, again):
        await one.close()
