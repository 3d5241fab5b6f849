"""Dead letters offered again, the attempts ledger, and the log's commands, against a server without a house."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from log_kit import accepted, attempt, command, end, lived, polar
from tests.scripted_sessions import Script

from polar_common.bus import Bus, Lease, Worker, scan
from polar_common.errors import BusError, ConfigError, Poison, Unavailable
from polar_common.events import EvaluationEvaluated, SessionArtifacts
from polar_common.ids import sessions_of
from polar_common.letters import is_letter, read_letter, retry
from polar_common.nats_server import NatsServer
from polar_common.topology import DLQ, Topology, consumers

pytestmark = [pytest.mark.nats, pytest.mark.timeout(240)]
SPEC = next(c for c in consumers(Topology()) if c.durable == "evaluator")


async def work(bus: Bus, handle: Any, until: Any) -> None:
    stop = asyncio.Event()
    working = asyncio.ensure_future(Worker(bus, SPEC, handle, slots=1).run(stop))
    async with asyncio.timeout(20):
        while not await until():
            await asyncio.sleep(0.05)
    stop.set()
    await working


async def letters(bus: Bus) -> list[Any]:
    return [read_letter(s) async for s in scan(bus, DLQ, ["polar.dlq.>"]) if is_letter(s.subject)]


async def test_a_log_that_takes_nothing_makes_no_letters(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream may be full, or without a leader, while the dead letters' is not: no message is to blame."""
    monkeypatch.setattr("polar_common.bus.poison.BACKOFFS_S", (0.05,) * 4)
    await bus.batch(accepted(0))
    about: dict[str, Any] = {"session": sessions_of(accepted(0)[0].task, 2)[0], "attempt": 1}
    await bus.once(SessionArtifacts(**about))
    config = (await bus.js.stream_info(SPEC.stream)).config
    await bus.js.update_stream(config, max_bytes=1)
    tries: list[int] = []

    async def handle(lease: Lease) -> None:
        tries.append(lease.deliveries)
        await bus.once(EvaluationEvaluated(**about, evaluator="command", outcome="passed", reward=1.0))

    async def room() -> bool:
        if len(tries) == 7:
            await bus.js.update_stream(config, max_bytes=-1)
        return await bus.last("polar.events.s1.evaluation.>") is not None

    await work(bus, handle, room)
    assert len(tries) >= 7 and await letters(bus) == []


async def test_a_body_larger_than_the_server_takes_is_told_at_once(bus: Bus) -> None:
    with pytest.raises(BusError, match="more than the server takes") as found:
        await bus.once_raw("polar.traces.x", b"x" * (bus.nc.max_payload + 1), "h")
    assert not isinstance(found.value, Unavailable)


async def test_a_letter_is_handled_when_its_cause_is_mended_and_it_is_offered_again(bus: Bus) -> None:
    task = await lived(bus, 0)
    broken = task.sessions[0]
    handled: list[str] = []
    mended = False

    async def handle(lease: Lease) -> None:
        event = lease.stored.event
        assert isinstance(event, SessionArtifacts)
        if event.session == broken and not mended:
            raise Poison("the evaluator has a hole")
        handled.append(event.session)

    async def both_seen() -> bool:
        return len(handled) == 1 and len(await letters(bus)) == 1

    await work(bus, handle, both_seen)
    (letter,) = await letters(bus)
    assert letter.consumer == "evaluator" and "hole" in letter.reason and broken in letter.subject
    mended = True
    await retry(bus, [letter])

    async def again() -> bool:
        return broken in handled

    await work(bus, handle, again)
    assert len(await letters(bus)) == 1
    notes = [s.subject async for s in scan(bus, DLQ, ["polar.dlq.>"]) if not is_letter(s.subject)]
    assert len(notes) == 1 and ".retried." in notes[0]


