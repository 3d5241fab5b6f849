"""Whoever decides by reading the log waits for a replica that knows what the leader acknowledged."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import gateway_kit as kit
import pytest
from log_kit import accepted, closing, lived
from proxy_engine import Say, ScriptedEngine
from proxy_kit import kit as proxy_kit
from proxy_kit import user
from test_evaluator import ended, evaluated, evaluator

from polar_common.bus import Bus
from polar_common.events import SessionFailed
from polar_common.ids import sessions_of
from polar_common.nats_server import NatsServer
from polar_ingest.reads import Reads
from polar_ingest.scheduler import Scheduler
from polar_ingest.settings import IngestSettings
from polar_train import TraceStream

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("lagging")]


async def test_a_gateway_claims_and_tells(bus: Bus, tmp_path: Path) -> None:
    async with kit.gateway(bus, kit.settings(tmp_path)):
        state = await kit.over(bus, await kit.release(bus, kit.script("true")))
    assert state.phase == "artifacts" and list(state.attempts) == [1]


async def test_an_evaluator_sees_what_it_is_to_evaluate(bus: Bus, tmp_path: Path) -> None:
    async with evaluator(bus, tmp_path):
        session = await ended(bus, kit.script("true", evaluator={"command": "true"}))
        assert (await evaluated(bus, session)).outcome == "passed"
    # Known at once, not by being delivered again.
    info = await bus.js.consumer_info("POLAR_EVENTS_s1", "evaluator")
    assert info.delivered.consumer_seq == 1


async def test_traces_are_built_and_trained(bus: Bus) -> None:
    """`lived` hands each ending to the reconstructor once."""
    made = await lived(bus)
    stream = TraceStream(bus, trainer="t", run="run")
    async with asyncio.timeout(20):
        group = await anext(aiter(stream))
    assert [len(m.traces) > 0 for m in group.members] == [True, True] and group.task == made.task
    await stream.close()


async def test_proxies_take_turns_in_one_conversation(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    engine = ScriptedEngine(model_dir)
    await engine.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.stop)
        proxies = [
            await stack.enter_async_context(
                proxy_kit(model_dir, nats_server.url, bus, tmp_path / str(n), engine, instance=f"p{n}")
            )
            for n in range(2)
        ]
        messages = []
        for turn in range(4):
            engine.say(Say(f"answer {turn}", seed=turn))
            messages.append(user(f"question {turn}"))
            message = await proxies[turn % 2].told(messages)
            messages.append({k: v for k, v in message.items() if k in ("role", "content")})
        await asyncio.sleep(0.2)
        resolved = await proxies[0].agrees()
    assert [r.event.chain_class for r in resolved] == ["root"] + ["continued"] * 3


async def test_ingest_tells_a_session_as_the_leader_has_it(bus: Bus) -> None:
    settings = IngestSettings()
    # One that remembers nothing, as of tasks that ended long ago.
    reads = Reads(bus, Scheduler(bus, settings), settings)
    await bus.batch(events := accepted(1, samples=1))
    [session] = sessions_of(events[0].task, 1)
    assert (await reads.session(session)).phase == "accepted"
    await bus.once(
        SessionFailed(session=session, attempt=0, last_attempt=0, outcome="infra_error", cause="queue_expired")
    )
    await bus.once(closing(events[0].task, [session], attempts=0))
    found = await reads.task(events[0].task, "run")
    assert [s.phase for s in found.sessions] == ["failed"] and found.closed
