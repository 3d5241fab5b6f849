"""Replays of logs with messages that can't be read, and builds whose name two rule sets want."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from tests.scripted_sessions import Script

from polar_common import subjects
from polar_common.archive.segments import roll
from polar_common.bus import Bus
from polar_common.errors import ConfigError
from polar_common.events import (
    BuildFailed,
    BuildReconstructed,
    Event,
    GroupClosed,
    GroupMember,
    SessionAccepted,
    encode,
)
from polar_common.ids import FIRST_SEGMENT, task_id
from polar_common.topology import Topology
from polar_reconstructor.builds import diff, read_build, summaries
from polar_reconstructor.handlers import Reconstructor
from polar_reconstructor.origins import Log
from polar_reconstructor.replay import Choice, Replay
from polar_reconstructor.rules import BUILT_IN, RuleSet

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]
E = 99
DAMAGED = b'{"kind": "damaged'


def newer(event: Event) -> bytes:
    return orjson.dumps(orjson.loads(encode(event)) | {"schema_version": 99, "new_field": 1})


async def session(bus: Bus, number: int, spoiled: str = "", body: bytes | None = None, run: str = "run") -> Script:
    """A session of its own task whose group is closed; the body of the event whose kind is `spoiled` is another, by
    default one of a newer version."""
    script = Script(task=task_id(FIRST_SEGMENT, run, f"t{number}"), run=run)
    about: dict[str, Any] = {"run": run, "task": script.task}
    script.add(SessionAccepted(**about, session=script.session, attempt=0, index=0, work_class="local"))
    script.started().call("c1", [1, number], [10, E]).ended()
    member = GroupMember(session=script.session, outcome="passed", reward=1.0, trainable=True)
    script.add(GroupClosed(**about, expected=1, terminal=1, trainable=1, by="complete", members=(member,)))
    for _, event in script.events:
        if event.kind == spoiled:
            await bus.once_raw(event.subject(), newer(event) if body is None else body, "spoiled")
        else:
            await bus.once(event)
    return script


async def replayed(bus: Bus, build: str = "again", rules: str = "exact", **choice: Any) -> Replay:
    made = Replay(bus, build, BUILT_IN[rules], Log(bus, FIRST_SEGMENT), Choice(**choice))
    await made.run()
    return made


@pytest.mark.parametrize("kind", ["session.initialized", "session.sealed", "session.exited", "session.artifacts"])
async def test_a_transition_that_cannot_be_read_fails_its_session_alone(bus: Bus, kind: str) -> None:
    await session(bus, 0)
    broken = await session(bus, 1, kind, DAMAGED)
    await session(bus, 2)
    report = (await replayed(bus)).report
    assert (report.results["reconstructed"], report.results["failed"]) == (2, 1)
    fact = (await read_build(bus, FIRST_SEGMENT, "again"))[broken.session]
    assert isinstance(fact, BuildFailed) and f"{kind.partition('.')[2]}: " in fact.reason and "JSON" in fact.reason
    assert report.groups == 3


async def test_an_acceptance_that_cannot_be_read_fails_its_session_alone(bus: Bus) -> None:
    """Whether it was chosen can't be told: told, not left out in silence."""
    await session(bus, 0)
    broken = await session(bus, 1, "session.accepted", DAMAGED)
    await session(bus, 2, run="else")
    report = (await replayed(bus, run="run")).report
    assert (report.results["reconstructed"], report.results["failed"]) == (1, 1)
    fact = (await read_build(bus, FIRST_SEGMENT, "again"))[broken.session]
    assert isinstance(fact, BuildFailed) and "accepted" in fact.reason
    assert (await replayed(bus, "whole")).report.results["reconstructed"] == 3


@pytest.mark.parametrize("body", [DAMAGED, None])
async def test_a_closing_that_cannot_be_read_is_counted_and_the_others_are_projected(
    bus: Bus, body: bytes | None
) -> None:
    await session(bus, 0)
    await session(bus, 1, "group.closed", body)
    await session(bus, 2)
    report = (await replayed(bus)).report
    assert (report.results["reconstructed"], report.groups, report.results["unreadable"]) == (3, 2, 1)


