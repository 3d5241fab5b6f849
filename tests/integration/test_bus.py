"""The bus against real servers, one and three: once, fences, batches, resolved answers, session reads, work, poison."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import orjson
import pytest
from nats.aio.msg import Msg
from tests.conftest import either

from polar_common.blobs import Blobs
from polar_common.bus import Bus, Lease, Stored, Worker, follow
from polar_common.bus.pull import Pull
from polar_common.errors import Conflict, Poison, Stale
from polar_common.events import (
    SessionAccepted,
    SessionClaimed,
    SessionLost,
    SessionQueued,
    SessionReady,
    SessionSealed,
    now,
)
from polar_common.nats_server import NatsServer
from polar_common.packing import pack
from polar_common.session_state import fold
from polar_common.subjects import EVENTS
from polar_common.task_spec import HarnessSpec, TaskSpec
from polar_common.topology import Topology, apply, consumers, differences, events_stream, work_consumer

pytestmark = pytest.mark.nats
SID = "s1-abcdefghij-0"
STREAM = events_stream("s1")


@pytest.fixture(params=["R1", "R3"])
def topology(request: pytest.FixtureRequest) -> Topology:
    """The suite runs on one server and on a cluster of three: they answer the same questions differently."""
    return Topology(replicas=int(request.param[1:]))


@pytest.fixture
async def bus(topology: Topology, request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    connected = await either(request, topology)
    yield connected
    await connected.close()


def accepted(session: str = SID, index: int = 0) -> SessionAccepted:
    return SessionAccepted(session=session, attempt=0, index=index, work_class="local")


def queued(session: str = SID, attempt: int = 1) -> SessionQueued:
    spec = TaskSpec(id="t", instruction="do", harness=HarnessSpec(name="command"))
    return SessionQueued(session=session, attempt=attempt, work_class="local", spec=spec)


def claimed(gateway: str) -> SessionClaimed:
    return SessionClaimed(session=SID, attempt=1, gateway=gateway, attempt_deadline=now(), session_deadline=now())


async def read_up_to(bus: Bus, session: str, sequence: int) -> list[Stored]:
    """A session's messages once the replica that is asked knows this one: it may lag behind an acknowledgement."""
    async with asyncio.timeout(10):
        while True:
            found = await bus.read_session(session)
            if found and found[-1].sequence >= sequence:
                return found
            await asyncio.sleep(0.01)


async def test_a_fact_happens_once(bus: Bus) -> None:
    event = accepted()
    first = await bus.once(event)
    again = await bus.once(event.model_copy(update={"event_id": "other", "time": now()}))
    assert (again.sequence, again.duplicate) == (first.sequence, True)
    with pytest.raises(Conflict):
        await bus.once(accepted(index=7))


async def test_of_two_racers_for_a_transition_one_wins(bus: Bus) -> None:
    base = (await bus.once(accepted())).sequence
    results = await asyncio.gather(*(bus.transition(claimed(f"g{i}"), base) for i in range(8)), return_exceptions=True)
    assert sum(not isinstance(r, BaseException) for r in results) == 1
    assert all(isinstance(r, Stale) for r in results if isinstance(r, BaseException))


async def test_a_fence_sees_other_subjects_of_the_session(bus: Bus) -> None:
    base = (await bus.once(accepted())).sequence
    await bus.transition(queued(), base)
    with pytest.raises(Stale):
        await bus.transition(SessionReady(session=SID, attempt=1), base)


async def test_repeating_an_acknowledged_transition_succeeds(bus: Bus) -> None:
    base = (await bus.once(accepted())).sequence
    event = queued()
    first = await bus.transition(event, base)
    again = await bus.transition(event, base)
    assert again.sequence == first.sequence


async def test_a_repeat_while_the_first_is_under_way_succeeds(bus: Bus) -> None:
    """Three servers then say that the message id is in process, which decides nothing."""
    for number in range(60):
        event = accepted(f"s1-hasty{number}-0")
        answers = await asyncio.gather(*(bus.once(event) for _ in range(4)))
        assert len({a.sequence for a in answers}) == 1


