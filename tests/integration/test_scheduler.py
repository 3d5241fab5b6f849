"""The scheduler against a real server, with stand-ins for gateway, evaluator and reconstructor."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import orjson
import pytest
from ingest_fakes import Edge, FakeHouse, Play, jitter, start_edge, task, until

from polar_common import subjects
from polar_common.bus import Bus, Published
from polar_common.errors import Unavailable
from polar_common.events import (
    GroupClosed,
    PolicyActivated,
    PolicyPublished,
    SessionEvent,
    SessionFailed,
    SessionQueued,
    TrainerDemanded,
)
from polar_common.nats_server import NatsServer
from polar_common.topology import events_stream
from polar_ingest.domain import CloseGroup, Queue

pytestmark = pytest.mark.nats
STREAM = events_stream("s1")
QUICK: dict[str, Any] = {"ingest_retry_delay_s": 0.05}


async def groups(bus: Bus) -> list[GroupClosed]:
    found = [s.event for s in await bus.read(STREAM, ["polar.events.s1.group.>"])]
    return [e for e in found if isinstance(e, GroupClosed)]


async def closed(bus: Bus, count: int) -> bool:
    return len(await bus.read(STREAM, ["polar.events.s1.group.>"])) >= count


async def ends(bus: Bus) -> Counter[str]:
    """Terminal events per session, over the whole log."""
    found: Counter[str] = Counter()
    for end in ("completed", "failed", "cancelled"):
        for stored in await bus.read(STREAM, [f"polar.events.s1.session.*.0.{end}"]):
            found[stored.subject.split(".")[4]] += 1
    return found


async def failure(bus: Bus, session: str) -> SessionFailed | None:
    stored = await bus.last(subjects.session(session, 0, "failed"))
    event = stored.event if stored is not None else None
    return event if isinstance(event, SessionFailed) else None


async def submit(edge: Edge, *tasks: dict[str, Any], run: str = "r") -> list[dict[str, Any]]:
    answer = await edge.client.post("/v1/tasks", json={"run": run, "tasks": list(tasks)})
    assert answer.status_code == 202, answer.text
    return list(answer.json()["tasks"])


def sessions_of(made: list[dict[str, Any]]) -> Counter[str]:
    return Counter(s for m in made for s in m["sessions"])


async def test_a_group_goes_from_accepted_to_closed(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url)
    async with FakeHouse(bus).open():
        [made] = await submit(edge, task(samples=3))
        await until(lambda: closed(bus, 1))
    [group] = await groups(bus)
    assert (group.task, group.expected, group.terminal, group.trainable) == (made["task"], 3, 3, 3)
    assert (group.by, group.run) == ("complete", "r")
    assert [(m.session, m.outcome, m.reward) for m in group.members] == [(s, "passed", 1.0) for s in made["sessions"]]
    assert await ends(bus) == sessions_of([made])
    assert await bus.last(subjects.session(made["sessions"][0], 1, "queued", "local")) is not None
    await edge.kill()


async def test_a_lost_attempt_is_followed_by_another(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url, **QUICK)
    house = FakeHouse(bus, lambda _, attempt: Play(lost=attempt < 3))
    async with house.open():
        await submit(edge, task())
        await until(lambda: closed(bus, 1))
    [group] = await groups(bus)
    assert [n for _, n in house.claims] == [1, 2, 3]
    assert (group.members[0].outcome, group.members[0].attempts) == ("passed", 3)
    assert not house.doubled
    await edge.kill()


async def test_two_schedulers_race_without_doubles(nats_server: NatsServer, bus: Bus) -> None:
    edges = [await start_edge(nats_server.url, f"ingest/{i}", **QUICK) for i in range(2)]
    house = FakeHouse(bus, jitter(7))
    async with house.open():
        made = [
            *await submit(edges[0], *(task(f"a{i}", samples=4) for i in range(10))),
            *await submit(edges[1], *(task(f"b{i}", samples=4) for i in range(10))),
        ]
        await until(lambda: closed(bus, 20), 60)
    assert await ends(bus) == sessions_of(made)
    assert Counter(house.claims).most_common(1)[0][1] == 1
    assert not house.doubled
    for edge in edges:
        await until(lambda edge=edge: not edge.scheduler.world.sessions)
        assert edge.scheduler.world.runs["r"].groups_closed == 20
        await edge.kill()


async def test_restarts_in_mid_run_lose_and_double_nothing(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url, **QUICK)
    house = FakeHouse(bus, jitter(3), slots=4)
    async with house.open():
        made = await submit(edge, *(task(f"t{i}", samples=5) for i in range(20)))
        during = 0
        for pause in (0.0, 0.05, 0.1, 0.2, 0.3):
            await asyncio.sleep(pause)
            await edge.kill()
            during += not await closed(bus, 20)
            edge = await start_edge(nats_server.url, **QUICK)
        await until(lambda: closed(bus, 20), 60)
    assert during >= 3, "the kills came too late to mean anything"
    assert await ends(bus) == sessions_of(made)
    assert not house.doubled
    await until(lambda: not edge.scheduler.world.sessions)
    await edge.kill()


async def test_the_server_dies_in_mid_run(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url, **QUICK)
    house = FakeHouse(bus, lambda *_: Play(run_s=0.05), slots=4)
    async with house.open():
        made = await submit(edge, *(task(f"t{i}", samples=5) for i in range(8)))
        for _ in range(2):
            await asyncio.sleep(0.3)
            nats_server.stop("kill")
            await asyncio.sleep(0.3)
            nats_server.start()
        await until(lambda: closed(bus, 8), 100)
    assert await ends(bus) == sessions_of(made)
    assert not house.doubled
    await edge.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_thousand_sessions_end_in_bounded_time_and_memory(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url, **QUICK)
    house = FakeHouse(bus, slots=64)
    started = time.monotonic()
    async with house.open():
        made = await submit(edge, *(task(f"t{i}", samples=8) for i in range(125)))
        await until(lambda: closed(bus, 125), 240)
    print(f"1,000 sessions in {time.monotonic() - started:.1f} s")
    assert sum(sessions_of(made).values()) == 1000
    assert await ends(bus) == sessions_of(made)
    await until(lambda: not edge.scheduler.world.sessions)
    world = edge.scheduler.world
    assert not +world.buckets
    assert not world.dirty
    assert world.open_groups == 0
    await edge.kill()


# -- deadlines


async def test_who_isnt_claimed_in_time_fails_even_if_nobody_was_there_to_see_it(
    nats_server: NatsServer, bus: Bus
) -> None:
    edge = await start_edge(nats_server.url)
    [made] = await submit(edge, task(limits={"queue_s": 1.5}))
    await edge.kill()
    await asyncio.sleep(1.5)
    edge = await start_edge(nats_server.url)
    found = await until(lambda: failure(bus, made["sessions"][0]), 1.0)
    assert (found.outcome, found.cause, found.detail) == ("infra_error", "queue_expired", "not claimed within 1.5 s")
    await edge.kill()


async def test_a_silent_owner_is_given_up_only_after_deadline_and_grace(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url, ingest_owner_grace_s=0.7)
    async with FakeHouse(bus, lambda *_: Play(vanish=True)).open():
        [made] = await submit(edge, task(limits={"session_s": 0.8}))
        started = time.monotonic()
        found = await until(lambda: failure(bus, made["sessions"][0]))
    assert time.monotonic() - started >= 1.4
    assert (found.outcome, found.cause, found.last_attempt) == ("infra_error", "owner_silent", 1)
    await edge.kill()


async def test_a_group_closes_at_its_deadline(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url)
    async with FakeHouse(bus).open(reconstruct=False):
        await submit(edge, task(samples=2, limits={"group_s": 1.0}))
        await until(lambda: closed(bus, 1))
    [group] = await groups(bus)
    assert (group.by, group.terminal, group.trainable) == ("deadline", 2, 0)
    assert {m.reason for m in group.members} == {"not_reconstructed"}
    await edge.kill()


# -- what can't be read


async def test_a_corrupt_fact_ends_its_session_and_nobody_elses(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url)
    bad, good = await submit(edge, task("bad"), task("good"))
    session = bad["sessions"][0]
    await bus.nc.request(subjects.session(session, 1, "exited"), b"\x00 not json")
    async with FakeHouse(bus).open():
        found = await until(lambda: failure(bus, session))
        await until(lambda: closed(bus, 1))
    assert (found.outcome, found.cause) == ("infra_error", "poison")
    assert good["task"] in {g.task for g in await groups(bus)}
    letter = await until(lambda: bus.last("polar.dlq.scheduler.>", "POLAR_DLQ"))
    assert orjson.loads(letter.body)["subject"].endswith(".exited")
    await edge.kill()
    edge = await start_edge(nats_server.url)
    await asyncio.sleep(0.3)
    letters = await bus.read("POLAR_DLQ", ["polar.dlq.scheduler.>"])
    assert len(letters) == 1, "buried once, whoever reads the log again"
    await edge.kill()


async def test_a_dead_letter_of_the_evaluator_ends_the_session(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url)
    async with FakeHouse(bus).open(evaluate=False):
        [made] = await submit(edge, task())
        session = made["sessions"][0]
        artifacts = await until(lambda: bus.last(subjects.session(session, 1, "artifacts")))
        letter = {"consumer": "evaluator", "subject": artifacts.subject, "reason": "EvaluationError: broken"}
        await bus.once_raw("polar.dlq.evaluator.POLAR_EVENTS_s1.9", orjson.dumps(letter), "9")
        await until(lambda: closed(bus, 1))
    [group] = await groups(bus)
    assert (group.members[0].outcome, group.trainable) == ("infra_error", 0)
    found = await failure(bus, session)
    assert found is not None
    assert (found.cause, found.detail) == ("poison", "evaluator: EvaluationError: broken")
    await edge.kill()


async def test_foreign_bytes_anywhere_dont_stop_the_scheduler(nats_server: NatsServer, bus: Bus) -> None:
    for subject in (
        "polar.events.s1.task.s1-x.accepted",
        "polar.events.s1.session.s1-x-0.0.accepted",
        "polar.events.s1.session.s1-x-0.zero.accepted",
        "polar.events.s1.group.s1-x.closed",
        "polar.events.s1.build.live.s1-x-0.reconstructed",
        "polar.events.s1.trainer.t.0.0.demanded",
        "polar.events.s1.nonsense",
    ):
        await bus.nc.request(subject, b"[]")
    edge = await start_edge(nats_server.url)
    async with FakeHouse(bus).open():
        await submit(edge, task())
        await until(lambda: closed(bus, 2))
    assert sum((await ends(bus)).values()) == 1
    await edge.kill()


# -- fairness and demand


async def test_a_group_that_another_closed_meanwhile_is_passed_over(nats_server: NatsServer, bus: Bus) -> None:
    """Decisions of one step are published one after the other, and the follower goes on between them."""
    edge = await start_edge(nats_server.url)
    [made] = await submit(edge, task("t"))
    await edge.scheduler._close("s1-nobody", CloseGroup("complete"))
    await edge.scheduler._transition(f"{made['task']}-9", 1, Queue(1))
    assert await groups(bus) == []
    await edge.kill()


async def test_a_small_run_isnt_stuck_behind_a_big_one(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url, ingest_release_ahead=4)
    await submit(edge, *(task(f"t{i}", samples=40) for i in range(3)), run="big")
    await submit(edge, task("t", samples=6), run="small")
    house = FakeHouse(bus, slots=2)
    async with house.open():
        await until(lambda: closed(bus, 1))
    [first] = (await groups(bus))[:1]
    assert first.run == "small"
    released = [s.event.run for s in await bus.read(STREAM, ["polar.events.s1.session.*.1.queued.local"])]
    # Four were released before it came; then the runs take turns.
    assert released[:16].count("small") == 6, released[:20]
    await edge.kill()


async def test_a_release_that_failed_is_made_again(
    nats_server: NatsServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the log doesn't answer for a while: the sessions wait again."""
    edge = await start_edge(nats_server.url)
    transition, refused = edge.bus.transition, 0

    async def failing(event: SessionEvent, after: int) -> Published:
        nonlocal refused
        if isinstance(event, SessionQueued) and refused < 3:
            refused += 1
            raise Unavailable("no answer")
        return await transition(event, after)

    monkeypatch.setattr(edge.bus, "transition", failing)
    await submit(edge, task("t", samples=3))
    house = FakeHouse(bus)
    async with house.open():
        await until(lambda: closed(bus, 1))
    assert refused == 3 and len(house.claims) == 3
    await edge.kill()


async def test_release_obeys_demand(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url, ingest_obey_demand=True)
    house = FakeHouse(bus)
    async with house.open():
        await submit(edge, *(task(f"t{i}", samples=2) for i in range(5)))
        await asyncio.sleep(0.3)
        assert house.claims == []
        for number in range(2):
            await bus.once(TrainerDemanded(segment="s1", trainer="t", epoch=0, number=number, groups=2, staleness=1))
            await until(lambda number=number: closed(bus, 2 * (number + 1)))
            await asyncio.sleep(0.2)
            assert len(await groups(bus)) == 2 * (number + 1)
        # The engines lag two versions behind, which is one too many.
        await bus.once(PolicyPublished(segment="s1", version="v2", policy_seq=2, model="m", weights="/w", trainer="t"))
        await bus.once(TrainerDemanded(segment="s1", trainer="t", epoch=0, number=2, groups=2, staleness=1))
        await asyncio.sleep(0.5)
        assert len(await groups(bus)) == 4
        await bus.once(PolicyActivated(segment="s1", version="v2", policy_seq=2, replica="r0"))
        await until(lambda: closed(bus, 5))
    await edge.kill()
