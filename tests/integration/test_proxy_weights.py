"""New weights reach every replica once, completions say which version sampled, and draining never deadlocks."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.js import JetStreamContext
from proxy_engine import Say, ScriptedEngine
from proxy_kit import Kit, kit, user

from polar_common import subjects
from polar_common.bus import Bus
from polar_common.events import CompletionCaptured, PolicyActivated, PolicyPublished
from polar_common.nats_server import NatsServer, free_port

pytestmark = pytest.mark.nats


def published(seq: int, model: str = "policy") -> PolicyPublished:
    return PolicyPublished(
        segment="s1",
        version=f"step-{seq}",
        policy_seq=seq,
        model=model,
        weights=f"/weights/{seq}",
        weights_hash="ab" * 32,
    )


async def activated(bus: Bus, count: int = 1) -> list[PolicyActivated]:
    for _ in range(500):
        stored = await bus.read("POLAR_EVENTS_s1", [subjects.ANY_POLICY_ACTIVATED.replace("*", "s1", 1)])
        if len(stored) >= count:
            return [e for s in stored if isinstance(e := s.event, PolicyActivated)]
        await asyncio.sleep(0.02)
    raise AssertionError("nothing was activated")


async def test_published_weights_are_loaded_and_stamped(proxy: Kit) -> None:
    await proxy.told([user("before")])
    await proxy.bus.once(published(1))
    event = (await activated(proxy.bus))[0]
    assert event.version == "step-1" and event.policy_seq == 1 and event.mode == "in_flight"
    assert proxy.engine.calls == ["/pause?mode=keep", "/collective_rpc", "/update_weight_version", "/resume"]
    await proxy.told([user("after")])
    before, after = (r.event for r in await proxy.captured())
    assert before.policy_seq == 0 and before.kv_salt == "v0" and before.versions[0].version == "v0"
    assert after.policy_seq == 1 and after.kv_salt == "step-1" and after.versions[0].version == "step-1"
    assert after.engine.weights_hash == "ab" * 32


async def test_the_hash_of_weights_is_never_that_of_others(proxy: Kit) -> None:
    """A trainer need not name it; the engine may."""
    unnamed = published(1).model_copy(update={"weights_hash": ""})
    await proxy.bus.once(unnamed)
    await activated(proxy.bus)
    await asyncio.sleep(0.1)
    await proxy.told([user("once")])
    proxy.engine.version = "v0"
    await proxy.told([user("started again")])
    while (await proxy.chat([user("loaded again")])).status_code != 200:
        await asyncio.sleep(0.05)
    told = [r.event.engine.weights_hash for r in await proxy.captured()]
    assert told[0] == told[2] == hashlib.sha256(b"step-1").hexdigest()


async def test_a_call_that_spans_a_swap_has_two_versions_and_the_older_number(proxy: Kit) -> None:
    await proxy.bus.once(published(1))
    await activated(proxy.bus)
    spans = [{"version": "step-1", "start": 0, "end": 2}, {"version": "step-2", "start": 2, "end": 9}]
    proxy.engine.say(Say("one two three four", delay_s=0.2, chunk=2, versions=spans))
    running = asyncio.ensure_future(proxy.told([user("go")], stream=True))
    await asyncio.sleep(0.1)
    await proxy.bus.once(published(2))
    await activated(proxy.bus, 2)
    await running
    event = (await proxy.captured())[-1].event
    assert [(v.version, v.start) for v in event.versions] == [("step-1", 0), ("step-2", 2)]
    assert event.policy_seq == 1


async def test_a_call_that_began_before_the_first_weights_casts_no_doubt_on_its_engine(proxy: Kit) -> None:
    spans = [{"version": "v0", "start": 0, "end": 2}, {"version": "step-1", "start": 2, "end": 9}]
    proxy.engine.say(Say("one two three four", delay_s=0.2, chunk=2, versions=spans))
    running = asyncio.ensure_future(proxy.told([user("go")], stream=True))
    await asyncio.sleep(0.1)
    await proxy.bus.once(published(1))
    await activated(proxy.bus)
    await running
    for _ in range(20):
        await proxy.told([user("and on")])
    events = [r.event for r in await proxy.captured()]
    assert [e.policy_seq for e in events] == [0, *[1] * 20]


async def test_overtaken_and_foreign_weights_are_skipped(proxy: Kit) -> None:
    for event in (published(1), published(2), published(3), published(9, model="another")):
        await proxy.bus.once(event)
    assert (await activated(proxy.bus))[-1].policy_seq in (1, 3)
    for _ in range(200):
        found = await activated(proxy.bus)
        if found[-1].policy_seq == 3:
            break
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    assert [e.policy_seq for e in await activated(proxy.bus)][-1] == 3


async def test_two_instances_update_one_engine_once(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    engine = ScriptedEngine(model_dir)
    await engine.start()
    try:
        async with AsyncExitStack() as stack:
            kits = [
                await stack.enter_async_context(kit(model_dir, nats_server.url, bus, tmp_path / str(n), engine))
                for n in range(2)
            ]
            await bus.once(published(1))
            await activated(bus)
            await asyncio.sleep(0.3)
            assert engine.calls.count("/collective_rpc") == 1
            for one in kits:
                await one.told([user("go")])
            assert {r.event.policy_seq for r in await kits[0].captured()} == {1}
    finally:
        await engine.stop()


async def test_calls_that_end_while_another_instance_swaps_are_marked_where_the_engine_names_no_versions(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """One instance loads them; the calls of both may have been sampled by the old weights, the new ones, or both."""

    def edit(body: dict[str, Any]) -> None:
        body["choices"][0]["weight_versions"] = None

    engine = ScriptedEngine(model_dir, lambda heard: Say("words", edit=edit))
    engine.loading = asyncio.Event()
    await engine.start()
    try:
        async with AsyncExitStack() as stack:
            one, two = [
                await stack.enter_async_context(kit(model_dir, nats_server.url, bus, tmp_path / str(n), engine))
                for n in range(2)
            ]
            for when in ("before", "meanwhile", "after"):
                await one.told([user(f"{when} at one")])
                await two.told([user(f"{when} at two")])
                if when == "before":
                    await bus.once(published(1))
                    while "/collective_rpc" not in engine.calls:
                        await asyncio.sleep(0.01)
                elif when == "meanwhile":
                    engine.loading.set()
                    await activated(bus)
                    await asyncio.sleep(0.2)
            told = await one.of(CompletionCaptured)
            assert [e.kv_mixed for e in told] == [False, False, True, True, False, False]
            assert [e.policy_seq for e in told] == [0, 0, 0, 0, 1, 1]
    finally:
        await engine.stop()


async def test_draining_refuses_new_calls_and_finishes_running_ones(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    async with kit(model_dir, nats_server.url, bus, tmp_path, proxy_drain=True) as proxy:
        proxy.engine.say(Say("one two three four five", delay_s=0.2, chunk=1))
        running = asyncio.ensure_future(proxy.told([user("go")], stream=True))
        await asyncio.sleep(0.3)
        await proxy.bus.once(published(1))
        await asyncio.sleep(0.3)
        refused = await proxy.chat([user("meanwhile")])
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert (await running)["content"].startswith("one two")
        assert (await activated(bus))[0].mode == "drain"
        # The refusal's retry is a call like any other, though it carries a mark.
        again = await proxy.chat([user("meanwhile")], headers={"x-stainless-retry-count": "1"})
        assert again.status_code == 200
        assert proxy.engine.calls[0] == "/pause?mode=wait"


async def test_calls_wait_for_an_update_or_a_start_and_are_sampled_then(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """Some programs try again for a few seconds only."""
    engine = ScriptedEngine(model_dir)
    await engine.start()
    port = int(engine.url.rpartition(":")[2])
    more: dict[str, Any] = {"proxy_drain": True, "proxy_health_s": 0.1, "proxy_wait_s": 20}
    try:
        async with kit(model_dir, nats_server.url, bus, tmp_path, engine, **more) as proxy:
            engine.loading = asyncio.Event()
            await bus.once(published(1))
            while "/collective_rpc" not in engine.calls:
                await asyncio.sleep(0.01)
            waiting = asyncio.ensure_future(proxy.chat([user("meanwhile")], stream=True))
            left = asyncio.ensure_future(proxy.chat([user("left")]))
            await asyncio.sleep(1)
            left.cancel()
            await asyncio.sleep(0.3)
            assert not waiting.done() and not engine.journal
            engine.loading.set()
            assert (await waiting).status_code == 200
            await engine.stop()
            await asyncio.sleep(0.3)
            waiting = asyncio.ensure_future(proxy.chat([user("later")]))
            await asyncio.sleep(0.5)
            await engine.start(port)
            assert (await waiting).status_code == 200
            assert [r.event.policy_seq for r in await proxy.captured()] == [1, 1]
            assert proxy.proxy.service is not None and proxy.proxy.service.count_running == 0
    finally:
        await engine.stop()


async def test_an_engine_that_is_later_than_the_proxy_is_found_and_gets_what_was_published(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """Published weights wait for it; until it is there, harnesses are told to come again."""
    engine = ScriptedEngine(model_dir)
    port = free_port()
    engine.url = f"http://127.0.0.1:{port}"
    async with kit(model_dir, nats_server.url, bus, tmp_path, engine, proxy_health_s=0.2) as proxy:
        early = await proxy.chat([user("go")])
        assert early.status_code == 503 and early.headers["retry-after"]
        await bus.once(published(1))
        await engine.start(port)
        try:
            assert [e.version for e in await activated(bus)] == ["step-1"]
            await proxy.told([user("go")])
            assert (await proxy.captured())[0].event.policy_seq == 1
        finally:
            await engine.stop()


@pytest.mark.parametrize("named", [True, False])
async def test_an_engine_that_is_started_again_gets_its_weights_again_before_it_samples(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, named: bool
) -> None:
    """It comes back with those it was started with, whatever was published since, and may not say which they are."""

    def edit(body: dict[str, Any]) -> None:
        if not named:
            body["choices"][0]["weight_versions"] = None

    engine = ScriptedEngine(model_dir, lambda heard: Say("words", edit=edit))
    engine.names_version = named
    await engine.start()
    port = int(engine.url.rpartition(":")[2])
    try:
        async with kit(model_dir, nats_server.url, bus, tmp_path, engine, proxy_health_s=0.1) as proxy:
            await bus.once(published(1))
            await bus.once(published(2))
            while engine.version != "step-2":
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            await engine.stop()
            await asyncio.sleep(0.3)
            engine.version, engine.loading = "v0", asyncio.Event()
            engine.calls.clear()
            await engine.start(port)
            while "/collective_rpc" not in engine.calls:
                await asyncio.sleep(0.01)
            meanwhile = await proxy.chat([user("go")])
            assert meanwhile.status_code == 429 and meanwhile.headers["retry-after"]
            engine.loading.set()
            while (await proxy.chat([user("go")])).status_code != 200:
                await asyncio.sleep(0.05)
            event = (await proxy.captured())[-1].event
            assert engine.version == "step-2" and event.policy_seq == 2 and not event.kv_mixed
            assert engine.calls.count("/collective_rpc") == 1
    finally:
        await engine.stop()


async def test_a_house_that_is_started_again_goes_on_with_the_newest_weights(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """The log says what the engine had; the engine, started again too, has what it is started with."""
    engine = ScriptedEngine(model_dir)
    await engine.start()
    try:
        async with kit(model_dir, nats_server.url, bus, tmp_path / "0", engine):
            await bus.once(published(1))
            await activated(bus)
        engine.version = "v0"
        async with kit(model_dir, nats_server.url, bus, tmp_path / "1", engine) as proxy:
            while (await proxy.chat([user("go")])).status_code != 200:
                await asyncio.sleep(0.05)
            event = (await proxy.captured())[0].event
            assert (event.versions[0].version, event.policy_seq) == ("step-1", 1)
    finally:
        await engine.stop()


async def test_a_sample_of_weights_that_nobody_loaded_is_told_as_that_and_they_are_loaded_again(proxy: Kit) -> None:
    """An engine may be started again between two health checks."""
    await proxy.bus.once(published(1))
    await activated(proxy.bus)
    await asyncio.sleep(0.1)
    proxy.engine.version = "v0"
    await proxy.told([user("old")])
    while (await proxy.chat([user("new")])).status_code != 200:
        await asyncio.sleep(0.05)
    told = [(r.event.versions[0].version, r.event.policy_seq) for r in await proxy.captured()]
    assert told == [("v0", 0), ("step-1", 1)]


async def test_weights_that_are_gone_are_named_until_newer_ones_are_published(proxy: Kit) -> None:
    await proxy.bus.once(published(1))
    await activated(proxy.bus)
    await asyncio.sleep(0.1)
    proxy.engine.version, proxy.engine.refuses = "v0", "no such directory"
    await proxy.told([user("old")])
    while (refused := await proxy.chat([user("new")])).status_code != 503:
        await asyncio.sleep(0.05)
    assert "step-1" in refused.text and "no such directory" in refused.text
    proxy.engine.refuses = ""
    await proxy.bus.once(published(2))
    await activated(proxy.bus, 2)
    while (await proxy.chat([user("new")])).status_code != 200:
        await asyncio.sleep(0.05)
    assert (await proxy.captured())[-1].event.policy_seq == 2


async def test_a_proxy_whose_log_has_no_consumer_yet_asks_until_it_has(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = 0
    add = JetStreamContext.add_consumer

    async def late(js: JetStreamContext, stream: str, *told: object, **more: object) -> object:
        nonlocal refused
        if "proxy-weights" in str(told) and refused < 2:
            refused += 1
            raise nats.errors.NoRespondersError
        return await add(js, stream, *told, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(JetStreamContext, "add_consumer", late)
    async with kit(model_dir, nats_server.url, bus, tmp_path) as proxy:
        await proxy.told([user("served all the while")])
        await bus.once(published(1))
        assert len(await activated(bus)) == 1 and refused == 2
