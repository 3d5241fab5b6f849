"""Ten thousand sessions, replayed twice: the same hashes, message for message."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.scripted_sessions import Script

from polar_common import subjects
from polar_common.bus import Bus, scan
from polar_common.ids import FIRST_SEGMENT, task_id
from polar_common.nats_server import NatsServer
from polar_common.topology import TRACES
from polar_common.traces import TraceManifest
from polar_reconstructor.origins import Log
from polar_reconstructor.pool import Processes
from polar_reconstructor.replay import Replay
from polar_reconstructor.rules import BUILT_IN

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(1800)]
SESSIONS, GROUP, E = 10_000, 8, 99


def session(number: int) -> Script:
    """A conversation of some turns that may branch, be cut, asked again, or have a title."""
    rng = random.Random(number)
    task = task_id(FIRST_SEGMENT, "run", f"t{number // GROUP}")
    script = Script(task=task, index=number % GROUP).started()
    if rng.random() < 0.3:
        script.call("title", [1, 2], [rng.randrange(100, 500), 7, 8, E], tools=False)
    prompt, parent = [rng.randrange(3, 90) for _ in range(rng.randrange(2, 6))], {}
    for turn in range(rng.randrange(1, 4)):
        sampled = [rng.randrange(100, 500) for _ in range(rng.randrange(1, 5))] + [E] * (rng.random() < 0.9)
        if rng.random() < 0.1:
            script.call(f"r{turn}", prompt, [rng.randrange(100, 500), E], request_hash=f"q{turn}", **parent)
        script.call(f"c{turn}", prompt, sampled, request_hash=f"q{turn}", **parent)
        prompt = [*prompt, *sampled, *[E] * (sampled[-1] != E), rng.randrange(3, 90)]
        parent = {"parent": f"c{turn}", "chain_class": "continued"}
    return script.ended()


async def hashes(bus: Bus, build: str) -> dict[str, tuple[str, ...]]:
    """Session → its manifest's trace ids, and what its traces' messages say they are."""
    found: dict[str, tuple[str, ...]] = {}
    bodies: dict[str, list[str]] = {}
    async for stored in scan(bus, TRACES, [subjects.trace_filter("run", build)]):
        tokens = stored.subject.split(".")
        if tokens[-1] == "manifest":
            manifest = TraceManifest.model_validate_json(stored.body)
            assert tuple(bodies.pop(manifest.session, ())) == manifest.traces
            found[manifest.session] = (*manifest.traces, repr(sorted(manifest.excluded.items())))
        else:
            bodies.setdefault(tokens[5], []).append(stored.body_hash)
    assert not bodies
    return found


async def test_ten_thousand_sessions_replayed_twice_give_the_same_hashes(bus: Bus, nats_server: NatsServer) -> None:
    for start in range(0, SESSIONS, 64):
        some = range(start, min(start + 64, SESSIONS))
        await asyncio.gather(*(session(number).publish(bus) for number in some))
    first = await Replay(bus, "one", BUILT_IN["exact"], Log(bus, FIRST_SEGMENT)).run()
    builders = Processes(nats_server.url, "two", BUILT_IN["exact"], 2)
    try:
        second = await Replay(bus, "two", BUILT_IN["exact"], Log(bus, FIRST_SEGMENT), builders=builders).run()
    finally:
        builders.close()
    for report in (first, second):
        assert report.results == {"reconstructed": SESSIONS, "open": 0}
    one, two = await hashes(bus, "one"), await hashes(bus, "two")
    assert len(one) == SESSIONS and one == two
    assert len({ids for ids in one.values()}) > 0.95 * SESSIONS