async def test_a_letter_that_fails_again_is_dead_again(bus: Bus, nats_server: NatsServer) -> None:
    """Also a second time; each failure has its own reason."""
    task = await lived(bus, 0)
    tries: list[str] = []

    async def handle(lease: Lease) -> None:
        session = lease.stored.subject.split(".")[4]
        if session == task.sessions[0]:
            tries.append(session)
            raise Poison(f"hole {len(tries)}")

    for number in range(1, 4):

        async def failed(wanted: int = number) -> bool:
            rows = await command(nats_server, "dlq", "list")
            return [r["state"] for r in rows] == ["dead"] and f"hole {wanted}" in rows[0]["reason"]

        await work(bus, handle, failed)
        (row,) = await command(nats_server, "dlq", "list")
        (shown,) = await command(nats_server, "dlq", "show", str(row["number"]))
        assert row["number"] == 1 and f"hole {number}" in shown["reason"]
        assert await command(nats_server, "dlq", "retry", "1") == [{"retried": [1]}]
        (row,) = await command(nats_server, "dlq", "list")
        assert row["state"] == "retried"
    assert len(await letters(bus)) == 1
    assert (await command(nats_server, "verify", "--settled"))[0]["ok"]


async def test_a_queue_of_work_is_never_set_back(bus: Bus) -> None:
    await bus.nc.request("polar.events.s1.session.s1-bad-0.1.queued.local", b"not json")
    stop = asyncio.Event()
    spec = next(c for c in consumers(Topology()) if c.durable == "gateway-local")

    async def handle(lease: Lease) -> None:
        _ = lease.stored.event

    working = asyncio.ensure_future(Worker(bus, spec, handle).run(stop))
    async with asyncio.timeout(20):
        while not (found := await letters(bus)):
            await asyncio.sleep(0.05)
    stop.set()
    await working
    with pytest.raises(ConfigError, match="submit its task again"):
        await retry(bus, found)


async def test_commands_on_a_log(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> None:
    await lived(bus, 0, attempts=2)
    (report,) = await command(nats_server, "verify", "--settled")
    assert report["ok"] and report["totals"]["sessions"] == 2
    rows = await command(nats_server, "ledger")
    assert [(r["attempt"], r["how"], r["cause"], r["outcome"]) for r in rows] == [
        (1, "lost", "node_lost", None), (2, "none", "", "passed"),
    ] * 2  # fmt: skip
    summed = await command(nats_server, "ledger", "--summary")
    assert {(r["how"], r["attempts"], r["share"]) for r in summed} == {("lost", 2, 0.5), ("none", 2, 0.5)}
    assert await command(nats_server, "dlq", "list") == []
    await command(nats_server, "dlq", "show", "1", code=2)
    archive = str(tmp_path / "s1")
    (exported,) = await command(nats_server, "log", "export", archive)
    assert exported["complete"]
    await command(nats_server, "log", "seal", "s1", code=2)
    assert (await command(nats_server, "log", "roll"))[0]["opened"] == "s2"
    (sealed,) = await command(nats_server, "log", "seal", "s1")
    assert sealed["state"] == "sealed"
    checked = await asyncio.to_thread(polar, nats_server, "log", "check", archive, "--verify")
    assert checked[1]["ok"]
    (dropped,) = await command(nats_server, "log", "drop", "s1", "--archive", archive)
    assert dropped["state"] == "dropped"
    assert [(r["segment"], r["state"]) for r in await command(nats_server, "log", "segments")] == [
        ("s1", "dropped"), ("s2", "open"),
    ]  # fmt: skip


async def test_verify_ends_with_one_where_something_is_wrong(bus: Bus, nats_server: NatsServer) -> None:
    events = accepted(3)
    await bus.batch(events)
    script = attempt(Script(task=events[0].task), 1)
    await script.publish(bus)
    await bus.once(end(script, 1)[1])
    (report,) = await command(nats_server, "verify", code=1)
    assert report["counts"] == {"outcome": 1}
