"""The gateway with a real log and the real local runtime: from `queued` to `artifacts`, and how attempts end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import gateway_kit as kit
import pytest

from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.events import CompletionAborted, CompletionRejected
from polar_common.ids import new_id
from polar_common.keys import verify
from polar_common.packing import BlobRef
from polar_common.task_spec import HarnessSpec, TaskSpec
from polar_gateway.house import House
from polar_runtime.local import LocalRuntime

pytestmark = pytest.mark.nats


async def body(bus: Bus, ref: BlobRef | None) -> str:
    assert ref is not None
    return (await Blobs(bus, "s1").get(ref)).decode()


async def test_a_session_runs_from_queued_to_artifacts(bus: Bus, tmp_path: Path) -> None:
    spec = kit.script(
        'printf "%s" "$POLAR_INSTRUCTION"; echo noise >&2; echo "$OPENAI_API_KEY" > key.txt; echo more >> given.txt',
        files={"given.txt": "given\n"},
        runtime={"prepare": [{"exec": "echo ready > prepared.txt"}]},
    )
    made = kit.settings(tmp_path)
    async with kit.gateway(bus, made) as gateway:
        session = await kit.release(bus, spec)
        state = await kit.over(bus, session)
    assert kit.names(state) == [
        "queued", "claimed", "initialized", "ready", "running", "sealed", "exited", "artifacts",
    ]  # fmt: skip
    attempt = state.attempts[1]
    assert attempt.exited is not None and attempt.artifacts is not None and attempt.claimed is not None
    assert (attempt.exited.exit_code, attempt.exited.fault, attempt.exited.timed_out) == (0, "none", False)
    assert (attempt.claimed.gateway, attempt.claimed.task) == ("g1", session.rpartition("-")[0])
    assert await body(bus, attempt.artifacts.answer) == "do it"
    assert "noise" in await body(bus, attempt.artifacts.log)
    patch = await body(bus, attempt.artifacts.patch)
    assert "+more" in patch and "prepared.txt" not in patch
    assert "[session key removed]" in patch
    assert gateway.live == {}
    assert os.listdir(made.root) == []


async def test_the_session_key_says_who_calls_and_for_how_long(bus: Bus, tmp_path: Path) -> None:
    out = tmp_path / "seen"
    out.mkdir()
    spec = kit.script(
        f"echo $OPENAI_API_KEY > {out}/key; echo $OPENAI_BASE_URL > {out}/url",
        limits={"calls": 7, "max_tokens_per_call": 50, "total_tokens": 900},
        sampling={"temperature": 0.7, "thinking": "follow"},
    )
    async with kit.gateway(bus, kit.settings(tmp_path, gateway_isolation="none")):
        session = await kit.release(bus, spec)
        state = await kit.over(bus, session)
    key = verify((out / "key").read_text().strip(), {"k1": kit.SECRET.encode()})
    assert key is not None
    assert (key.session, key.attempt, key.run, key.model) == (session, 1, "run", "policy")
    assert (key.calls, key.max_tokens_per_call, key.total_tokens, key.sampling) == (7, 50, 900, spec.sampling)
    claimed = state.attempts[1].claimed
    assert claimed is not None
    assert 0 <= key.expires - claimed.attempt_deadline.timestamp() <= 62
    assert (out / "url").read_text().strip().endswith(f"/s/{(out / 'key').read_text().strip()}/v1")


async def test_a_timeout_yields_what_was_done_and_ends_the_tree(bus: Bus, tmp_path: Path) -> None:
    mark = new_id()
    stubborn = f"python3 -c 'import signal, time; signal.signal(15, 1); time.sleep(300)' {mark}"
    text = f"echo partial > out.txt; echo told; {stubborn} & sleep 300"
    # Without a reserve nothing of its time is left when it is killed, and what it did is collected all the same.
    spec = kit.script(text, limits={"attempt_s": 2, "postrun_reserve_s": 0})
    async with kit.gateway(bus, kit.settings(tmp_path)):
        session = await kit.release(bus, spec)
        state = await kit.over(bus, session)
        assert await kit.gone(mark)
    attempt = state.attempts[1]
    assert attempt.exited is not None and attempt.artifacts is not None and attempt.sealed is not None
    assert (attempt.sealed.reason, attempt.exited.timed_out) == ("timeout", True)
    assert (attempt.exited.fault, attempt.exited.cause) == ("agent", "timeout")
    assert 1.5 < attempt.exited.run_s < 6
    assert kit.names(state)[-3:] == ["sealed", "exited", "artifacts"]
    assert "+partial" in await body(bus, attempt.artifacts.patch)
    assert (await body(bus, attempt.artifacts.answer)).startswith("told")


async def test_the_key_is_sealed_before_anything_is_killed_and_the_end_told_after(bus: Bus, tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    class Watched(LocalRuntime):
        """Notes the last event when it ends commands, and when it is removed."""

        async def note(self, what: str) -> None:
            state = await kit.load(bus, self.spec.label.rpartition(".")[0])
            seen.append((what, kit.names(state)[-1]))

        async def cancel(self) -> None:
            await self.note("cancel")
            await super().cancel()

        async def stop(self) -> None:
            await self.note("stop")
            await super().stop()

    def watched(house: House) -> None:
        house.make_runtime = Watched

    async with kit.gateway(bus, kit.settings(tmp_path), adapt=watched):
        late = kit.script("sleep 300", name="late", limits={"attempt_s": 1, "postrun_reserve_s": 0})
        await kit.over(bus, await kit.release(bus, late))
        session = await kit.release(bus, kit.script("sleep 300", name="cancelled"))
        await kit.phase(bus, session, "running")
        await kit.cancel(bus, session)
        await kit.over(bus, session)
    assert seen.count(("cancel", "sealed")) == 2
    # The second look comes when the attempt is let go of, and removes nothing more.
    assert {at for what, at in seen if what == "stop"} <= {"sealed", "artifacts"}
    assert seen.index(("stop", "sealed")) < seen.index(("stop", "artifacts"))


async def test_a_timeout_before_the_harness_runs_isnt_the_agents(bus: Bus, tmp_path: Path) -> None:
    made = kit.settings(tmp_path, gateway_slots=1, gateway_ready=1)
    limits = {"attempt_s": 1.5, "postrun_reserve_s": 0}
    slow = kit.script("true", name="slow", limits=limits, runtime={"prepare": [{"exec": "sleep 300"}]})
    async with kit.gateway(bus, made):
        blocking = await kit.release(bus, kit.script("sleep 4", name="blocking"))
        await kit.phase(bus, blocking, "running")
        waiting = await kit.release(bus, kit.script("true", name="waiting", limits=limits))
        preparing = await kit.release(bus, slow)
        for session, last in ((waiting, "ready"), (preparing, "claimed")):
            state = await kit.over(bus, session)
            exited = state.attempts[1].exited
            assert exited is not None
            assert (exited.timed_out, exited.fault, exited.cause) == (True, "infra", "queue_expired")
            assert kit.names(state)[-4:] == [last, "sealed", "exited", "artifacts"]
        assert (await kit.over(bus, blocking)).attempts[1].exited is not None


async def test_preparing_takes_no_longer_than_the_gateway_allows(bus: Bus, tmp_path: Path) -> None:
    spec = kit.script("true", runtime={"prepare": [{"exec": "sleep 300"}]})
    async with kit.gateway(bus, kit.settings(tmp_path, gateway_init_s=1)):
        exited = (await kit.over(bus, await kit.release(bus, spec))).attempts[1].exited
    assert exited is not None
    assert (exited.timed_out, exited.fault, exited.cause) == (True, "infra", "queue_expired")


async def test_an_engine_that_failed_is_infrastructure(bus: Bus, tmp_path: Path) -> None:
    spec = kit.script("while ! test -e go; do sleep 0.05; done; exit 1")
    async with kit.gateway(bus, kit.settings(tmp_path)):
        session = await kit.release(bus, spec)
        await kit.phase(bus, session, "running")
        await kit.completion(bus, session)
        await bus.once(
            CompletionAborted(
                session=session,
                attempt=1,
                completion="c2",
                dialect="openai-chat",
                stream=True,
                request_hash="h",
                reason="engine_error",
                detail="503 from the engine",
            )
        )
        (tmp_path / "run" / "attempts" / f"{session}.1" / "work" / "go").touch()
        exited = (await kit.over(bus, session)).attempts[1].exited
    assert exited is not None
    assert (exited.fault, exited.cause, exited.detail) == ("infra", "engine", "503 from the engine")


@pytest.mark.parametrize(("code", "captured"), [(1, False), (1, True), (0, True)])
async def test_a_full_context_is_the_agents_used_up_budget(bus: Bus, tmp_path: Path, code: int, captured: bool) -> None:
    """Whatever the program makes of it, and also where its first prompt was too long."""
    spec = kit.script(f"while ! test -e go; do sleep 0.05; done; exit {code}")
    async with kit.gateway(bus, kit.settings(tmp_path)):
        session = await kit.release(bus, spec)
        await kit.phase(bus, session, "running")
        if captured:
            await kit.completion(bus, session)
        refused = CompletionRejected(
            session=session, attempt=1, completion="c2", dialect="anthropic", status=400, reason="context_full",
            detail="12000 tokens of 8192",
        )  # fmt: skip
        await bus.once(refused)
        (tmp_path / "run" / "attempts" / f"{session}.1" / "work" / "go").touch()
        exited = (await kit.over(bus, session)).attempts[1].exited
    assert exited is not None
    assert (exited.fault, exited.cause, exited.exit_code) == ("agent", "limit", code)
    assert exited.detail == "the context window is full: 12000 tokens of 8192"


async def test_cancel_in_every_stage(bus: Bus, tmp_path: Path) -> None:
    made = kit.settings(tmp_path, gateway_slots=1, gateway_ready=1, gateway_init_slots=2)
    slow = {"prepare": [{"exec": "sleep 300"}]}
    async with kit.gateway(bus, made) as gateway:
        runs = await kit.release(bus, kit.script("sleep 300", name="runs"))
        await kit.phase(bus, runs, "running")
        waits = await kit.release(bus, kit.script("true", name="waits"))
        await kit.phase(bus, waits, "ready")
        prepares = await kit.release(bus, kit.script("true", name="prepares", runtime=slow))
        await kit.phase(bus, prepares, "claimed")
        for session, last in ((prepares, "claimed"), (waits, "ready"), (runs, "running")):
            await kit.cancel(bus, session)
            state = await kit.over(bus, session)
            attempt = state.attempts[1]
            assert attempt.exited is not None and attempt.sealed is not None
            assert (attempt.exited.cancelled, attempt.sealed.reason) == (True, "cancelled")
            assert kit.names(state)[-4:] == [last, "sealed", "exited", "artifacts"]
        assert await kit.idle(gateway)
        assert os.listdir(made.root) == []


async def test_what_was_cancelled_before_its_claim_is_left_alone(bus: Bus, tmp_path: Path) -> None:
    session = await kit.release(bus, kit.script("true"))
    await kit.cancel(bus, session)
    async with kit.gateway(bus, kit.settings(tmp_path)):
        later = await kit.release(bus, kit.script("true", name="later"))
        await kit.over(bus, later)
    assert (await kit.load(bus, session)).phase == "queued"


@pytest.mark.parametrize(
    ("harness", "cause", "told"),
    [
        (HarnessSpec(name="nobody"), "config", "unknown harness"),
        (HarnessSpec(name="command", args={"argv": ["no-such-program"]}), "missing", "no-such-program"),
        (HarnessSpec(name="command", args={"script": "echo last words >&2; exit 3"}), "crashed", "last words"),
        (HarnessSpec(name="command", args={"typo": "x"}), "config", "typo"),
        (HarnessSpec(name="tests.integration.gateway_kit:Broken"), "config", "boom"),
    ],
)
async def test_a_harness_that_doesnt_start_is_a_harness_fault(
    bus: Bus, tmp_path: Path, harness: HarnessSpec, cause: str, told: str
) -> None:
    spec = TaskSpec(id="t", instruction="do", harness=harness)
    async with kit.gateway(bus, kit.settings(tmp_path)):
        session = await kit.release(bus, spec)
        state = await kit.over(bus, session)
        other = await kit.release(bus, kit.script("true", name="other"))
        after = await kit.over(bus, other)
    exited = state.attempts[1].exited
    assert exited is not None
    assert (exited.fault, exited.cause) == ("harness", cause)
    assert told in exited.detail + exited.log_tail
    assert after.attempts[1].exited is not None and after.attempts[1].exited.fault == "none"


@pytest.mark.parametrize(
    ("text", "fault", "cause"),
    [
        ("exit 7", "none", ""),
        ("kill -9 $$", "none", ""),
        ('python3 -c "x = bytearray(200 << 20); print(len(x))"; exit 1', "agent", "resource_exhausted"),
    ],
)
async def test_after_the_first_completion_its_end_is_the_agents(
    bus: Bus, tmp_path: Path, text: str, fault: str, cause: str
) -> None:
    spec = kit.script(f"while ! test -e go; do sleep 0.05; done; {text}", runtime={"memory_mb": 64})
    houses: list[House] = []
    async with kit.gateway(bus, kit.settings(tmp_path), adapt=houses.append):
        session = await kit.release(bus, spec)
        await kit.phase(bus, session, "running")
        await kit.completion(bus, session)
        (tmp_path / "run" / "attempts" / f"{session}.1" / "work" / "go").touch()
        state = await kit.over(bus, session)
    exited = state.attempts[1].exited
    assert exited is not None
    assert (exited.fault, exited.cause) == (fault, cause), exited
    assert exited.exit_code != 0


async def test_a_failed_prepare_step_and_hostile_files(bus: Bus, tmp_path: Path) -> None:
    bad_step = kit.script("true", name="step", runtime={"prepare": [{"exec": "echo no rule; exit 2"}]})
    hostile = kit.script("true", name="hostile")
    async with kit.gateway(bus, kit.settings(tmp_path)):
        first = await kit.over(bus, await kit.release(bus, bad_step))
        archive = await Blobs(bus, "s1").put(kit.hostile_archive())
        second = await kit.over(bus, await kit.release(bus, hostile, files=archive))
    for state, cause in ((first, "prepare_failed"), (second, "config")):
        exited = state.attempts[1].exited
        assert exited is not None and (exited.fault, exited.cause, exited.exit_code) == ("harness", cause, None)
    assert "no rule" in first.attempts[1].exited.log_tail  # type: ignore[union-attr]


@pytest.mark.parametrize("folder", ["absent", "empty", "/etc", "../x"])
async def test_a_skill_that_isnt_there_is_told(bus: Bus, tmp_path: Path, folder: str) -> None:
    harness = HarnessSpec(name="tests.integration.gateway_kit:Skilled", args={"skills": [folder]})
    spec = TaskSpec(id="t", instruction="do", harness=harness, files={"empty/README": "x"})
    async with kit.gateway(bus, kit.settings(tmp_path)):
        state = await kit.over(bus, await kit.release(bus, spec))
    exited = state.attempts[1].exited
    assert exited is not None
    assert (exited.fault, exited.cause) == ("harness", "config"), exited
    assert "harness.args.skills" in exited.detail and folder in exited.detail


async def test_a_skill_is_in_its_place_when_the_harness_starts(bus: Bus, tmp_path: Path) -> None:
    harness = HarnessSpec(name="tests.integration.gateway_kit:Skilled", args={"skills": ["skills/pdf"]})
    files = {"skills/pdf/SKILL.md": "read it\n", "skills/pdf/more/a.txt": "a\n"}
    async with kit.gateway(bus, kit.settings(tmp_path)):
        session = await kit.release(bus, TaskSpec(id="t", instruction="do", harness=harness, files=files))
        state = await kit.over(bus, session)
    artifacts = state.attempts[1].artifacts
    assert artifacts is not None
    assert await body(bus, artifacts.answer) == "read it\na\n"
    assert artifacts.patch is None


async def test_a_host_without_a_runtime_is_infrastructure(bus: Bus, tmp_path: Path) -> None:
    def broken(house: House) -> None:
        house.make_runtime = kit.Unavailable

    async with kit.gateway(bus, kit.settings(tmp_path), adapt=broken):
        state = await kit.over(bus, await kit.release(bus, kit.script("true")))
    attempt = state.attempts[1]
    assert attempt.exited is not None and attempt.artifacts is not None
    assert (attempt.exited.fault, attempt.exited.cause) == ("infra", "image")
    assert kit.names(state)[-4:] == ["claimed", "sealed", "exited", "artifacts"]
    assert attempt.artifacts.patch is None


async def test_chosen_files_are_kept_without_the_key(bus: Bus, tmp_path: Path) -> None:
    text = "mkdir -p ~/logs out; echo $OPENAI_API_KEY > ~/logs/a.txt; echo hi > out/b.txt"
    spec = kit.script(text, artifacts=["out", "/home/agent/logs", "absent"])
    async with kit.gateway(bus, kit.settings(tmp_path)):
        state = await kit.over(bus, await kit.release(bus, spec))
    artifacts = state.attempts[1].artifacts
    assert artifacts is not None
    assert sorted(artifacts.files) == ["/home/agent/logs/a.txt", "out/b.txt"]
    assert "removed" in await body(bus, artifacts.files["/home/agent/logs/a.txt"])


async def test_a_configuration_is_told_by_all_that_the_harness_is_given_wherever_it_runs(
    bus: Bus, tmp_path: Path
) -> None:
    found = {}
    for isolation in ("auto", "none"):
        async with kit.gateway(bus, kit.settings(tmp_path, gateway_isolation=isolation)):
            for value in ("1", "2"):
                harness = HarnessSpec(name="command", args={"script": "true", "env": {"EFFORT": value}})
                spec = TaskSpec(id=f"{isolation}{value}", instruction="do", harness=harness)
                attempt = (await kit.over(bus, await kit.release(bus, spec))).attempts[1]
                assert attempt.initialized is not None
                found[isolation, value] = attempt.initialized.harness_config_hash
    assert found["auto", "1"] == found["none", "1"] != found["auto", "2"] == found["none", "2"]


async def test_what_is_told_of_a_harness_is_without_its_key(bus: Bus, tmp_path: Path) -> None:
    spec = kit.script('echo "$OPENAI_API_KEY"; echo "$OPENAI_API_KEY" >&2; exit 3')
    async with kit.gateway(bus, kit.settings(tmp_path)):
        attempt = (await kit.over(bus, await kit.release(bus, spec))).attempts[1]
    assert attempt.exited is not None and attempt.artifacts is not None
    log, answer = await body(bus, attempt.artifacts.log), await body(bus, attempt.artifacts.answer)
    told = (log, answer, attempt.exited.log_tail, attempt.exited.detail)
    assert [text.count("[session key removed]") for text in told] == [2, 1, 2, 1]


async def test_fifty_sessions_in_bounded_pools_leave_nothing(bus: Bus, tmp_path: Path) -> None:
    made = kit.settings(tmp_path, gateway_init_slots=3, gateway_ready=2, gateway_slots=4, gateway_postrun_slots=2)
    mark = new_id()
    seen: dict[str, int] = {}
    async with kit.gateway(bus, made) as gateway:
        pools = gateway.house.pools
        spec = kit.script(f": {mark}; echo done > x.txt; sleep 0.05", samples=50)
        sessions = [await kit.release(bus, spec, index=i) for i in range(50)]
        descriptors = len(os.listdir("/proc/self/fd"))

        async def watch() -> None:
            while True:
                for pool in (pools.init, pools.ready, pools.running, pools.postrun):
                    seen[pool.name] = max(seen.get(pool.name, 0), pool.used)
                await asyncio.sleep(0.01)

        watching = asyncio.ensure_future(watch())
        states = [await kit.over(bus, session, timeout=100) for session in sessions]
        watching.cancel()
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 5
        await asyncio.sleep(0.1)
        info = await bus.js.consumer_info("POLAR_EVENTS_s1", "gateway-local")
    assert all(s.attempts[1].exited is not None and s.attempts[1].exited.fault == "none" for s in states)
    assert len({s.attempts[1].initialized.harness_config_hash for s in states if s.attempts[1].initialized}) == 1
    assert (info.num_ack_pending, info.num_pending) == (0, 0)
    assert seen["init"] <= 3 and seen["ready"] <= 2 and seen["running"] <= 4 and seen["postrun"] <= 2
    assert (pools.init.used, pools.ready.used, pools.running.used, pools.postrun.used) == (0, 0, 0, 0)
    assert os.listdir(made.root) == []
    assert kit.running(mark) == []
