"""Replay on a real server: under the same rules the same ids, under others an account of what changed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.scripted_sessions import Script

from polar_common import subjects
from polar_common.bus import Bus
from polar_common.errors import ConfigError, Unavailable
from polar_common.events import BuildFailed, BuildReconstructed, GroupClosed, GroupMember, ImageRef, SessionAccepted
from polar_common.ids import FIRST_SEGMENT, task_id
from polar_common.nats_server import NatsServer
from polar_common.packing import BlobRef
from polar_common.topology import TRACES
from polar_common.traces import GroupTraces, Trace
from polar_reconstructor.builds import diff, drop, read_build, summaries
from polar_reconstructor.handlers import Reconstructor
from polar_reconstructor.origins import Log
from polar_reconstructor.pool import Processes
from polar_reconstructor.replay import Choice, Replay
from polar_reconstructor.rules import BUILT_IN, RuleSet

pytestmark = pytest.mark.nats
E = 99


async def live(bus: Bus, tasks: int = 3, run: str = "run") -> list[Script]:
    """Sessions of several shapes, built as they end, two to a task, each task's group closed."""
    service = Reconstructor(bus, "live", BUILT_IN["exact"])
    scripts = []
    for number in range(tasks):
        task = task_id(FIRST_SEGMENT, run, f"t{number}")
        members = []
        for index in range(2):
            script = Script(task=task, index=index, run=run)
            script.add(
                SessionAccepted(run=run, task=task, session=script.session, attempt=0, index=index, work_class="local")
            )
            script.started().call("c1", [1, number], [10, E]).call("c2", [1, number, 10, E, 5], [20, E], parent="c1")
            script.call("e", [1, number, 10, E, 5, 70, E, 6], [30, E], parent="c2", chain_class="continued")
            script.call("side", [5], [6, E], tools=False)
            script.ended() if number else script.ended(fault="infra").failed()
            await script.publish(bus)
            end = subjects.session(script.session, 1, "artifacts")
            stored = await bus.last(end if number else subjects.session(script.session, 0, "failed"))
            assert stored is not None
            await service.on_ended(stored)
            members.append(GroupMember(session=script.session, outcome="passed", reward=1.0, trainable=bool(number)))
            scripts.append(script)
        closed = GroupClosed(
            run=run, task=task, expected=2, terminal=2, trainable=2, by="complete", members=tuple(members)
        )
        await bus.once(closed)
        await service.project(closed)
    return scripts


async def bodies(bus: Bus, build: str) -> dict[str, bytes]:
    found = await bus.read(TRACES, [f"polar.traces.*.{build}.>"])
    return {m.subject.replace(f".{build}.", ".*."): m.body for m in found}


def trace_ids(messages: dict[str, bytes]) -> dict[str, str]:
    return {k: Trace.model_validate_json(b).trace_id for k, b in messages.items() if k.rpartition(".")[2].isdigit()}


async def replay(bus: Bus, build: str, rules: RuleSet = BUILT_IN["exact"], **options: Any) -> Replay:
    made = Replay(bus, build, rules, Log(bus, FIRST_SEGMENT), **options)
    await made.run()
    return made


async def test_the_same_rules_give_the_same_trace_ids_and_groups(bus: Bus) -> None:
    scripts = await live(bus)
    made = await replay(bus, "again")
    assert made.report.results == {"reconstructed": len(scripts), "open": 0}
    assert made.report.groups == 3 and made.report.position == made.report.end
    first, again = await bodies(bus, "live"), await bodies(bus, "again")
    assert first.keys() == again.keys()
    assert trace_ids(first) == trace_ids(again) and len(trace_ids(first)) == 8
    for subject, body in first.items():
        assert body.replace(b'"live"', b'"again"') == again[subject] or subject.endswith(".closed")
    sums = [
        {k: GroupTraces.model_validate_json(m[k]).action_tokens for k in m if k.endswith(".closed")}
        for m in (first, again)
    ]
    assert sums[0] == sums[1] and sorted(sums[0].values()) == [0, 12, 12]


async def test_several_processes_make_the_same_build(bus: Bus, nats_server: NatsServer) -> None:
    await live(bus, 12)
    builders = Processes(nats_server.url, "many", BUILT_IN["exact"], 2)
    try:
        made = await replay(bus, "many", builders=builders)
    finally:
        builders.close()
    assert made.report.results == {"reconstructed": 24, "open": 0} and made.report.groups == 12
    assert trace_ids(await bodies(bus, "live")) == trace_ids(await bodies(bus, "many"))