async def test_a_batch_is_all_or_nothing(bus: Bus) -> None:
    base = (await bus.once(accepted())).sequence
    pair = [SessionLost(session=SID, attempt=1), SessionSealed(session=SID, attempt=1, reason="lost")]
    done = await bus.batch(pair, fence=(SID, base))
    assert done.sequence == base + 2
    assert (await bus.batch(pair, fence=(SID, base))).duplicate
    taken = [SessionReady(session=SID, attempt=2), SessionSealed(session=SID, attempt=1, reason="exited")]
    with pytest.raises(Stale):
        await bus.batch(taken, fence=(SID, done.sequence))
    assert [s.sequence for s in await read_up_to(bus, SID, base + 2)] == [base, base + 1, base + 2]


async def test_a_session_reads_as_it_was_written(bus: Bus) -> None:
    base = (await bus.once(accepted())).sequence
    at = (await bus.transition(queued(), base)).sequence
    at = (await bus.transition(claimed("g"), at)).sequence
    await bus.once(accepted("s1-abcdefghij-1"))
    state = fold(SID, await read_up_to(bus, SID, at))
    assert (state.phase, state.last_seq, state.terminal) == ("claimed", at, False)
    assert await bus.read_session("s1-none-0") == []
    assert len(await bus.read_session(SID, up_to=base)) == 1


async def test_more_than_1024_subjects_are_walked(bus: Bus) -> None:
    sessions = [f"s1-many-{i}" for i in range(1100)]
    for start in range(0, len(sessions), 100):
        await bus.batch([accepted(s) for s in sessions[start : start + 100]])
    async with asyncio.timeout(10):
        while len(found := await bus.read(STREAM, ["polar.events.s1.session.>"])) < 1100:
            await asyncio.sleep(0.05)
    assert len(found) == 1100
    assert [s.sequence for s in found] == sorted(s.sequence for s in found)


async def test_work_is_leased_and_acknowledged(bus: Bus) -> None:
    base = (await bus.once(accepted())).sequence
    await bus.transition(queued(), base)
    seen: list[str] = []
    stop = asyncio.Event()

    async def handle(lease: Lease) -> None:
        seen.append(lease.stored.event.kind)
        stop.set()

    await asyncio.wait_for(Worker(bus, work_consumer("local"), handle).run(stop), 10)
    assert seen == ["session.queued"]
    info = await bus.js.consumer_info(STREAM, "gateway-local")
    assert (info.num_ack_pending, info.num_pending) == (0, 0)


async def test_work_of_another_class_is_never_delivered(bus: Bus) -> None:
    base = (await bus.once(accepted())).sequence
    other = queued().model_copy(update={"work_class": "docker"})
    await bus.transition(other, base)
    base = (await bus.once(accepted("s1-abcdefghij-1"))).sequence
    await bus.transition(queued("s1-abcdefghij-1"), base)
    seen: list[str] = []
    stop = asyncio.Event()

    async def handle(lease: Lease) -> None:
        seen.append(lease.stored.subject.rpartition(".")[2])
        stop.set()

    await asyncio.wait_for(Worker(bus, work_consumer("local"), handle, slots=4).run(stop), 10)
    assert seen == ["local"]
    info = await bus.js.consumer_info(STREAM, "gateway-docker")
    assert (info.num_pending, info.delivered.consumer_seq) == (1, 0)


async def test_poison_goes_to_the_dead_letter_at_once_and_others_go_on(bus: Bus) -> None:
    await bus.nc.request("polar.events.s1.session.s1-bad-0.1.queued.local", b"not json")
    base = (await bus.once(accepted())).sequence
    await bus.transition(queued(), base)
    stop, good = asyncio.Event(), []

    async def handle(lease: Lease) -> None:
        good.append(lease.stored.event)
        stop.set()

    await asyncio.wait_for(Worker(bus, work_consumer("local"), handle, slots=1).run(stop), 10)
    assert len(good) == 1
    dead = await bus.last("polar.dlq.gateway-local.>", "POLAR_DLQ")
    assert dead is not None
    assert "Poison" in orjson.loads(dead.body)["reason"]