@pytest.mark.parametrize("kind", ["session.artifacts", "completion.captured", "session.accepted"])
async def test_a_session_of_a_newer_version_is_left_to_whoever_can_read_it(bus: Bus, kind: str) -> None:
    await session(bus, 0)
    waiting = await session(bus, 1, kind)
    await session(bus, 2)
    report = (await replayed(bus, run="run")).report
    assert (report.results["reconstructed"], report.results["failed"], report.results["newer"]) == (2, 0, 1)
    # Nothing is said of it, so that an upgraded replay goes on with it; nor is its group closed without it.
    assert waiting.session not in await read_build(bus, FIRST_SEGMENT, "again")
    assert report.groups == 2


async def test_a_manifest_that_cannot_be_read_leaves_its_group_open_alone(bus: Bus) -> None:
    service = Reconstructor(bus, "again", BUILT_IN["exact"])
    scripts = [await session(bus, number) for number in range(3)]
    for script in scripts:
        stored = await bus.last(subjects.session(script.session, 1, "artifacts"))
        assert stored is not None
        if script is scripts[1]:
            spoiled = subjects.trace_manifest("run", "again", script.task, script.session)
            await bus.once_raw(spoiled, DAMAGED, "spoiled")
            fact = _fact(script)
            await bus.once(fact)
        else:
            await service.on_ended(stored)
    report = (await replayed(bus)).report
    assert (report.results["there"], report.groups, report.results["unreadable"]) == (3, 2, 1)


def _fact(script: Script) -> Event:
    return BuildReconstructed(
        run="run", task=script.task, session=script.session, attempt=1, build="again", rules="exact",
        rules_hash=BUILT_IN["exact"].hash, manifest_hash="m", traces=1, trained_completions=1, excluded={},
        sampled_tokens=2, exact_spans=1, drifted_spans=0,
    )  # fmt: skip


async def test_of_two_replays_with_other_rules_at_once_one_stops_and_says_why(bus: Bus) -> None:
    """Neither calls the other's traces damage, and no session of the build is of two minds."""
    scripts = [await session(bus, number) for number in range(40)]
    results = await asyncio.gather(
        replayed(bus, "b", "exact"), replayed(bus, "b", "per_request"), return_exceptions=True
    )
    told = [r for r in results if isinstance(r, BaseException)]
    assert len(told) == 1 and isinstance(told[0], ConfigError) and "other rules" in str(told[0])
    facts = await read_build(bus, FIRST_SEGMENT, "b")
    assert facts.keys() == {s.session for s in scripts}
    assert len({f.rules_hash for f in facts.values()}) == 1
    (summary,) = await summaries(bus, "b")
    assert (summary.failed, summary.sessions) == (0, 40)


async def test_two_replays_with_the_same_rules_at_once_make_one_build(bus: Bus) -> None:
    await asyncio.gather(*(session(bus, number) for number in range(40)))
    first, second = await asyncio.gather(replayed(bus, "b"), replayed(bus, "b"))
    assert first.report.results["failed"] == second.report.results["failed"] == 0
    (summary,) = await summaries(bus, "b")
    assert (summary.sessions, summary.failed, summary.traces) == (40, 0, 40)


async def test_a_build_keeps_its_rules_over_all_segments(bus: Bus) -> None:
    await session(bus, 0)
    await replayed(bus, "b", "exact")
    await roll(bus, Topology())
    other = Script(task=task_id("s2", "run", "t9")).started().call("c1", [1], [10, E]).ended()
    await other.publish(bus)
    with pytest.raises(ConfigError, match="other rules"):
        await Replay(bus, "b", BUILT_IN["per_request"], Log(bus, "s2")).run()
    report = (await Replay(bus, "b", RuleSet(name="same"), Log(bus, "s2")).run()).results
    assert report["reconstructed"] == 1


async def test_builds_are_listed_and_compared_past_what_cannot_be_read(bus: Bus) -> None:
    """A log is for ever, and so is a damaged message in it."""
    first, second = await session(bus, 0), await session(bus, 1)
    await bus.once_raw(subjects.build("b", first.session, "reconstructed"), DAMAGED, "spoiled")
    await bus.once_raw(subjects.trace_manifest("run", "b", first.task, first.session), DAMAGED, "spoiled")
    await replayed(bus, "a")
    await replayed(bus, "b")
    assert {s.build: s.sessions for s in await summaries(bus)} == {"a": 2, "b": 2}
    found = await diff(bus, "a", "b")
    assert (found.common, found.same_traces) == (2, 1)
    assert [(c.session, c.after.partition(":")[0]) for c in found.changes] == [(first.session, "failed")]
    assert second.session not in {c.session for c in found.changes}
