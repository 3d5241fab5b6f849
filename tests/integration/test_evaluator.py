"""The evaluator with a real log and real clean copies: from `artifacts` to `evaluated`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gateway_kit as kit
import pytest

from polar_common import subjects
from polar_common.blobs import Blobs
from polar_common.bus import Bus, Worker
from polar_common.errors import RuntimeUnavailable
from polar_common.events import (
    EvaluationEvaluated,
    SessionArtifacts,
    SessionCancelled,
    SessionClaimed,
    SessionEvent,
    SessionExited,
    SessionLost,
    SessionRunning,
    now,
)
from polar_common.nats_server import NatsServer
from polar_common.task_spec import TaskSpec
from polar_common.topology import Topology, consumers
from polar_evaluator.handlers import Evaluations
from polar_evaluator.settings import EvaluatorSettings
from polar_runtime import RuntimeSpec, make_runtime, pack_files

pytestmark = pytest.mark.nats
EVALUATOR = next(c for c in consumers(Topology()) if c.durable == "evaluator")


def task(evaluator: dict[str, Any], **fields: Any) -> TaskSpec:
    return kit.script("true", evaluator=evaluator, **fields)


@asynccontextmanager
async def evaluator(bus: Bus, tmp_path: Path, **options: Any) -> AsyncIterator[Evaluations]:
    made = Evaluations(bus, EvaluatorSettings(data=tmp_path), **options)
    stop = asyncio.Event()
    worker = Worker(bus, EVALUATOR, made.on_artifacts, 4)
    working = asyncio.ensure_future(worker.run(stop))
    try:
        yield made
    finally:
        stop.set()
        await worker.abandon()
        await asyncio.gather(working, return_exceptions=True)


async def ended(
    bus: Bus, spec: TaskSpec, *, answer: bytes = b"", patch: bytes = b"", attempt: int = 1, **exited: Any
) -> str:
    """A session whose gateway has done its work."""
    session = await kit.release(bus, spec, attempt=attempt)
    about: dict[str, Any] = {"session": session, "attempt": attempt}
    at = (await kit.load(bus, session)).last_seq
    claimed = SessionClaimed(**about, gateway="g", attempt_deadline=now(), session_deadline=now())
    at = (await bus.transition(claimed, at)).sequence
    at = (await bus.transition(SessionExited(**about, **({"exit_code": 0} | exited)), at)).sequence
    blobs = Blobs(bus, "s1")
    artifacts = SessionArtifacts(
        **about,
        answer=await blobs.put(answer) if answer else None,
        patch=await blobs.put(patch) if patch else None,
    )
    await bus.transition(artifacts, at)
    return session


async def evaluated(bus: Bus, session: str, attempt: int = 1, timeout: float = 30.0) -> EvaluationEvaluated:
    async with asyncio.timeout(timeout):
        while True:
            found = await bus.last(subjects.evaluation(session, attempt, "live", "evaluated"))
            if found is not None:
                assert isinstance(found.event, EvaluationEvaluated)
                return found.event
            await asyncio.sleep(0.03)


async def patch_of(tmp_path: Path, spec: TaskSpec, script: str) -> bytes:
    """What an agent that runs `script` leaves."""
    files = {path: text.encode() for path, text in spec.files.items()}
    made = RuntimeSpec(kind="local", label="patching.1", root=tmp_path / "patching", network="none")
    async with make_runtime(made) as runtime:
        await runtime.upload(pack_files(files))
        await runtime.snapshot()
        await runtime.check(["/bin/sh", "-c", script])
        return await runtime.diff()


async def test_exit_code_and_answer_decide(bus: Bus, tmp_path: Path) -> None:
    check = {"command": 'test "$POLAR_ANSWER" = yes && cmp -n 3 "$POLAR_ANSWER_FILE" given.txt'}
    good = task(check, name="good", files={"given.txt": "yes"})
    bad = task(check, name="bad", files={"given.txt": "yes"})
    async with evaluator(bus, tmp_path) as evaluations:
        first, second = await ended(bus, good, answer=b"yes"), await ended(bus, bad, answer=b"no")
        passed, failed = await evaluated(bus, first), await evaluated(bus, second)
        assert evaluations.copies.live == set()
    assert (passed.outcome, passed.reward, passed.exit_code) == ("passed", 1.0, 0)
    assert (failed.outcome, failed.reward, failed.exit_code) == ("failed", 0.0, 1)
    assert os.listdir(tmp_path / "run" / "evaluations") == []


@pytest.mark.parametrize("answer", [bytes(range(128, 256)) * 4000, b"\0" * 500_000, "é€🦓".encode() * 50_000])
async def test_any_bytes_may_be_an_answer(bus: Bus, tmp_path: Path, answer: bytes) -> None:
    """An environment variable holds text, and less of it; the file holds it all."""
    check = {"command": f'test "$(wc -c < "$POLAR_ANSWER_FILE")" = {len(answer)} && test ${{#POLAR_ANSWER}} -le 100000'}
    async with evaluator(bus, tmp_path):
        verdict = await evaluated(bus, await ended(bus, task(check), answer=answer))
    assert verdict.outcome == "passed", verdict


async def test_the_patch_is_applied_to_a_clean_copy_and_our_files_win(bus: Bus, tmp_path: Path) -> None:
    spec = task(
        {"command": "sh test.sh", "files": {"test.sh": "grep -q fixed code.txt && grep -q made prepared.txt"}},
        files={"code.txt": "broken\n"},
        runtime={"prepare": [{"exec": "echo made > prepared.txt"}]},
    )
    cheating = "echo fixed > code.txt; echo 'exit 0' > test.sh"
    async with evaluator(bus, tmp_path):
        session = await ended(bus, spec, patch=await patch_of(tmp_path, spec, cheating))
        assert (await evaluated(bus, session)).outcome == "passed"
        fake = task(spec.evaluator.model_dump(), name="fake", files={"code.txt": "broken\n"}, runtime=spec.runtime)
        session = await ended(bus, fake, patch=await patch_of(tmp_path, fake, "echo 'exit 0' > test.sh"))
        assert (await evaluated(bus, session)).outcome == "failed"


async def test_a_reward_file_sets_the_reward_and_the_agents_own_is_removed(bus: Bus, tmp_path: Path) -> None:
    writes = task({"command": "echo '{\"reward\": 0.25}' > r.json", "reward_file": "r.json"}, name="writes")
    forged = task({"command": "test ! -e r.json", "reward_file": "r.json"}, name="forged")
    crashes = task({"command": "exit 3", "reward_file": "r.json"}, name="crashes")
    async with evaluator(bus, tmp_path):
        first = await evaluated(bus, await ended(bus, writes, answer=b"x"))
        assert (first.outcome, first.reward) == ("passed", 0.25)
        patch = await patch_of(tmp_path, forged, "echo 1000 > r.json")
        second = await evaluated(bus, await ended(bus, forged, patch=patch), timeout=90)
        assert (second.outcome, second.reward) == ("infra_error", None)
        third = await evaluated(bus, await ended(bus, crashes, answer=b"x"))
        assert (third.outcome, third.reward, third.exit_code) == ("failed", 0.0, 3)


async def test_timeouts_and_floods_fail_with_a_reason(bus: Bus, tmp_path: Path) -> None:
    slow = task({"command": "sleep 60", "timeout_s": 0.5}, name="slow")
    flood = task({"command": "head -c 30000000 /dev/zero | tr '\\0' x; exit 1"}, name="flood")
    async with evaluator(bus, tmp_path):
        first, second = await ended(bus, slow, answer=b"x"), await ended(bus, flood, answer=b"x")
        late, loud = await evaluated(bus, first), await evaluated(bus, second)
    assert (late.outcome, "timed out" in late.detail) == ("failed", True)
    assert loud.outcome == "failed"
    assert loud.log is not None and loud.log.size < 3 << 20


@pytest.mark.parametrize(
    ("exited", "answer", "outcome"),
    [
        ({}, b"", "no_action"),
        ({}, b"something", "failed"),
        ({"timed_out": True, "fault": "agent", "cause": "timeout"}, b"", "budget_exhausted"),
        ({"fault": "agent", "cause": "limit"}, b"x", "budget_exhausted"),
        ({"fault": "agent", "cause": "environment_broken", "exit_code": None}, b"", "failed"),
    ],
)
async def test_outcomes_of_those_that_dont_pass(
    bus: Bus, tmp_path: Path, exited: dict[str, Any], answer: bytes, outcome: str
) -> None:
    async with evaluator(bus, tmp_path):
        session = await ended(bus, task({"command": "false"}), answer=answer, **exited)
        assert (await evaluated(bus, session)).outcome == outcome


async def test_passing_counts_even_after_a_timeout(bus: Bus, tmp_path: Path) -> None:
    async with evaluator(bus, tmp_path):
        session = await ended(bus, task({"command": "true"}), timed_out=True, fault="agent", cause="timeout")
        assert (await evaluated(bus, session)).outcome == "passed"


async def test_faults_of_harness_and_infrastructure_and_cancels_arent_evaluated(bus: Bus, tmp_path: Path) -> None:
    spec = [task({"command": "true"}, name=n) for n in "abcd"]
    async with evaluator(bus, tmp_path):
        ignored = [
            await ended(bus, spec[0], fault="harness", cause="crashed"),
            await ended(bus, spec[1], fault="infra", cause="daemon"),
            await ended(bus, spec[2], cancelled=True),
        ]
        await evaluated(bus, await ended(bus, spec[3], answer=b"x"))
        for session in ignored:
            assert await bus.last(subjects.evaluation(session, 1, "live", "evaluated")) is None
        info = await bus.js.consumer_info(EVALUATOR.stream, EVALUATOR.durable)
        assert info.num_pending == 0


async def test_a_misspelt_evaluator_ends_the_session_at_once(bus: Bus, tmp_path: Path) -> None:
    async with evaluator(bus, tmp_path):
        event = await evaluated(bus, await ended(bus, task({"kind": "comand", "command": "true"}), answer=b"x"))
    assert (event.outcome, event.details["cause"]) == ("infra_error", "config")
    assert "command" in event.detail


async def test_an_unusable_host_is_tried_again(bus: Bus, tmp_path: Path) -> None:
    tries: list[str] = []

    def flaky(spec: RuntimeSpec) -> Any:
        tries.append(spec.label)
        if len(tries) < 3:
            raise RuntimeUnavailable("no daemon")
        return make_runtime(spec)

    async with evaluator(bus, tmp_path, make=flaky):
        event = await evaluated(bus, await ended(bus, task({"command": "true"}), answer=b"x"))
    assert (event.outcome, len(tries)) == ("passed", 3)


async def test_the_first_evaluation_counts(bus: Bus, tmp_path: Path) -> None:
    session = await ended(bus, task({"command": "true"}), answer=b"x")
    first = EvaluationEvaluated(session=session, attempt=1, evaluator="other", outcome="failed", reward=0.0)
    await bus.once(first)
    async with evaluator(bus, tmp_path):
        other = await evaluated(bus, await ended(bus, task({"command": "true"}, name="later"), answer=b"x"))
        assert other.outcome == "passed"
        assert (await evaluated(bus, session)).evaluator == "other"


SQUARE = {"prompt": "def square(x):\n", "test": "def check(f):\n    assert f(3) == 9\n", "entry_point": "square"}


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"    return x * x\n", "passed"),
        (b"Here:\n```python\ndef square(x):\n    return x ** 2\n```\nDone.", "passed"),
        (b"```python\ndef square(x):\n    return x\n```", "failed"),
        (b"import os\nos._exit(0)\ndef square(x): return 9", "failed"),
        (b"import sys\ndef square(x): sys.exit(0)", "failed"),
        (b"", "no_action"),
    ],
)
async def test_humaneval_runs_candidates_in_the_sandbox(bus: Bus, tmp_path: Path, answer: bytes, outcome: str) -> None:
    async with evaluator(bus, tmp_path):
        event = await evaluated(bus, await ended(bus, task({"kind": "humaneval", "args": SQUARE}), answer=answer))
    assert event.outcome == outcome, event.detail


async def test_humaneval_reads_a_file(bus: Bus, tmp_path: Path) -> None:
    spec = task({"kind": "humaneval", "args": {**SQUARE, "file": "solution.py"}})
    async with evaluator(bus, tmp_path):
        patch = await patch_of(tmp_path, spec, "printf 'def square(x):\\n  return x*x\\n' > solution.py")
        assert (await evaluated(bus, await ended(bus, spec, patch=patch))).outcome == "passed"


@pytest.mark.parametrize(
    ("args", "answer", "outcome"),
    [
        ({"expected": "Paris"}, b" Paris\n", "passed"),
        ({"expected": "Paris"}, b"It is Paris.", "failed"),
        ({"expected": ["Rome", "paris"], "mode": "contains", "ignore_case": True}, b"It is PARIS.", "passed"),
        ({"expected": r"\b4[0-9]\b", "mode": "regex"}, b"so 42 it is", "passed"),
        ({"expected": r"^42$", "mode": "regex"}, b"so 42 it is", "failed"),
    ],
)
async def test_expected_answers(bus: Bus, tmp_path: Path, args: dict[str, Any], answer: bytes, outcome: str) -> None:
    async with evaluator(bus, tmp_path):
        event = await evaluated(bus, await ended(bus, task({"kind": "answer", "args": args}), answer=answer))
    assert event.outcome == outcome


async def test_a_clean_copy_is_made_while_the_agent_runs_and_used_once(bus: Bus, tmp_path: Path) -> None:
    made: list[str] = []

    def counting(spec: RuntimeSpec) -> Any:
        made.append(spec.label)
        return make_runtime(spec)

    prepare = [{"exec": "echo prepared > p.txt"}]
    warm = {"command": "grep -q prepared p.txt", "prewarm": True, "prepare": prepare}
    sessions = {name: await started(bus, task(warm, name=name)) for name in ("used", "lost")}
    plain = await started(bus, task({"command": "true"}, name="plain"))
    async with evaluator(bus, tmp_path, make=counting) as evaluations:
        following = asyncio.ensure_future(evaluations.prewarmed.follow())
        await asyncio.sleep(0.3)
        for session in (plain, *sessions.values()):
            await advance(bus, session, SessionRunning(session=session, attempt=1))
        async with asyncio.timeout(10):
            while len(made) < 2:
                await asyncio.sleep(0.02)
        await advance(bus, sessions["used"], SessionExited(session=sessions["used"], attempt=1, exit_code=0))
        await advance(bus, sessions["used"], SessionArtifacts(session=sessions["used"], attempt=1))
        event = await evaluated(bus, sessions["used"])
        await advance(bus, sessions["lost"], SessionLost(session=sessions["lost"], attempt=1))
        async with asyncio.timeout(10):
            while evaluations.copies.live:
                await asyncio.sleep(0.02)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert (event.outcome, len(made)) == ("passed", 2)
    assert os.listdir(tmp_path / "run" / "evaluations") == []


async def test_a_cancelled_session_is_evaluated_no_further(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> None:
    root = tmp_path / "run" / "evaluations"
    with kit.process(nats_server.url, tmp_path, "polar_evaluator", evaluator_slots=1):
        slow = await ended(bus, task({"command": "sleep 100"}, name="slow"), answer=b"x")
        async with asyncio.timeout(10):
            while not root.is_dir() or not os.listdir(root):
                await asyncio.sleep(0.02)
        await advance(bus, slow, SessionCancelled(session=slow, attempt=0, last_attempt=1))
        async with asyncio.timeout(10):
            while os.listdir(root):
                await asyncio.sleep(0.02)
        next_one = await ended(bus, task({"command": "true"}, name="next"), answer=b"x")
        assert (await evaluated(bus, next_one)).outcome == "passed"
    assert await bus.last(subjects.evaluation(slow, 1, "live", "evaluated")) is None


async def test_the_process_evaluates_reaps_and_stops_cleanly(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> None:
    done = await ended(bus, task({"command": "true"}), answer=b"x")
    root = tmp_path / "run" / "evaluations"
    (root / f"{done}.1.leftover").mkdir(parents=True)
    with kit.process(nats_server.url, tmp_path, "polar_evaluator", evaluator_reap_s=0.2) as process:
        assert (await evaluated(bus, done)).outcome == "passed"
        async with asyncio.timeout(10):
            while os.listdir(root):
                await asyncio.sleep(0.05)
        slow = await ended(bus, task({"command": "sleep 2"}, name="slow"), answer=b"x")
        async with asyncio.timeout(10):
            while not os.listdir(root):
                await asyncio.sleep(0.02)
        process.terminate()
        assert await asyncio.to_thread(process.wait, 20) == 0
    assert (await evaluated(bus, slow)).outcome == "passed"
    assert os.listdir(root) == []


async def started(bus: Bus, spec: TaskSpec) -> str:
    session = await kit.release(bus, spec)
    claimed = SessionClaimed(session=session, attempt=1, gateway="g", attempt_deadline=now(), session_deadline=now())
    await advance(bus, session, claimed)
    return session


async def advance(bus: Bus, session: str, event: SessionEvent) -> None:
    await bus.transition(event, (await kit.load(bus, session)).last_seq)