async def test_a_newer_schema_version_is_parked_not_buried(bus: Bus) -> None:
    body = orjson.dumps({"kind": "session.queued", "schema_version": 99})
    await bus.nc.request("polar.events.s1.session.s1-new-0.1.queued.local", body)
    stop = asyncio.Event()
    tries = []

    async def handle(lease: Lease) -> None:
        tries.append(lease.deliveries)
        _ = lease.stored.event

    running = asyncio.ensure_future(Worker(bus, work_consumer("local"), handle).run(stop))
    await asyncio.sleep(1.5)
    stop.set()
    await running
    assert tries == [1]
    assert await bus.last("polar.dlq.>", "POLAR_DLQ") is None


async def test_a_failing_handler_backs_off(bus: Bus) -> None:
    base = (await bus.once(accepted())).sequence
    await bus.transition(queued(), base)
    stop = asyncio.Event()
    tries = []

    async def handle(lease: Lease) -> None:
        tries.append(lease.deliveries)
        if lease.deliveries == 2:
            stop.set()
            return
        raise RuntimeError("flaky")

    await asyncio.wait_for(Worker(bus, work_consumer("local"), handle).run(stop), 10)
    assert tries == [1, 2]


async def test_following_survives_a_server_restart(nats_server: NatsServer) -> None:
    bus = await Bus.connect(nats_server.url, "test/bus")
    await apply(bus.js, Topology())
    await bus.once(accepted("s1-one-0"))
    seen: list[int] = []
    caught_up = asyncio.Event()

    async def read() -> None:
        async for stored in follow(bus, STREAM, [EVENTS], on_caught_up=caught_up.set):
            seen.append(stored.sequence)

    reading = asyncio.ensure_future(read())
    await asyncio.wait_for(caught_up.wait(), 5)
    nats_server.stop("kill")
    nats_server.start()
    for index in range(3):
        await bus.once(accepted(f"s1-two-{index}"))
    async with asyncio.timeout(30):
        while len(seen) < 4:
            await asyncio.sleep(0.1)
    reading.cancel()
    await bus.close()
    assert seen == [1, 2, 3, 4]


async def test_a_delivery_lost_on_the_way_is_read_again(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a server drops what a slow connection doesn't take: nothing tells the follower but the count."""
    take, taken = Pull._take, 0

    async def losing(self: Pull, msg: Msg) -> None:
        nonlocal taken
        taken += 1
        if taken not in (5, 9):
            await take(self, msg)

    monkeypatch.setattr(Pull, "_take", losing)
    await bus.batch([accepted(f"s1-lost-{n}") for n in range(20)])
    seen: list[int] = []
    async with asyncio.timeout(20):
        async for stored in follow(bus, STREAM, [EVENTS]):
            seen.append(stored.sequence)
            if len(seen) == 20:
                break
    assert seen == list(range(1, 21))


async def test_blobs_are_stored_once_and_checked(bus: Bus) -> None:
    blobs = Blobs(bus, "s1")
    big = bytes(range(256)) * 60_000
    ref = await blobs.put(big)
    assert await Blobs(bus, "s1").get(ref) == big
    await blobs.put(big)
    column, blob = pack(list(range(200_000)), "i32")
    assert blob is not None
    await blobs.put_as(*blob)
    assert await Blobs(bus, "s1").numbers(column) == list(range(200_000))


async def test_the_truth_cant_be_deleted_and_matches_the_code(bus: Bus, topology: Topology) -> None:
    await bus.once(accepted())
    with pytest.raises(Exception, match=r"not permitted|denied|deny"):
        await bus.js.purge_stream(STREAM)
    assert await differences(bus.js, topology) == []
    await bus.js.delete_consumer(STREAM, consumers(topology)[0].durable)
    assert len(await differences(bus.js, topology)) == 1


def test_poison_is_told_from_json() -> None:
    from polar_common.events import decode

    for body in (b"", b"[]", b'{"kind":"x","schema_version":1}', b'{"kind":"session.ready","schema_version":true}'):
        with pytest.raises(Poison):
            decode(body)
