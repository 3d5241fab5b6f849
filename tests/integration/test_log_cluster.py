"""Three servers: whoever leads is killed in mid-run, and nothing that was acknowledged is lost or doubled."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import nats.errors
import pytest
from nats.js.errors import APIError
from tests.conftest import replicated

from polar_common.bus import Bus, follow, scan
from polar_common.errors import BusError, Stale
from polar_common.events import SessionAccepted, SessionQueued
from polar_common.nats_server import NatsCluster
from polar_common.task_spec import HarnessSpec, TaskSpec
from polar_common.topology import events_stream

pytestmark = [pytest.mark.nats, pytest.mark.timeout(180)]
STREAM = events_stream("s1")
SPEC = TaskSpec(id="t", instruction="do", harness=HarnessSpec(name="command"))


def accepted(session: str) -> SessionAccepted:
    return SessionAccepted(session=session, attempt=0, index=0, work_class="local")


def queued(session: str, attempt: int, by: str) -> SessionQueued:
    return SessionQueued(session=session, attempt=attempt, work_class="local", spec=SPEC, causation=by)


async def patiently(work, *arguments):  # type: ignore[no-untyped-def]
    """What a service does while there is no leader: try again."""
    while True:
        try:
            return await work(*arguments)
        except Stale:
            raise
        except (BusError, APIError, nats.errors.Error, TimeoutError):
            await asyncio.sleep(0.2)


class Writers:
    """Publishers that race for the same sessions; what was acknowledged is remembered."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.acknowledged: dict[str, int] = {}
        self.won: Counter[str] = Counter()

    async def session(self, name: str) -> None:
        """Accept it, then two racers try for its first attempt."""
        event = accepted(name)
        at = (await patiently(self.bus.once, event)).sequence
        self.acknowledged[event.subject()] = at
        await asyncio.gather(*(self._race(name, at, racer) for racer in "ab"))

    async def _race(self, name: str, fence: int, racer: str) -> None:
        event = queued(name, 1, racer).model_copy(update={"run": racer})
        try:
            done = await patiently(self.bus.transition, event, fence)
        except Stale:
            return
        self.won[name] += 1
        self.acknowledged[event.subject()] = done.sequence

    async def run(self, writer: int, count: int) -> None:
        for number in range(count):
            await self.session(f"s1-w{writer}n{number}-0")
            await asyncio.sleep(random.uniform(0, 0.02))


async def test_a_killed_leader_loses_nothing_acknowledged(nats_cluster: NatsCluster) -> None:
    bus = await replicated(nats_cluster)
    writers = Writers(bus)
    followed: list[int] = []

    async def following() -> None:
        async for stored in follow(bus, STREAM, [">"]):
            followed.append(stored.sequence)

    reading = asyncio.ensure_future(following())
    working = [asyncio.ensure_future(writers.run(w, 60)) for w in range(4)]
    killed = []
    for _ in range(2):
        await asyncio.sleep(1.0)
        while not (leader := (await patiently(bus.js.stream_info, STREAM)).cluster.leader):
            await asyncio.sleep(0.2)
        server = nats_cluster.named(leader)
        server.stop("kill")
        killed.append(leader)
        await asyncio.sleep(3.0)
        server.start()
    await asyncio.gather(*working)
    stored = {s.subject: s.sequence async for s in scan(bus, STREAM, [">"])}
    assert len(killed) == 2
    assert all(stored.get(subject) == at for subject, at in writers.acknowledged.items())
    assert len(stored) == 2 * 4 * 60
    assert set(writers.won.values()) == {1} and len(writers.won) == 4 * 60
    info = await patiently(bus.js.stream_info, STREAM)
    assert info.state.messages == len(stored)
    async with asyncio.timeout(30):
        while len(followed) < len(stored):
            await asyncio.sleep(0.1)
    reading.cancel()
    assert followed == sorted(set(followed))
    await bus.close()
