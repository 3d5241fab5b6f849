"""`polar verify` on a real log: clean where all is well, and each kind of damage is found and named."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
from log_kit import Lived, accepted, attempt, closing, end, lived
from tests.scripted_sessions import Script

from polar_common import subjects
from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.bus.poison import bury
from polar_common.bus.read import Stored
from polar_common.errors import Poison
from polar_common.events import SessionAccepted, SessionCancelRequested, SessionCompleted, SessionReady, decode, encode
from polar_common.packing import pack
from polar_common.topology import TRACES
from polar_common.traces import TraceManifest
from polar_common.verify import LiveSource, Options, Report, audit
from polar_reconstructor.handlers import Reconstructor
from polar_reconstructor.rules import BUILT_IN

pytestmark = pytest.mark.nats


async def verified(bus: Bus, **options: Any) -> Report:
    return await audit(LiveSource(bus), Options(**({"settled": True} | options)))


async def test_a_whole_log_is_clean_and_summed_up(bus: Bus) -> None:
    await lived(bus, 0)
    await lived(bus, 1, attempts=3)
    report = await verified(bus)
    assert report.findings == []
    assert report.ok
    totals = report.totals
    assert (totals["sessions"], totals["terminal"], totals["attempts"], totals["lost_attempts"]) == (4, 4, 8, 4)
    assert (totals["captured"], totals["aborted"]) == (8 * 3 + 4, 8)
    assert totals["trained"] == 4 * 3
    assert report.excluded["dead_attempt"] == 16 and report.excluded["late"] == 4
    rates = {r["task"]: r["rate"] for r in report.reattempts["by_task"]}
    assert sorted(rates.values()) == [0.0, 2.0]
    assert report.reattempts["by_policy"] == [{"policy_seq": 0, "attempts": 8, "lost": 4, "infra": 0, "rate": 0.5}]


async def test_what_is_under_way_is_live_with_its_owner(bus: Bus) -> None:
    await bus.batch(accepted(5))
    script = Script(task=accepted(5)[0].task)
    attempt(script, 1)
    await script.publish(bus, until=lambda event: event.kind == "session.sealed")
    report = await verified(bus, settled=False)
    assert report.ok
    told = {f.where: f.detail for f in report.findings if f.check == "live"}
    assert told[script.session] == "attempt 1 running, in the hands of gateway g1"
    assert told[accepted(5)[2].session] == "accepted, in the hands of the scheduler"  # type: ignore[attr-defined]
    strict = await verified(bus)
    assert strict.counts == {"live": 2}


async def test_overdue_sessions_and_groups_are_found(bus: Bus) -> None:
    await bus.batch(accepted(6))
    script = attempt(Script(task=accepted(6)[0].task), 1)
    await script.publish(bus)
    report = await verified(bus, settled=False, grace_s=-7200)
    assert set(report.counts) == {"live", "unbuilt"}
    for index in range(2):
        one = attempt(Script(task=script.task, index=index), 1) if index else script
        if index:
            await one.publish(bus)
        stored = await bus.last(subjects.session(one.session, 1, "artifacts"))
        assert stored is not None
        await Reconstructor(bus, "live", BUILT_IN["exact"]).on_ended(stored)
        for event in end(one, 1):
            await bus.once(event)
    report = await verified(bus, settled=False, grace_s=-7200)
    assert report.counts == {"group": 1}
    assert "isn't closed" in next(f.detail for f in report.findings if f.check == "group")


async def raw(bus: Bus, subject: str, body: bytes, body_hash: str = "") -> None:
    """A message that no service would write."""
    answer = orjson.loads((await bus.nc.request(subject, body, headers={"Polar-Body": body_hash})).data)
    assert "error" not in answer, answer


Damage = Callable[[Bus, Lived], Awaitable[None]]
DAMAGES: dict[str, tuple[str, Damage]] = {}


def damage(check: str) -> Callable[[Damage], Damage]:
    def register(function: Damage) -> Damage:
        DAMAGES[function.__name__] = (check, function)
        return function

    return register


@damage("unreadable")
async def garbage(bus: Bus, task: Lived) -> None:
    await raw(bus, f"polar.events.s1.session.{task.sessions[0]}.2.ready", b"{")


@damage("misplaced")
async def event_on_another_subject(bus: Bus, task: Lived) -> None:
    event = SessionReady(session=task.sessions[0], attempt=1)
    await raw(bus, "polar.events.s1.session.s1-elsewhere-0.1.ready", encode(event), event.body_hash())


@damage("body_hash")
async def altered_body(bus: Bus, task: Lived) -> None:
    event = SessionCompleted(
        session=accepted(8)[1].session, attempt=0, last_attempt=0, outcome="passed", reward=1.0, evaluation="live"  # type: ignore[attr-defined]
    )  # fmt: skip
    await raw(bus, event.subject(), encode(event), "0" * 64)


@damage("two_bodies")
async def a_subject_used_twice(bus: Bus, task: Lived) -> None:
    stored = await bus.last(subjects.session(task.sessions[0], 1, "ready"))
    assert stored is not None
    await raw(bus, stored.subject, stored.body, stored.body_hash)


@damage("two_bodies")
async def a_completion_in_two_attempts(bus: Bus, task: Lived) -> None:
    await Script(task=task.task, attempt=2).call("a1", [1], [2]).publish(bus)


@damage("foreign")
async def a_session_of_no_task(bus: Bus, task: Lived) -> None:
    await attempt(Script(task="s1-nobodys"), 1).publish(bus)


@damage("foreign")
async def a_group_of_no_task(bus: Bus, task: Lived) -> None:
    await bus.once(closing("s1-nobodys", []))


@damage("foreign")
async def a_cancellation_of_no_session(bus: Bus, task: Lived) -> None:
    await bus.once(SessionCancelRequested(session="s1-nobodys-0", attempt=0, reason="test"))


@damage("order")
async def an_end_after_the_end(bus: Bus, task: Lived) -> None:
    await Script(task=task.task).failed().publish(bus)


@damage("order")
async def a_claim_without_a_queue(bus: Bus, task: Lived) -> None:
    script = Script(task=task.task, attempt=2)
    await script.sealed().publish(bus)


@damage("unsealed")
async def an_attempt_without_a_seal(bus: Bus, task: Lived) -> None:
    await bus.batch(accepted(7))
    script = attempt(Script(task=accepted(7)[0].task), 1)
    script.events = [(n, e) for n, e in script.events if e.kind != "session.sealed"]
    await script.publish(bus)


@damage("reference")
async def a_base_that_is_not_there(bus: Bus, task: Lived) -> None:
    script = Script(task=task.task).call("odd", [1, 2, 3], [4], base="nowhere", shared=2)
    await script.publish(bus)


@damage("reference")
async def a_base_of_another_attempt(bus: Bus, task: Lived) -> None:
    script = Script(task=task.task, attempt=2).call("odd", [1, 2, 3], [4], base="a1", shared=2)
    await script.publish(bus)


@damage("blob")
async def a_blob_that_is_not_there(bus: Bus, task: Lived) -> None:
    script = Script(task=task.task).call("huge", list(range(40_000)), [4])
    script.refs.clear()
    await script.publish(bus)


@damage("blob")
async def a_tampered_blob(bus: Bus, task: Lived) -> None:
    _, blob = pack(list(range(100_000)), "i32")
    assert blob is not None
    await raw(bus, subjects.blob("s1", blob[0].sha256), blob[1][:-1] + b"?", blob[0].sha256)


@damage("trace")
async def an_altered_trace(bus: Bus, task: Lived) -> None:
    stored = await bus.last(subjects.trace("run", "live", task.task, task.sessions[0], 0), TRACES)
    assert stored is not None
    body = orjson.loads(stored.body) | {"number": 7}
    mask, _ = pack([1, 0, 1], "u8")
    await raw(bus, stored.subject[:-1] + "7", orjson.dumps(body | {"loss_mask": mask.model_dump()}))


@damage("manifest")
async def a_trace_of_no_manifest(bus: Bus, task: Lived) -> None:
    stored = await bus.last(subjects.trace("run", "live", task.task, task.sessions[0], 0), TRACES)
    assert stored is not None
    await raw(bus, stored.subject[:-1] + "7", orjson.dumps(orjson.loads(stored.body) | {"number": 7}))


@damage("manifest")
async def a_build_that_the_log_does_not_know(bus: Bus, task: Lived) -> None:
    about = (task.task, task.sessions[0])
    for name in (subjects.trace("run", "live", *about, 0), subjects.trace_manifest("run", "live", *about)):
        stored = await bus.last(name, TRACES)
        assert stored is not None
        body = orjson.loads(stored.body) | {"build": "ghost"}
        body_hash = TraceManifest.model_validate(body).hash() if name.endswith("manifest") else ""
        await raw(bus, name.replace(".live.", ".ghost."), orjson.dumps(body), body_hash)


@damage("conservation")
async def a_completion_trained_twice(bus: Bus, task: Lived) -> None:
    await a_trace_of_no_manifest(bus, task)


@damage("conservation")
async def a_build_that_forgets_a_completion(bus: Bus, task: Lived) -> None:
    stored = await bus.last(subjects.build("live", task.sessions[0], "reconstructed"))
    assert stored is not None
    body = orjson.loads(stored.body) | {"build": "other", "excluded": {}}
    event = decode(orjson.dumps(body))
    await raw(bus, event.subject(), encode(event), event.body_hash())


@damage("outcome")
async def an_end_without_its_evaluation(bus: Bus, task: Lived) -> None:
    events = accepted(9)
    await bus.batch(events)
    script = attempt(Script(task=events[0].task), 1)
    await script.publish(bus)
    await bus.once(end(script, 1)[1])


@damage("group")
async def a_group_that_says_otherwise(bus: Bus, task: Lived) -> None:
    await bus.batch(accepted(10))
    await bus.once(closing(accepted(10)[0].task, task.sessions, terminal=1))


@damage("rebuild")
async def a_build_that_the_log_does_not_give(bus: Bus, task: Lived) -> None:
    stored = await bus.last(subjects.build("live", task.sessions[0], "reconstructed"))
    assert stored is not None
    body = orjson.loads(stored.body)
    body |= {"build": "wrong", "excluded": dict.fromkeys(body["excluded"], "side")}
    event = decode(orjson.dumps(body))
    await raw(bus, event.subject(), encode(event), event.body_hash())


@pytest.mark.parametrize("name", DAMAGES)
async def test_damage_is_found_and_named(bus: Bus, name: str) -> None:
    check, harm = DAMAGES[name]
    task = await lived(bus, 0)
    await harm(bus, task)
    report = await verified(bus)
    assert not report.ok
    assert report.counts.get(check), report.findings
    assert all(f.where and f.detail for f in report.findings)


@pytest.mark.parametrize("event", ["initialized", "running", "evaluated", "captured", "artifacts"])
async def test_a_message_that_is_missing_is_found(bus: Bus, event: str) -> None:
    """Nobody can delete one; a damaged disk or archive can, and not every event is named by another."""

    class Thinned(LiveSource):
        async def messages(self, stream: str) -> AsyncIterator[Stored]:
            gone = False
            async for stored in super().messages(stream):
                if not gone and stored.subject.endswith(event):
                    gone = True
                    continue
                yield stored

    await lived(bus, 0)
    report = await audit(Thinned(bus), Options(settled=True))
    assert report.counts.get("gap") == 1, report.findings


async def test_a_dead_letter_excuses_the_message_it_is_about(bus: Bus) -> None:
    task = await lived(bus, 0)
    await garbage(bus, task)
    stored = await bus.last(f"polar.events.s1.session.{task.sessions[0]}.2.ready")
    assert stored is not None
    await bury(bus, "scheduler", "POLAR_EVENTS_s1", stored, Poison("no JSON"))
    report = await verified(bus)
    assert report.ok and report.notes == {"unreadable": 1}


async def test_a_newer_schema_version_is_no_damage(bus: Bus) -> None:
    task = await lived(bus, 0)
    body = orjson.dumps({"kind": "session.ready", "schema_version": 99})
    await raw(bus, f"polar.events.s1.session.{task.sessions[0]}.2.ready", body)
    report = await verified(bus)
    assert report.ok and report.notes == {"unreadable": 1}


async def test_large_blobs_in_parts_are_hashed_whole(bus: Bus) -> None:
    await lived(bus, 0)
    ref = await Blobs(bus, "s1").put(bytes(range(256)) * 60_000)
    report = await verified(bus)
    assert report.ok and report.totals["blobs"] >= 2
    bad = base64.b64encode(b"x")
    await raw(bus, f"polar.blobs.s1.{'0' * 64}", bad)
    report = await verified(bus)
    assert report.counts == {"blob": 1} and ref.sha256 not in str(report.findings)


async def test_a_producers_clock_that_jumps_changes_nothing(bus: Bus) -> None:
    """Order and durations come from the log: what producers believe of the time is kept, and decides nothing."""
    events = accepted(0)
    await bus.batch(events)
    for index in range(2):
        script = attempt(Script(task=events[0].task, index=index), 1)
        script.events = [
            (n, e.model_copy(update={"time": datetime(1970 + 65 * (n % 3), 1, 1, tzinfo=UTC)}))
            for n, e in script.events
        ]
        await script.publish(bus)
        stored = await bus.last(subjects.session(script.session, 1, "artifacts"))
        assert stored is not None
        await Reconstructor(bus, "live", BUILT_IN["exact"]).on_ended(stored)
        for event in end(script, 1):
            await bus.once(event)
    closed = closing(events[0].task, [e.session for e in events[1:] if isinstance(e, SessionAccepted)])
    await bus.once(closed)
    await Reconstructor(bus, "live", BUILT_IN["exact"]).project(closed)
    report = await verified(bus, settled=False)
    assert report.ok and report.findings == [], report.findings
    assert report.totals["trained"] == 6
