"""The scheduler against a real server, with stand-ins for gateway, evaluator and reconstructor."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from ingest_fakes import Edge, FakeHouse, Play, jitter, start_edge, task, until

from polar_common import subjects
from polar_common.bus import Bus
from polar_common.events import GroupClosed
from polar_common.nats_server import NatsServer
from polar_common.topology import events_stream

pytestmark = pytest.mark.nats
STREAM = events_stream("s1")


async def groups(bus: Bus) -> list[GroupClosed]:
    found = [s.event for s in await bus.read(STREAM, ["polar.events.s1.group.>"])]
    return [e for e in found if isinstance(e, GroupClosed)]


async def ends(bus: Bus) -> Counter[str]:
    """Terminal events per session, over the whole log."""
    found: Counter[str] = Counter()
    for end in ("completed", "failed", "cancelled"):
        for stored in await bus.read(STREAM, [f"polar.events.s1.session.*.0.{end}"]):
            found[stored.subject.split(".")[4]] += 1
    return found


async def submit(edge: Edge, *tasks: dict[str, object], run: str = "r") -> list[dict[str, object]]:
    answer = await edge.client.post("/v1/tasks", json={"run": run, "tasks": list(tasks)})
    assert answer.status_code == 202, answer.text
    return list(answer.json()["tasks"])


async def test_a_group_goes_from_accepted_to_closed(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url)
    async with FakeHouse(bus).open():
        [made] = await submit(edge, task(samples=3))
        [group] = await until(lambda: groups(bus))
    assert (group.task, group.expected, group.terminal, group.trainable, group.by) == (
        made["task"],
        3,
        3,
        3,
        "complete",
    )
    assert [(m.session, m.outcome, m.reward) for m in group.members] == [(s, "passed", 1.0) for s in made["sessions"]]
    assert await ends(bus) == Counter(made["sessions"])
    assert await bus.last(subjects.session(made["sessions"][0], 1, "queued", "local")) is not None
    await edge.kill()


async def test_a_lost_attempt_is_followed_by_another(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url, ingest_retry_delay_s=0.05)
    house = FakeHouse(bus, lambda _, attempt: Play(lost=attempt < 3))
    async with house.open():
        [made] = await submit(edge, task())
        [group] = await until(lambda: groups(bus))
    assert [n for _, n in house.claims] == [1, 2, 3]
    assert (group.members[0].outcome, group.members[0].attempts) == ("passed", 3)
    assert not house.doubled
    await edge.kill()
    assert made["sessions"]


async def test_two_schedulers_race_without_doubles(nats_server: NatsServer, bus: Bus) -> None:
    edges = [await start_edge(nats_server.url, f"ingest/{i}", ingest_retry_delay_s=0.05) for i in range(2)]
    house = FakeHouse(bus, jitter(7))
    async with house.open():
        made = [
            *await submit(edges[0], *(task(f"a{i}", samples=4) for i in range(10))),
            *await submit(edges[1], *(task(f"b{i}", samples=4) for i in range(10))),
        ]
        await until(lambda: _closed(bus, 20), 60)
    sessions = [s for m in made for s in m["sessions"]]
    assert await ends(bus) == Counter(sessions)
    assert Counter(house.claims).most_common(1)[0][1] == 1
    assert not house.doubled
    for edge in edges:
        await edge.kill()


async def _closed(bus: Bus, count: int) -> bool:
    return len(await groups(bus)) >= count


async def test_restarts_in_mid_run_lose_and_double_nothing(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url, ingest_retry_delay_s=0.05)
    house = FakeHouse(bus, jitter(3))
    async with house.open():
        made = await submit(edge, *(task(f"t{i}", samples=5) for i in range(20)))
        for pause in (0.0, 0.05, 0.1, 0.2, 0.3):
            await asyncio.sleep(pause)
            await edge.kill()
            edge = await start_edge(nats_server.url, ingest_retry_delay_s=0.05)
        await until(lambda: _closed(bus, 20), 60)
    assert await ends(bus) == Counter(s for m in made for s in m["sessions"])
    assert not house.doubled
    assert not edge.scheduler.world.sessions
    await edge.kill()