async def test_a_replay_that_was_broken_off_goes_on(bus: Bus) -> None:
    await live(bus)

    class Dying(Bus):
        left = 5

        async def once_raw(self, *args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                raise Unavailable("killed")
            self.left -= 1
            return await super().once_raw(*args, **kwargs)

    with suppress(Unavailable):
        await replay(Dying(bus.nc, "test/dying"), "again")
    made = await replay(bus, "again")
    assert made.report.results["there"] < 6
    assert made.report.results["there"] + made.report.results["reconstructed"] == 6
    assert trace_ids(await bodies(bus, "live")) == trace_ids(await bodies(bus, "again"))
    third = await replay(bus, "again")
    assert third.report.results == {"there": 6, "open": 0} and third.report.groups == 0


async def test_a_build_keeps_its_rules(bus: Bus) -> None:
    await live(bus, 2)
    with pytest.raises(ConfigError, match="other rules"):
        await replay(bus, "live", BUILT_IN["per_request"])


async def test_only_what_was_chosen_is_replayed(bus: Bus) -> None:
    first = await live(bus, 2, run="one")
    await live(bus, 2, run="two")
    made = await replay(bus, "r1", choice=Choice(run="one"))
    assert made.report.results["reconstructed"] == 4 and made.report.groups == 2
    made = await replay(bus, "r2", choice=Choice(sessions=frozenset({first[-1].session})))
    assert made.report.results["reconstructed"] == 1
    made = await replay(bus, "r3", choice=Choice(until=datetime(2020, 1, 1, tzinfo=UTC)))
    assert made.report.results == {"open": 0}
    made = await replay(bus, "r4", choice=Choice(since=datetime(2020, 1, 1, tzinfo=UTC)), rate=1e6)
    assert made.report.results["reconstructed"] == 8


async def test_a_choice_of_nothing_leaves_the_name_free(bus: Bus) -> None:
    await live(bus, 1)
    nothing = await replay(bus, "some", choice=Choice(run="nobodys"))
    assert nothing.report.results.total() == 0
    made = await replay(bus, "some", BUILT_IN["per_request"])
    assert made.report.results == {"reconstructed": 2, "open": 0}


async def test_a_session_without_an_end_stays_open(bus: Bus) -> None:
    await Script().started().call("c1", [1], [2, E]).publish(bus)
    made = await replay(bus, "again")
    assert made.report.results == {"open": 1}


async def test_other_rules_are_accounted_for_in_the_difference(bus: Bus) -> None:
    scripts = await live(bus)
    rules = RuleSet(name="all", rule="per_request", side="train")
    await replay(bus, "wide", rules)
    found = await diff(bus, "live", "wide")
    assert found.common == len(scripts) and not found.only_before and not found.only_after
    assert found.kinds == {("side", "trained"): 4}
    assert (found.before.traces, found.after.traces) == (8, 16)
    assert found.before.exact_share == found.after.exact_share == 1.0
    named = {s.build: s for s in await summaries(bus)}
    assert named["live"].excluded == {"side": 4, "infra_error": 8}
    assert named["wide"].rules == "all" and named["wide"].sessions == 6
    assert len(await read_build(bus, FIRST_SEGMENT, "wide")) == 6
    with pytest.raises(ConfigError, match="nowhere"):
        await diff(bus, "live", "nowhere")


async def test_damaged_sessions_fail_alone_with_the_place_while_a_replay_goes_on(bus: Bus) -> None:
    nan, missing = float("nan"), list(np.random.default_rng(0).integers(0, 1 << 30, 20_000))
    damaged = {
        "completion bad: logprobs[1] is nan": Script(index=1).call("bad", [1], [10, E], logprobs=[-0.5, nan]),
        "completion bad: prompt[0] is a negative id": Script(index=2).call("bad", [-1], [10, E]),
        "completion bad: 2 sampled ids, 1 log-probs": Script(index=3).call("bad", [1], [10, E], logprobs=[-0.5]),
        "completion bad: sampled[0] is id 700 beyond": Script(index=4).call(
            "bad", [1], [700, E], engine={"vocab_size": 600}
        ),
        "completion bad: its prompt refers to later": Script(index=5)
        .call("bad", [1, 2], [10, E], base="later", shared=1)
        .call("later", [1], [2, E]),
        "completion bad, prompt: blob": Script(index=6).call("bad", missing, [10, E]),
    }
    sound = [Script(index=0).call("good", [1], [10, E]), Script(index=7), Script(index=8).call("good", [2], [11, E])]
    for script in (*sound, *damaged.values()):
        script.refs.clear()
        await script.ended().publish(bus)
    made = await replay(bus, "again")
    assert made.report.results == {"reconstructed": 3, "failed": 6, "open": 0}
    facts = await read_build(bus, FIRST_SEGMENT, "again")
    for told, script in damaged.items():
        fact = facts[script.session]
        assert isinstance(fact, BuildFailed) and told in fact.reason
    traces = [f.traces for s in sound if isinstance(f := facts[s.session], BuildReconstructed)]
    assert traces == [1, 0, 1]


STARTED = """
import asyncio, sys
from polar_reconstructor.pool import Processes
from polar_reconstructor.rules import BUILT_IN
made = Processes(sys.argv[1], "killed", BUILT_IN["exact"], 1)
asyncio.run(made.build([]))
print(*made._pool._processes, flush=True)
sys.stdin.read()
"""


async def test_processes_of_a_replay_that_is_killed_end_with_it(bus: Bus, nats_server: NatsServer) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTED, nats_server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in (await asyncio.to_thread(parent.stdout.readline)).split()]
        parent.kill()
    assert len(pids) == 1
    for _ in range(100):
        if not Path(f"/proc/{pids[0]}").exists():
            return
        await asyncio.sleep(0.1)
    os.kill(pids[0], signal.SIGKILL)
    pytest.fail("it runs on")


