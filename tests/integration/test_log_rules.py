"""The log's rules on three replicas that elsewhere are tested on one server: segments' lives, dead letters offered
again, leases that lapse, seals that are followed while a server dies. `docs/log-rules.md` lists them all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from log_kit import accepted, lived
from test_log_cluster import patiently
from tests.conftest import replicated

from polar_common.archive import check_archive, export
from polar_common.archive import segments as life
from polar_common.bus import Bus, Lease, Worker, scan
from polar_common.catalogue import Catalogue
from polar_common.errors import Poison
from polar_common.events import SessionQueued, SessionSealed
from polar_common.letters import is_letter, read_letter, retry
from polar_common.nats_server import NatsCluster
from polar_common.task_spec import HarnessSpec, TaskSpec
from polar_common.topology import DLQ, Topology, consumers, differences, events_stream, work_consumer
from polar_common.verify import LiveSource, Options, audit
from polar_proxy.seals import Seals

pytestmark = [pytest.mark.nats, pytest.mark.timeout(240)]
STREAM = events_stream("s1")
R3 = Topology(replicas=3)


@pytest.fixture
async def bus(nats_cluster: NatsCluster) -> AsyncIterator[Bus]:
    connected = await replicated(nats_cluster)
    yield connected
    for stream in await connected.js.streams_info():
        await connected.js.delete_stream(str(stream.config.name))
    await connected.close()


async def test_r3_a_segment_is_rolled_sealed_archived_and_dropped(bus: Bus, tmp_path: Path) -> None:
    task = await lived(bus, 0)
    assert await life.roll(bus, R3) == "s2"
    assert await differences(bus.js, R3.for_segment("s2")) == []
    await lived(bus, 0, segment="s2")
    assert (await life.seal(bus, "s1")).state == "sealed"
    with pytest.raises(Exception, match="sealed"):
        await bus.batch(accepted(5))
    await export(bus, tmp_path, "s1")
    assert check_archive(tmp_path)[1] == []
    assert (await life.drop(bus, "s1", tmp_path)).state == "dropped"
    assert await life.active(bus) == ("s2", ["s2"])
    assert await Catalogue(bus).earlier("s2-" + task.task.partition("-")[2], ["s1", "s2"]) == "s1"
    report = await audit(LiveSource(bus), Options(settled=True))
    assert report.ok, report.findings


@pytest.mark.usefixtures("lagging")
async def test_r3_reads_that_decide_are_never_stale(bus: Bus) -> None:
    """Right after an acknowledgement the leader's answer contains it, which a replica's doesn't."""
    for number in range(5):
        event = accepted(number)[0]
        at = (await bus.once(event)).sequence
        assert await bus.read(STREAM, [event.subject()]) == [], "the replicas don't lag"
        last = await bus.last(event.subject())
        assert last is not None and last.sequence == at
        assert (await bus.once(event)).sequence == at
        [read] = await bus.read(STREAM, [event.subject()], at_least=at)
        assert read.sequence == at


@pytest.mark.usefixtures("lagging")
async def test_r3_the_catalogue_is_never_stale(bus: Bus) -> None:
    """What decides about segments is read as the leader has it, right after the acknowledgement."""
    catalogue = Catalogue(bus)
    for number in range(2, 8):
        await catalogue.record(f"s{number}", "opened")
        assert (await catalogue.segments())[-1] == f"s{number}"
        assert "opened" in await catalogue.facts(f"s{number}")


async def test_r3_a_dead_letter_is_offered_again(bus: Bus) -> None:
    task = await lived(bus, 0)
    spec = next(c for c in consumers(R3) if c.durable == "evaluator")
    broken, seen, stop = {task.sessions[0]}, [], asyncio.Event()

    async def handle(lease: Lease) -> None:
        session = lease.stored.subject.split(".")[4]
        seen.append(session)
        if session in broken:
            raise Poison("a hole")
        if len(seen) > 2:
            stop.set()

    working = asyncio.ensure_future(Worker(bus, spec, handle).run(stop))
    async with asyncio.timeout(60):
        while not (letters := [read_letter(s) async for s in scan(bus, DLQ, [">"]) if is_letter(s.subject)]):
            await asyncio.sleep(0.1)
        broken.clear()
        await retry(bus, letters)
        await working
    assert seen.count(task.sessions[0]) == 2 and len(letters) == 1


async def test_r3_work_whose_lease_lapses_goes_to_another_and_only_then(bus: Bus) -> None:
    spec = work_consumer("local", lease_s=3.0)
    await bus.js.delete_consumer(STREAM, spec.durable)
    await bus.js.add_consumer(STREAM, spec.config())
    base = (await bus.batch(accepted(1, samples=1))).sequence
    session = accepted(1, samples=1)[1].session  # type: ignore[attr-defined]
    task = TaskSpec(id="t", instruction="do", harness=HarnessSpec(name="command"))
    await bus.transition(SessionQueued(session=session, attempt=1, work_class="local", spec=task), base)
    running: list[str] = []
    first_stop, stop = asyncio.Event(), asyncio.Event()

    async def forever(lease: Lease) -> None:
        running.append("first")
        await asyncio.sleep(120)

    async def done(lease: Lease) -> None:
        assert lease.deliveries == 2
        running.append("second")
        stop.set()

    first = Worker(bus, spec, forever)
    working = asyncio.ensure_future(first.run(first_stop))
    async with asyncio.timeout(60):
        while not running:
            await asyncio.sleep(0.05)
        second = asyncio.ensure_future(Worker(bus, spec, done).run(stop))
        await asyncio.sleep(6)
        assert running == ["first"], "renewed while it runs"
        first_stop.set()
        await first.abandon()
        await working
        await second
    assert running == ["first", "second"]


async def test_r3_seals_are_followed_while_a_server_dies(bus: Bus, nats_cluster: NatsCluster) -> None:
    seen: list[str] = []
    seals = Seals(bus, "s1", lambda session, attempt: seen.append(f"{session}.{attempt}"))
    following = asyncio.ensure_future(seals.run())
    sent = []
    for number in range(30):
        if number == 10:
            # Where the follower's own consumer is, which has no replicas.
            [mine] = [c for c in await bus.js.consumers_info(STREAM) if c.config.durable_name is None]
            server = nats_cluster.named(str(mine.cluster.leader))  # type: ignore[union-attr]
            server.stop("kill")
        session = f"s1-sealed{number}-0"
        await patiently(bus.once, SessionSealed(session=session, attempt=1, reason="exited"))
        sent.append(f"{session}.1")
    server.start()
    async with asyncio.timeout(60):
        while len(seen) < len(sent) or not seals.caught_up:
            await asyncio.sleep(0.1)
    assert sorted(seen) == sorted(sent)
    assert all(seals.sealed(name.rpartition(".")[0], 1) for name in sent)
    following.cancel()
