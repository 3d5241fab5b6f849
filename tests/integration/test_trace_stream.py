"""TraceStream on a real server: closed groups come once relative to the checkpoint, whatever dies in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.scripted_sessions import Script

from polar_common import subjects
from polar_common.bus import Bus
from polar_common.errors import ConfigError
from polar_common.events import Event, GroupClosed, GroupMember, SessionAccepted, TaskAccepted, TrainerConsumed
from polar_common.ids import FIRST_SEGMENT, task_id
from polar_common.task_spec import HarnessSpec, TaskSpec
from polar_common.topology import TRACES
from polar_reconstructor.handlers import Reconstructor
from polar_reconstructor.rules import BUILT_IN
from polar_train import Acceptance, Group, TraceStream, collate, group_advantages

pytestmark = pytest.mark.nats
E = 99


async def close_group(
    bus: Bus,
    name: str,
    rewards: list[float],
    *,
    versions: int = 0,
    deadline: bool = False,
    priority: int = 0,
    accept: bool = True,
) -> str:
    """A task whose sessions ran, were built, and whose group is closed and projected. A reward of -1: not trainable."""
    task = task_id(FIRST_SEGMENT, "run", name)
    spec = TaskSpec(id=name, instruction="x", harness=HarnessSpec(name="command"), priority=priority)
    sessions = tuple(Script(task=task, index=i).session for i in range(len(rewards)))
    accepted: list[Event] = [TaskAccepted(run="run", task=task, spec=spec, spec_hash="h", sessions=sessions)]
    accepted += [
        SessionAccepted(run="run", task=task, session=s, attempt=0, index=i, work_class="local")
        for i, s in enumerate(sessions)
    ]
    if accept:
        await bus.batch(accepted)
    service = Reconstructor(bus, "live", BUILT_IN["exact"])
    members = []
    for index, reward in enumerate(rewards):
        script = Script(task=task, index=index).started().call("c1", [1, index], [10, 11, E], policy_seq=versions)
        script.call("c2", [1, index, 10, 11, E, 5], [20, E], parent="c1", policy_seq=versions).ended()
        await script.publish(bus)
        artifacts = await bus.last(subjects.session(script.session, 1, "artifacts"))
        assert artifacts is not None
        await service.on_ended(artifacts)
        good = reward >= 0
        members.append(
            GroupMember(
                session=script.session,
                outcome="passed" if good else "infra_error",
                reward=reward if good else None,
                trainable=good,
                reason="" if good else "infra_error",
            )
        )
    terminal = len(members) - 1 if deadline else len(members)
    await service.project(
        GroupClosed(
            run="run",
            task=task,
            expected=len(members),
            terminal=terminal,
            trainable=sum(m.trainable for m in members),
            by="deadline" if deadline else "complete",
            members=tuple(members),
        )
    )
    return task


@pytest.fixture
async def stream(bus: Bus) -> AsyncIterator[TraceStream]:
    found = TraceStream(bus, trainer="t1", run="run")
    yield found
    await found.close()


async def taken(stream: TraceStream, count: int) -> list[Group]:
    found = []
    for _ in range(count):
        group = await stream.next(10.0)
        assert group is not None
        found.append(group)
    return found


async def test_a_closed_group_comes_with_rewards_and_arrays(bus: Bus, stream: TraceStream) -> None:
    task = await close_group(bus, "a", [1.0, 0.0, -1])
    (group,) = await taken(stream, 1)
    assert (group.task, group.expected, len(group.trainable), len(group.traces)) == (task, 3, 2, 2)
    first = group.traces[0]
    assert first.prompt_ids.tolist() == [1, 0]
    assert first.response_ids.tolist() == [10, 11, E, 5, 20, E]
    assert first.loss_mask.tolist() == [1, 1, 1, 0, 1, 1]
    assert [t.reward for t in group.traces] == [1.0, 0.0]
    assert group.members[2].traces == () and group.members[2].reason == "infra_error"
    gains = group_advantages(group)
    assert list(gains.by_trace.values()) == [1.0, -1.0] and not gains.singleton
    batch = collate(group.traces, gains.by_trace)
    assert batch.input_ids.shape == (2, 8)
    assert batch.weights.sum() == pytest.approx(1.0)


async def test_traces_without_a_manifest_are_ignored(bus: Bus, stream: TraceStream) -> None:
    task = await close_group(bus, "a", [1.0, 0.0])
    session = Script(task=task, index=0).session
    await bus.once_raw(subjects.trace("run", "live", task, session, 7), b"not a trace", "x")
    (group,) = await taken(stream, 1)
    assert len(group.traces) == 2 and not stream.dropped


async def restarted(bus: Bus, state: dict[str, Any] | None) -> TraceStream:
    """As after a crash: a new process with the checkpoint it finds, through JSON as in a file."""
    stream = TraceStream(bus, trainer="t1", run="run")
    if state is not None:
        stream.load_state_dict(orjson.loads(orjson.dumps(state)))
    return stream


async def test_used_and_saved_groups_never_come_again_and_all_others_do(bus: Bus) -> None:
    tasks = [await close_group(bus, name, [1.0, 0.0]) for name in "abcd"]
    stream = await restarted(bus, None)
    first, second, third = await taken(stream, 3)
    stream.used([first, third], step=1, policy_version="v1", policy_seq=1)
    state = stream.state_dict()
    await stream.saved(state)
    stream.used([second], step=2)
    await stream.close()

    again = await restarted(bus, state)
    assert [g.task for g in await taken(again, 2)] == [tasks[1], tasks[3]]
    assert await again.next(0.5) is None
    await again.close()


async def test_a_trainer_without_a_checkpoint_gets_everything(bus: Bus) -> None:
    tasks = [await close_group(bus, name, [1.0, 0.0]) for name in "ab"]
    stream = await restarted(bus, None)
    stream.used(await taken(stream, 2), step=1)
    await stream.saved(stream.state_dict())
    await stream.close()
    fresh = await restarted(bus, None)
    assert [g.task for g in await taken(fresh, 2)] == tasks
    await fresh.close()


async def test_a_crash_between_the_save_and_saved_loses_and_doubles_nothing(bus: Bus) -> None:
    tasks = [await close_group(bus, name, [1.0, 0.0]) for name in "abc"]
    stream = await restarted(bus, None)
    groups = await taken(stream, 2)
    stream.used(groups, step=1, policy_version="v1", policy_seq=3)
    state = stream.state_dict()
    await stream.close()

    again = await restarted(bus, state)
    (group,) = await taken(again, 1)
    assert group.task == tasks[2]
    again.used([group], step=2, policy_version="v1", policy_seq=3)
    await again.saved(again.state_dict())
    await again.saved(again.state_dict())
    events = await bus.read(f"POLAR_EVENTS_{FIRST_SEGMENT}", ["polar.events.*.trainer.t1.>"])
    consumed = [m.event for m in events]
    assert [(e.epoch, e.step, e.groups) for e in consumed if isinstance(e, TrainerConsumed)] == [
        (0, 1, tuple(tasks[:2])),
        (0, 2, (tasks[2],)),
    ]
    info = await bus.js.consumer_info(TRACES, "trainer-t1")
    assert info.num_ack_pending == 0 and info.num_pending == 0
    await again.close()


async def test_returning_to_an_older_checkpoint_replays_what_came_after_it_in_a_new_epoch(bus: Bus) -> None:
    tasks = [await close_group(bus, name, [1.0, 0.0]) for name in "abc"]
    stream = await restarted(bus, None)
    stream.used(await taken(stream, 1), step=1)
    old = stream.state_dict()
    await stream.saved(old)
    stream.used(await taken(stream, 2), step=2)
    await stream.saved(stream.state_dict())
    await stream.close()

    back = await restarted(bus, old)
    groups = await taken(back, 2)
    assert [g.task for g in groups] == tasks[1:]
    back.used(groups[:1], step=2)
    await back.saved(back.state_dict())
    events = await bus.read(f"POLAR_EVENTS_{FIRST_SEGMENT}", ["polar.events.*.trainer.t1.>"])
    steps = [(e.epoch, e.step) for e in (m.event for m in events) if isinstance(e, TrainerConsumed)]
    assert sorted(steps) == [(0, 1), (0, 2), (1, 2)]
    await back.close()


async def test_a_lost_connection_or_consumer_loses_no_group(bus: Bus) -> None:
    names = "abcdef"
    tasks = []
    stream = await restarted(bus, None)
    seen = []
    for name in names:
        tasks.append(await close_group(bus, name, [1.0, 0.0]))
        if name in "bd":
            await bus.js.delete_consumer(TRACES, "trainer-t1")
        seen += [g.task for g in await taken(stream, 1)]
    assert seen == tasks
    await stream.close()


async def test_what_is_refused_is_dropped_with_its_reason(bus: Bus) -> None:
    await close_group(bus, "flat", [1.0, 1.0])
    await close_group(bus, "none", [-1, -1])
    await close_group(bus, "late", [1.0, 0.0, 1.0, 0.0], deadline=True)
    await close_group(bus, "old", [1.0, 0.0], versions=1)
    good = await close_group(bus, "good", [1.0, 0.0], versions=5)
    accept = Acceptance(min_complete=0.9, staleness=2, zero_variance="drop")
    stream = TraceStream(bus, trainer="t1", run="run", accept=accept)
    stream.set_policy(6)
    (group,) = await taken(stream, 1)
    assert group.task == good
    assert stream.dropped == {"zero_variance": 1, "too_few_trainable": 1, "incomplete": 1, "stale": 1}
    await stream.saved(stream.state_dict())
    assert (await bus.js.consumer_info(TRACES, "trainer-t1")).num_ack_pending == 1
    await stream.close()


async def test_the_oldest_task_comes_first_where_age_decides(bus: Bus) -> None:
    old, young = (task_id(FIRST_SEGMENT, "run", name) for name in ("old", "young"))
    spec = TaskSpec(id="old", instruction="x", harness=HarnessSpec(name="command"))
    await bus.once(TaskAccepted(run="run", task=old, spec=spec, spec_hash="h", sessions=()))
    for name in ("young", "old"):
        await close_group(bus, name, [1.0, 0.0], accept=name == "young")
    stream = TraceStream(bus, trainer="t1", run="run", accept=Acceptance(order="age"))
    assert [g.task for g in await taken(stream, 2)] == [old, young]
    await stream.close()


async def test_demand_is_numbered_on_the_log(bus: Bus, stream: TraceStream) -> None:
    await stream.demand(8, 2)
    await stream.demand(4, 1)
    found = await bus.read(f"POLAR_EVENTS_{FIRST_SEGMENT}", ["polar.events.*.trainer.t1.>"])
    assert [(e.number, e.groups, e.staleness) for e in (m.event for m in found)] == [(0, 8, 2), (1, 4, 1)]  # type: ignore[attr-defined]


async def test_what_was_dropped_is_demanded_again_once_nothing_else_is_there(bus: Bus) -> None:
    stream = TraceStream(bus, trainer="t1", run="run", accept=Acceptance(zero_variance="drop"))
    await stream.demand(3, 0)
    for name, rewards in (("a", [1.0, 1.0]), ("b", [0.0, 1.0]), ("c", [1.0, 1.0])):
        await close_group(bus, name, rewards)

    async def demands() -> list[tuple[int, int, str]]:
        found = await bus.read(f"POLAR_EVENTS_{FIRST_SEGMENT}", ["polar.events.*.trainer.t1.*.*.demanded"])
        return [(e.number, e.groups, e.run) for e in (m.event for m in found)]  # type: ignore[attr-defined]

    assert await stream.next(5) is not None
    assert await demands() == [(0, 3, "run")]
    for _ in range(2):
        assert await stream.next(1.5) is None
        assert await demands() == [(0, 3, "run"), (1, 3, "run")]
    with pytest.raises(ConfigError, match="at least 0"):
        await stream.demand(-1, 0)
    await stream.close()


async def test_of_two_trainers_under_one_name_the_older_is_told(bus: Bus, stream: TraceStream) -> None:
    """Each would take the consumer from the other for ever, and both would train the same groups."""
    first = await close_group(bus, "a", [1.0, 0.0])
    assert [g.task for g in await taken(stream, 1)] == [first]
    second = TraceStream(bus, trainer="t1", run="run")
    assert [g.task for g in await taken(second, 1)] == [first]
    with pytest.raises(ConfigError, match="another trainer runs as 't1'"):
        await stream.next(15)
    later = await close_group(bus, "b", [1.0, 0.0])
    assert [g.task for g in await taken(second, 1)] == [later]
    await second.close()


@pytest.mark.parametrize(("order", "expected"), [("priority", "high low mid"), ("fifo", "low mid high")])
async def test_orders(bus: Bus, order: Any, expected: str) -> None:
    named = {}
    for name, priority in (("low", 0), ("mid", -3), ("high", 9)):
        named[await close_group(bus, name, [1.0, 0.0], priority=priority)] = name
    stream = TraceStream(bus, trainer="t1", run="run", accept=Acceptance(order=order))
    assert [named[g.task] for g in await taken(stream, 3)] == expected.split()
    await stream.close()


async def test_a_group_whose_only_session_could_not_be_built_is_dropped(bus: Bus) -> None:
    task = task_id(FIRST_SEGMENT, "run", "bad")
    session = Script(task=task).session
    closed = GroupClosed(
        run="run", task=task, expected=1, terminal=1, trainable=1, by="complete",
        members=(GroupMember(session=session, outcome="passed", reward=1.0, trainable=True),),
    )  # fmt: skip
    service = Reconstructor(bus, "live", BUILT_IN["exact"])
    script = Script(task=task).started().call("c1", [1], [10, E]).ended()
    await script.publish(bus)
    await bus.js.publish(subjects.trace("run", "live", task, session, 0), b'{"schema_version": 1}')
    artifacts = await bus.last(subjects.session(session, 1, "artifacts"))
    assert artifacts is not None
    await service.on_ended(artifacts)
    await service.project(closed)
    good = await close_group(bus, "good", [1.0, 0.0])
    stream = TraceStream(bus, trainer="t1", run="run")
    assert [g.task for g in await taken(stream, 1)] == [good]
    assert stream.dropped == {"no_traces": 1}
    await stream.close()


async def test_a_state_of_another_trainer_is_refused(bus: Bus, stream: TraceStream) -> None:
    other = TraceStream(bus, trainer="t2", run="run")
    with pytest.raises(ConfigError, match="trainer"):
        stream.load_state_dict(other.state_dict())


async def test_a_group_is_used_once(bus: Bus, stream: TraceStream) -> None:
    await close_group(bus, "a", [1.0, 0.0])
    groups = await taken(stream, 1)
    stream.used(groups, step=1)
    with pytest.raises(ConfigError, match="once"):
        stream.used(groups, step=2)


async def test_a_connection_of_its_own(nats_server: Any, bus: Bus, tmp_path: Path) -> None:
    task = await close_group(bus, "a", [1.0, 0.0])
    stream = await TraceStream.connect(nats_server.url, trainer="t9", run="run")
    async with asyncio.timeout(20):
        async for group in stream:
            assert group.task == task
            break
    await stream.close()


async def test_weights_that_engines_would_pass_over_are_refused(bus: Bus, stream: TraceStream) -> None:
    """Numbers grow over all trainers of a house."""
    assert await stream.newest_policy() is None
    await stream.publish("/w/1", version="a-1", policy_seq=4)
    await stream.publish("/w/2", version="a-2", policy_seq=5)
    other = TraceStream(bus, trainer="t2")
    for number in (1, 5):
        with pytest.raises(ConfigError, match=rf"policy_seq: {number} isn't above 5 \(a-2\)"):
            await other.publish("/w/b", version="b-1", policy_seq=number)
    await stream.publish("/w/1", version="a-1", policy_seq=4)
    await other.publish("/w/b", version="b-1", policy_seq=6)
    newest = await stream.newest_policy()
    assert newest is not None and (newest.version, newest.trainer) == ("b-1", "t2")
