"""Attempts whose gateway is gone: killed, cut off, drained, or restarted between two events."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from tests.integration import gateway_kit as kit

from polar_common.bus import Bus, Lease
from polar_common.errors import Unavailable
from polar_common.events import (
    SessionCancelled,
    SessionClaimed,
    SessionEvent,
    SessionExited,
    SessionLost,
    SessionSealed,
    now,
)
from polar_common.ids import new_id
from polar_common.nats_server import NatsServer, free_port
from polar_gateway import reaper
from polar_gateway.attempt import Attempt
from polar_gateway.handlers import Gateway
from polar_gateway.house import make_house
from polar_gateway.ledger import SessionLedger
from polar_gateway.pools import Place
from polar_gateway.reaper import reap_once
from polar_runtime.ledger import Ledger
from polar_runtime.process import Process

pytestmark = pytest.mark.nats


async def history(bus: Bus, session: str, *events: Any) -> None:
    """What an earlier gateway has written."""
    at = (await kit.load(bus, session)).last_seq
    for event in events:
        at = (await bus.transition(event, at)).sequence


def claimed(session: str) -> SessionClaimed:
    return SessionClaimed(session=session, attempt=1, gateway="old", attempt_deadline=now(), session_deadline=now())


@pytest.mark.parametrize("sealed", [False, True])
async def test_a_claimed_attempt_is_never_run_again(bus: Bus, tmp_path: Path, sealed: bool) -> None:
    session = await kit.release(bus, kit.script("touch ran"))
    seal = [SessionSealed(session=session, attempt=1, reason="exited")] if sealed else []
    await history(bus, session, claimed(session), *seal)
    async with kit.gateway(bus, kit.settings(tmp_path)):
        state = await kit.over(bus, session)
        attempt = state.attempts[1]
        assert attempt.lost is not None and attempt.sealed is not None
        assert (attempt.lost.cause, attempt.running, attempt.exited) == ("node_lost", None, None)
        await kit.release(bus, kit.script("touch ran"), attempt=2)
        state = await kit.over(bus, session, 2)
    second = state.attempts[2].exited
    assert second is not None and second.fault == "none"


@pytest.mark.parametrize("first", ["claimed", "cancelled"])
async def test_who_comes_second_with_its_claim_looks_again(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    try_once = SessionLedger.try_once

    async def late(self: SessionLedger, event: SessionEvent) -> bool:
        monkeypatch.setattr(SessionLedger, "try_once", try_once)
        if first == "claimed":
            await history(bus, session, claimed(session))
        else:
            await kit.cancel(bus, session)
        return await try_once(self, event)

    monkeypatch.setattr(SessionLedger, "try_once", late)
    session = await kit.release(bus, kit.script("true"))
    async with kit.gateway(bus, kit.settings(tmp_path)) as gateway:
        next_one = await kit.release(bus, kit.script("true", name="next"))
        await kit.over(bus, next_one)
        assert await kit.idle(gateway)
        attempt = (await kit.load(bus, session)).attempts[1]
    assert attempt.exited is None
    if first == "claimed":
        assert attempt.claimed is not None and attempt.claimed.gateway == "old" and attempt.lost is not None
    else:
        assert attempt.claimed is None


async def test_after_exited_only_postrun_is_resumed(bus: Bus, tmp_path: Path) -> None:
    session = await kit.release(bus, kit.script("touch ran"))
    sealed = SessionSealed(session=session, attempt=1, reason="exited")
    await history(bus, session, claimed(session), sealed, SessionExited(session=session, attempt=1, exit_code=0))
    async with kit.gateway(bus, kit.settings(tmp_path)):
        state = await kit.over(bus, session)
    assert kit.names(state) == ["queued", "claimed", "sealed", "exited", "artifacts"]


async def test_a_killed_gateway_is_replaced(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> None:
    await kit.short_leases(bus, 2.0)
    mark = new_id()
    spec = kit.script(f"echo one > a.txt; exec sh -c 'sleep 300; : {mark}'")
    with kit.process(nats_server.url, tmp_path, instance="first") as first:
        session = await kit.release(bus, spec)
        assert await kit.there(mark)
        first.kill()
        first.wait()
    with kit.process(nats_server.url, tmp_path, instance="second", gateway_reap_s=0.5):
        state = await kit.over(bus, session)
        assert kit.names(state)[-2:] == ["lost", "sealed"] or kit.names(state)[-2:] == ["sealed", "lost"]
        assert await kit.gone(mark)
        other = await kit.release(bus, kit.script("true", name="other"))
        await kit.over(bus, other)
        quick = kit.script("echo two > a.txt")
        await kit.release(bus, spec.model_copy(update={"harness": quick.harness}), attempt=2)
        state = await kit.over(bus, session, 2)
        exited, owner = state.attempts[2].exited, state.attempts[2].claimed
        assert exited is not None and owner is not None
        assert (exited.fault, owner.gateway) == ("none", "second")
        root = tmp_path / "run" / "attempts"
        for _ in range(100):
            if not os.listdir(root):
                break
            await asyncio.sleep(0.1)
        assert os.listdir(root) == []


async def test_a_gateway_that_is_cut_off_kills_its_runtime_and_stays_silent(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    await kit.short_leases(bus, 3.0)
    mark = new_id()
    server = nats_server.process
    assert server is not None
    async with kit.gateway(bus, kit.settings(tmp_path)) as gateway:
        session = await kit.release(bus, kit.script(f"exec sh -c 'sleep 300; : {mark}'"))
        assert await kit.there(mark)
        server.send_signal(signal.SIGSTOP)
        try:
            # Two thirds of the lease, and then the time to kill.
            assert await kit.gone(mark, 6.0)
        finally:
            server.send_signal(signal.SIGCONT)
        async with asyncio.timeout(5):
            while gateway.live:
                await asyncio.sleep(0.02)
        # The server gives the work out again, and whoever gets it settles what is left.
        state = await kit.over(bus, session)
    assert state.attempts[1].lost is not None
    assert state.attempts[1].exited is None


async def test_who_lost_its_lease_publishes_nothing_more_even_where_it_was_cancelled_before(
    bus: Bus, tmp_path: Path
) -> None:
    async with kit.gateway(bus, kit.settings(tmp_path)) as gateway:
        session = await kit.release(bus, kit.script("sleep 300"))
        await kit.phase(bus, session, "running")
        attempt = gateway.live[f"{session}.1"]
        attempt.interrupt("cancelled")
        attempt.interrupt("lost")
        assert await kit.idle(gateway)
        assert kit.names(await kit.load(bus, session))[-1] == "running"


async def test_a_lost_lease_ends_the_attempt_though_its_cancellation_is_swallowed(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases: list[Lease] = []
    run = Gateway._run

    async def noted(self: Gateway, attempt: Attempt, place: Place, lease: Lease) -> None:
        leases.append(lease)
        await run(self, attempt, place, lease)

    monkeypatch.setattr(Gateway, "_run", noted)
    async with kit.gateway(bus, kit.settings(tmp_path)) as gateway:
        session = await kit.release(bus, kit.script("sleep 300"))
        await kit.phase(bus, session, "running")
        leases[0].lost.set()
        assert await kit.idle(gateway)
        assert kit.names(await kit.load(bus, session))[-1] == "running"


async def test_what_another_has_settled_is_settled(bus: Bus, tmp_path: Path) -> None:
    session = await kit.release(bus, kit.script("true"))
    await history(bus, session, claimed(session))
    ledger = SessionLedger(bus, session, 1)
    queued = (await ledger.load()).attempts[1].queued
    assert queued is not None
    await history(bus, session, SessionLost(session=session, attempt=1, detail="by another"))
    await Gateway(make_house(kit.settings(tmp_path), bus, "g"))._settle(ledger, queued, "lose")
    lost = (await kit.load(bus, session)).attempts[1].lost
    assert lost is not None and lost.detail == "by another"


async def test_a_cancel_that_the_follower_missed_is_seen_at_the_next_event(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gateway, "follow_cancels", lambda self: asyncio.sleep(300))
    spec = kit.script("sleep 300", runtime={"prepare": [{"exec": "while ! test -e go; do sleep 0.05; done"}]})
    async with kit.gateway(bus, kit.settings(tmp_path)):
        session = await kit.release(bus, spec)
        work = tmp_path / "run" / "attempts" / f"{session}.1" / "work"
        async with asyncio.timeout(10):
            while not work.is_dir():
                await asyncio.sleep(0.02)
        await kit.cancel(bus, session)
        (work / "go").touch()
        state = await kit.over(bus, session, timeout=10)
    assert kit.names(state)[-4:] == ["initialized", "sealed", "exited", "artifacts"]
    assert state.attempts[1].exited is not None and state.attempts[1].exited.cancelled


async def test_a_cancel_while_the_harness_is_being_started_ends_it(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Process.start

    async def slowly(*args: Any, **kwargs: Any) -> Process:
        if kwargs["stdin"]:
            await kit.cancel(bus, session)
            await asyncio.sleep(1)
        return await start(*args, **kwargs)

    monkeypatch.setattr(Process, "start", slowly)
    async with kit.gateway(bus, kit.settings(tmp_path)):
        session = await kit.release(bus, kit.script("sleep 300"))
        state = await kit.over(bus, session, timeout=10)
    assert kit.names(state)[-4:] == ["running", "sealed", "exited", "artifacts"]
    assert state.attempts[1].exited is not None and state.attempts[1].exited.cancelled


async def test_a_gateway_that_was_stopped_beyond_its_lease_kills_its_runtime(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    """As a host that is suspended, or swaps for too long."""
    await kit.short_leases(bus, 3.0)
    mark = new_id()
    with kit.process(nats_server.url, tmp_path) as one:
        session = await kit.release(bus, kit.script(f"exec sh -c 'sleep 300; : {mark}'"))
        assert await kit.there(mark)
        one.send_signal(signal.SIGSTOP)
        await asyncio.sleep(5)
        one.send_signal(signal.SIGCONT)
        assert await kit.gone(mark)
        state = await kit.over(bus, session)
    assert state.attempts[1].lost is not None
    assert state.attempts[1].exited is None


async def test_sigterm_lets_short_work_finish_and_gives_up_the_rest(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    mark = new_id()
    with kit.process(nats_server.url, tmp_path, gateway_drain_s=1.5) as one:
        long = await kit.release(bus, kit.script(f"exec sh -c 'sleep 300; : {mark}'", name="long"))
        short = await kit.release(bus, kit.script("sleep 1", name="short"))
        assert await kit.there(mark)
        await kit.phase(bus, short, "running")
        one.terminate()
        later = await kit.release(bus, kit.script("true", name="later"))
        assert await asyncio.to_thread(one.wait, 20) == 0
    finished, given_up = await kit.load(bus, short), await kit.load(bus, long)
    assert finished.attempts[1].exited is not None and finished.attempts[1].exited.fault == "none"
    assert given_up.attempts[1].lost is not None and given_up.attempts[1].sealed is not None
    assert (await kit.load(bus, later)).phase == "queued"
    assert kit.running(mark) == []
    assert os.listdir(tmp_path / "run" / "attempts") == []
    info = await bus.js.consumer_info("POLAR_EVENTS_s1", "gateway-local")
    assert info.num_ack_pending <= 1


async def test_a_drain_file_keeps_new_work_away(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> None:
    file = tmp_path / "drain"
    file.touch()
    with kit.process(nats_server.url, tmp_path, gateway_drain_file=file):
        session = await kit.release(bus, kit.script("true"))
        await asyncio.sleep(1.5)
        assert (await kit.load(bus, session)).phase == "queued"
        file.unlink()
        await kit.over(bus, session)


async def test_the_reaper_asks_the_log(bus: Bus, tmp_path: Path) -> None:
    made = kit.settings(tmp_path)
    elsewhere = {"work_class": "docker"}
    async with kit.gateway(bus, made) as gateway:
        done, held = [await kit.release(bus, kit.script("true", name=name)) for name in ("done", "held")]
        for session in (done, held):
            await kit.over(bus, session)
        assert await kit.idle(gateway)
        runs, lost, ended = [
            await kit.release(bus, kit.script("true", name=name, runtime=elsewhere))
            for name in ("runs", "lost", "ended")
        ]
        for session in (runs, lost, ended):
            await history(bus, session, claimed(session))
        await history(bus, lost, SessionLost(session=lost, attempt=1))
        await history(bus, ended, SessionCancelled(session=ended, attempt=0, last_attempt=1))
        gone = {f"{done}.1", f"{lost}.1", f"{ended}.1", "s1-nobodys-0.1", "s7-dropped-0.1"}
        kept = {f"{runs}.1", f"{held}.1", "s1-another-0.1", "not-a-label", "x.1", "s1.1", f"{done}.one", done}
        for label in gone | kept:
            (made.root / label).mkdir()
        # Let go of a moment later than its last event; and one of a house that shares the directory by mistake.
        gateway.live[f"{held}.1"] = cast(Attempt, None)
        Ledger(made.root / "s1-another-0.1").write("s1-another-0.1", "local")
        assert set(await reap_once(gateway)) == gone
        gateway.live.clear()
    assert set(os.listdir(made.root)) == kept


async def test_what_the_reaper_stumbles_over_is_tried_again(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, asked = asyncio.Event(), 0

    async def reap_once(gateway: Gateway) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise Unavailable("for a moment")
        stop.set()

    monkeypatch.setattr(reaper, "reap_once", reap_once)
    async with kit.gateway(bus, kit.settings(tmp_path, gateway_reap_s=0.01)) as gateway, asyncio.timeout(10):
        await reaper.reap_until(gateway, stop)
    assert asked == 2


async def test_a_gateway_tells_what_it_does(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> None:
    port = free_port()
    with kit.process(nats_server.url, tmp_path, gateway_metrics_port=port):
        await kit.over(bus, await kit.release(bus, kit.script("true")))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            health = (await client.get("/health")).json()
            told = (await client.get("/metrics")).text
    assert (health["service"], health["draining"]) == ("gateway", False)
    assert 'polar_gateway_attempts_total{cause="",fault="none"} 1.0' in told
    for stage in ("queue", "init", "ready", "running", "postrun"):
        assert f'polar_gateway_stage_seconds_count{{stage="{stage}"}} 1.0' in told
