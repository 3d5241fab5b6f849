"""The reconstructor on a real server: ends of sessions become traces, a manifest and a fact, once and the same."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from tests.scripted_sessions import Script

from polar_common import subjects
from polar_common.bus import Bus, Stored
from polar_common.errors import Unavailable
from polar_common.events import BuildFailed, BuildReconstructed, GroupClosed, GroupMember
from polar_common.ids import FIRST_SEGMENT
from polar_common.packing import unpack
from polar_common.topology import EVENTS, TRACES
from polar_common.traces import GroupTraces, RoleTotals, Trace, TraceManifest, trace_hash
from polar_reconstructor.handlers import Reconstructor
from polar_reconstructor.rules import BUILT_IN
from polar_train.groups import load_group

pytestmark = pytest.mark.nats
E = 99


def two_turns(index: int = 0) -> Script:
    script = Script(index=index).started().call("c1", [1, 2, 3], [10, 11, E])
    script.call("c2", [1, 2, 3, 10, 11, E, 50, 51], [20, 21, E], base="c1", shared=6, parent="c1")
    return script.call("side", [5], [6, 7, E], tools=False)


async def trigger(bus: Bus, subject: str) -> Stored:
    found = await bus.last(subject)
    assert found is not None
    return found


async def traces_of(bus: Bus, script: Script, build: str = "live") -> dict[str, bytes]:
    found = await bus.read(TRACES, [f"polar.traces.run.{build}.{script.task}.{script.session}.>"])
    return {m.subject.rpartition(".")[2]: m.body for m in found}


async def test_an_ended_session_becomes_traces_a_manifest_and_a_fact(bus: Bus) -> None:
    script = two_turns().ended()
    await script.publish(bus)
    service = Reconstructor(bus, "live", BUILT_IN["exact"])
    await service.on_ended(await trigger(bus, subjects.session(script.session, 1, "artifacts")))

    bodies = await traces_of(bus, script)
    assert sorted(bodies) == ["0", "manifest"]
    trace = Trace.model_validate_json(bodies["0"])
    columns = [unpack(c) for c in (trace.prompt_ids, trace.response_ids, trace.loss_mask, trace.logprobs)]
    assert columns[0].tolist() == [1, 2, 3]
    assert columns[1].tolist() == [10, 11, E, 50, 51, 20, 21, E]
    assert columns[2].tolist() == [1, 1, 1, 0, 0, 1, 1, 1]
    assert trace.trace_id == trace_hash(*columns, trace.spans, trace.rules_hash)  # type: ignore[arg-type]
    assert trace.provenance.harness == "command" and trace.provenance.log_last < 7
    manifest = TraceManifest.model_validate_json(bodies["manifest"])
    assert manifest.traces == (trace.trace_id,)
    assert manifest.excluded == {"side": "side"}
    fact = (await trigger(bus, subjects.build("live", script.session, "reconstructed"))).event
    assert isinstance(fact, BuildReconstructed)
    assert fact.manifest_hash == manifest.hash()
    assert (fact.traces, fact.trained_completions, fact.sampled_tokens, fact.exact_spans) == (1, 2, 6, 2)


class Dying(Bus):
    """A bus whose process dies at the n-th publish."""

    left = 0

    async def once_raw(self, *args: Any, **kwargs: Any) -> Any:
        if self.left == 0:
            raise Unavailable("killed")
        self.left -= 1
        return await super().once_raw(*args, **kwargs)


async def test_a_build_that_died_between_any_two_publishes_is_resumed_with_the_same_bytes(bus: Bus) -> None:
    whole: dict[int, dict[str, bytes]] = {}
    for survived in range(4):
        script = two_turns(survived)
        script.call("d1", [9], [30, E]).ended()
        await script.publish(bus)
        artifacts = await trigger(bus, subjects.session(script.session, 1, "artifacts"))
        dying = Dying(bus.nc, "test/dying")
        dying.left = survived
        with suppress(Unavailable):
            await Reconstructor(dying, "live", BUILT_IN["exact"]).on_ended(artifacts)
        before = await traces_of(bus, script)
        async with asyncio.timeout(5):
            while len(before) < min(survived, 3):  # the last one was under way
                before = await traces_of(bus, script)
        assert len(before) == min(survived, 3)
        assert await bus.last(subjects.build("live", script.session, "*")) is None
        await Reconstructor(bus, "live", BUILT_IN["exact"]).on_ended(artifacts)
        after = await traces_of(bus, script)
        assert len(after) == 3 and before.items() <= after.items()
        whole[survived] = after
        fact = await trigger(bus, subjects.build("live", script.session, "*"))
        assert fact.event.kind == "build.reconstructed"


async def test_other_bytes_under_a_used_subject_fail_the_sessions_build(bus: Bus) -> None:
    script = two_turns().ended()
    await script.publish(bus)
    await bus.once_raw(subjects.trace("run", "live", script.task, script.session, 0), b"{}", "another trace")
    await Reconstructor(bus, "live", BUILT_IN["exact"]).on_ended(
        await trigger(bus, subjects.session(script.session, 1, "artifacts"))
    )
    fact = (await trigger(bus, subjects.build("live", script.session, "*"))).event
    assert isinstance(fact, BuildFailed) and "another body" in fact.reason


async def test_a_missing_blob_fails_its_session_alone_and_names_the_place(bus: Bus) -> None:
    broken, sound = Script(index=0).started(), two_turns(1).ended()
    noise = np.random.default_rng(0).integers(0, 1 << 30, 20_000).tolist()
    broken.call("big", noise, [1, E]).ended()
    broken.refs.clear()
    service = Reconstructor(bus, "live", BUILT_IN["exact"])
    for script in (broken, sound):
        await script.publish(bus)
        await service.on_ended(await trigger(bus, subjects.session(script.session, 1, "artifacts")))
    fact = (await trigger(bus, subjects.build("live", broken.session, "*"))).event
    assert isinstance(fact, BuildFailed)
    assert "completion big, prompt" in fact.reason and "missing" in fact.reason
    assert (await trigger(bus, subjects.build("live", sound.session, "*"))).event.kind == "build.reconstructed"


async def test_a_faulty_attempt_waits_for_the_sessions_end(bus: Bus) -> None:
    script = Script().started().call("c1", [1], [10, E]).ended(fault="infra", cause="daemon")
    await script.publish(bus)
    service = Reconstructor(bus, "live", BUILT_IN["exact"])
    await service.on_ended(await trigger(bus, subjects.session(script.session, 1, "artifacts")))
    assert await bus.last(subjects.build("live", script.session, "*")) is None
    done = len(script.events)
    script.failed()
    await bus.once(script.events[done][1])
    await service.on_ended(await trigger(bus, subjects.session(script.session, 0, "failed")))
    fact = (await trigger(bus, subjects.build("live", script.session, "*"))).event
    assert isinstance(fact, BuildReconstructed)
    assert fact.traces == 0 and fact.excluded == {"c1": "infra_error"}


def closed(scripts: list[Script], **rewards: float) -> GroupClosed:
    members = tuple(
        GroupMember(session=s.session, outcome="passed", reward=float(i), trainable=True, attempts=1)
        for i, s in enumerate(scripts)
    )
    return GroupClosed(
        run="run", task=scripts[0].task, expected=len(members), terminal=len(members), trainable=len(members),
        by="complete", members=members,
    )  # fmt: skip


async def test_a_closed_group_is_projected_once_with_manifests_and_sums(bus: Bus) -> None:
    scripts = [two_turns(i).ended() for i in range(2)]
    service = Reconstructor(bus, "live", BUILT_IN["exact"])
    for script in scripts:
        await script.publish(bus)
        await service.on_ended(await trigger(bus, subjects.session(script.session, 1, "artifacts")))
    await bus.once(closed(scripts))
    message = await trigger(bus, subjects.group(scripts[0].task))
    await asyncio.gather(service.on_group_closed(message), service.on_group_closed(message))
    found = await bus.read(TRACES, [subjects.closed_filter("run", "live")])
    assert len(found) == 1
    group = GroupTraces.model_validate_json(found[0].body)
    assert set(group.manifests) == {s.session for s in scripts}
    assert (group.action_tokens, group.traces, group.trainable) == (12, 2, 2)


async def test_a_closed_group_has_sums_by_agent_role(bus: Bus) -> None:
    scripts = [two_turns(i) for i in range(2)]
    child = {"agent": "x1", "agent_role": "explore", "parent_agent": "main", "chain_class": "subagent"}
    scripts[1].call("s1", [7], [70, 71, E], **child).call("s2", [8], [80, E], **(child | {"agent": "x2"}))
    service = Reconstructor(bus, "live", BUILT_IN["exact"])
    for script in scripts:
        await script.ended().publish(bus)
        await service.on_ended(await trigger(bus, subjects.session(script.session, 1, "artifacts")))
    event = closed(scripts)
    assert await service.project(event)
    stored = await bus.last(subjects.trace_closed("run", "live", scripts[0].task))
    assert stored is not None
    group = GroupTraces.model_validate_json(stored.body)
    assert group.roles == {
        "explore": RoleTotals(sessions=1, traces=2, action_tokens=5),
        "main": RoleTotals(sessions=2, traces=2, action_tokens=12),
    }
    assert (group.agent_role, group.traces, group.action_tokens) == ("main", 4, 17)
    loaded = await load_group(bus, group, stored.sequence)
    for role, told in group.roles.items():
        own = loaded.of_role(role)
        assert (len(own.traces), own.action_tokens) == (told.traces, told.action_tokens)


async def test_a_member_without_a_build_has_no_manifest(bus: Bus) -> None:
    scripts = [two_turns(i).ended() for i in range(2)]
    service = Reconstructor(bus, "live", BUILT_IN["exact"])
    for script in scripts:
        await script.publish(bus)
    await service.on_ended(await trigger(bus, subjects.session(scripts[0].session, 1, "artifacts")))
    assert await service.project(closed(scripts))
    found = await bus.last(subjects.trace_closed("run", "live", scripts[0].task))
    assert found is not None
    assert list(GroupTraces.model_validate_json(found.body).manifests) == [scripts[0].session]
    assert (await bus.js.stream_info(f"{EVENTS}_{FIRST_SEGMENT}")).state.messages > 0


async def test_a_trainer_gets_the_nodes_of_a_tree_behind_what_the_model_saw(bus: Bus) -> None:
    """A node alone would be trained without its context."""
    script = Script().started().call("c1", [1, 2], [10, E])
    script.call("c2", [1, 2, 10, E, 5], [20, E], parent="c1").call("c3", [1, 2, 10, E, 6], [30, E], parent="c1")
    script.call("r1", [3], [40, E]).call("r2", [3, 40, E, 7], [50, E], parent="r1").ended()
    await script.publish(bus)
    service = Reconstructor(bus, "live", BUILT_IN["tree"])
    await service.on_ended(await trigger(bus, subjects.session(script.session, 1, "artifacts")))
    await service.project(closed([script]))
    stored = await trigger(bus, subjects.trace_closed("run", "live", script.task))
    group = await load_group(bus, GroupTraces.model_validate_json(stored.body), stored.sequence)
    contexts = {"c1": [1, 2], "c2": [1, 2, 10, E, 5], "c3": [1, 2, 10, E, 6], "r1": [3], "r2": [3, 40, E, 7]}
    shown = {}
    for trace in group.traces:
        whole = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
        shown |= {s.completion: whole[: len(trace.prompt_ids) + s.start] for s in trace.spans if s.trained}
    assert shown == contexts