async def test_a_build_over_its_budget_ends_the_replay_and_can_be_dropped_and_made_again(
    bus: Bus, nats_server: NatsServer
) -> None:
    await live(bus, 24)
    whole = await bodies(bus, "live")
    size = sum(len(body) for subject, body in whole.items() if not subject.endswith(".closed"))
    builders = Processes(nats_server.url, "small", BUILT_IN["exact"], 1)
    try:
        with pytest.raises(ConfigError, match=r"small has .* bytes of traces, more than its budget of 20,000"):
            await replay(bus, "small", budget=20_000, builders=builders)
    finally:
        builders.close()
    assert 0 < len(await bodies(bus, "small")) < len(whole)
    with pytest.raises(ConfigError, match="polar build drop small"):
        await replay(bus, "small", budget=20_000)
    assert await drop(bus, "small") > 0
    assert await bodies(bus, "small") == {} and await bodies(bus, "live") == whole
    assert (await summaries(bus, "small"))[0].traces > 0
    made = await replay(bus, "small", budget=size + 1000)
    assert made.report.results == {"reconstructed": 48, "open": 0} and made.report.groups == 24
    assert trace_ids(await bodies(bus, "small")) == trace_ids(whole)
    with pytest.raises(ConfigError, match="no build of that name"):
        await drop(bus, "nowhere")


async def test_traces_that_were_dropped_before_their_group_closed_are_made_again_for_it(bus: Bus) -> None:
    scripts = await live(bus, 2)
    before = await bodies(bus, "live")
    await drop(bus, "live")
    closings = [m.event for m in await bus.read("POLAR_EVENTS_s1", [subjects.group(scripts[2].task)])]
    assert isinstance(closings[0], GroupClosed)
    assert await Reconstructor(bus, "live", BUILT_IN["exact"]).project(closings[0])
    after = await bodies(bus, "live")
    assert after == {subject: body for subject, body in before.items() if scripts[2].task in subject}
    assert len(trace_ids(after)) == 4


async def test_a_picture_that_is_missing_fails_its_session_whoever_builds_it(bus: Bus, nats_server: NatsServer) -> None:
    picture = ImageRef(message=0, part=0, blob=BlobRef(sha256="a" * 64, size=9, media_type="image/png"))
    script = Script().started().call("c1", [1, 7], [10, E], images=(picture,)).ended()
    await script.publish(bus)
    end = await bus.last(subjects.session(script.session, 1, "artifacts"))
    assert end is not None
    await Reconstructor(bus, "live", BUILT_IN["exact"]).on_ended(end)
    await replay(bus, "here")
    builders = Processes(nats_server.url, "there", BUILT_IN["exact"], 1)
    try:
        await replay(bus, "there", builders=builders)
    finally:
        builders.close()
    for build in ("live", "here", "there"):
        (fact,) = (await read_build(bus, FIRST_SEGMENT, build)).values()
        assert isinstance(fact, BuildFailed) and "a picture of its prompts: blob aaaa" in fact.reason, build


async def test_times_are_chosen_from_the_first_and_up_to_the_second(bus: Bus) -> None:
    script = (await live(bus, 1))[1]
    accepted = await bus.last(subjects.session(script.session, 0, "accepted"))
    assert accepted is not None
    both = Choice(since=accepted.time, sessions=frozenset({script.session}))
    assert (await replay(bus, "from", choice=both)).report.results == {"reconstructed": 1, "open": 0}
    before = Choice(until=accepted.time, sessions=frozenset({script.session}))
    assert (await replay(bus, "to", choice=before)).report.results == {"open": 0}


async def test_an_empty_log_is_replayed_into_nothing(bus: Bus) -> None:
    made = await replay(bus, "again")
    assert made.report.end == 0 and made.report.results == {"open": 0}
