"""The scheduler's decisions as a table: what the log says, and what must follow."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from ingest_log import MemoryLog

from polar_common.events import BuildFailed, GroupClosed, SessionQueued
from polar_ingest.domain import Cancel, CloseGroup, Complete, Fail, Queue, Rules, member
from polar_ingest.entries import Session, Task
from polar_ingest.views import summary_of

Made = tuple[MemoryLog, Task, Session]


def made(rules: Rules | None = None, **fields: object) -> Made:
    log = MemoryLog(rules or Rules())
    task = log.accept(**fields)  # type: ignore[arg-type]
    return log, task, log.session(task)


def _lost(log: MemoryLog, s: Session) -> None:
    log.start(s)
    log.lose(s)


def _infra(log: MemoryLog, s: Session) -> None:
    log.start(s)
    log.exit(s, fault="infra", cause="image", detail="no such image")


def _harness(log: MemoryLog, s: Session) -> None:
    log.start(s)
    log.exit(s, fault="harness", cause="missing", log_tail="command not found")


def _timed_out(log: MemoryLog, s: Session) -> None:
    log.start(s)
    log.exit(s, fault="agent", cause="timeout", timed_out=True)
    log.evaluate(s, "budget_exhausted", 0.0)


def _evaluated(log: MemoryLog, s: Session) -> None:
    log.start(s)
    log.exit(s)
    log.evaluate(s)


def _cancel_waiting(log: MemoryLog, s: Session) -> None:
    log.cancel(s)


def _cancel_queued(log: MemoryLog, s: Session) -> None:
    log.queue(s)
    log.cancel(s)


def _cancel_obeyed(log: MemoryLog, s: Session) -> None:
    log.start(s)
    log.cancel(s)
    log.exit(s, cancelled=True)


def _cancel_then_lost(log: MemoryLog, s: Session) -> None:
    log.start(s)
    log.cancel(s)
    log.lose(s)


def _cancel_too_late(log: MemoryLog, s: Session) -> None:
    _evaluated(log, s)
    log.cancel(s)


def _cancel_in_postrun(log: MemoryLog, s: Session) -> None:
    log.start(s)
    log.exit(s)
    log.cancel(s)


@pytest.mark.parametrize(
    ("story", "later", "expected"),
    [
        (_evaluated, 0, Complete("passed", 1.0, "live")),
        (_timed_out, 0, Complete("budget_exhausted", 0.0, "live")),
        (_harness, 0, Fail("harness_error", "missing", "command not found")),
        (_lost, 1, Queue(2)),
        (_infra, 1, Queue(2)),
        (_cancel_waiting, 0, Cancel("enough")),
        (_cancel_queued, 0, Cancel("enough")),
        (_cancel_obeyed, 0, Cancel("enough")),
        (_cancel_then_lost, 0, Cancel("enough")),
        (_cancel_in_postrun, 0, Cancel("enough")),
        (_cancel_too_late, 0, Complete("passed", 1.0, "live")),
    ],
    ids=lambda v: v.__name__ if callable(v) else None,
)
def test_what_follows(story: Callable[[MemoryLog, Session], None], later: float, expected: object) -> None:
    log, _, session = made()
    story(log, session)
    log.now += later
    assert log.decide(session) == expected


@pytest.mark.parametrize("story", [lambda log, s: None, lambda log, s: log.queue(s)], ids=["waiting", "queued"])
def test_who_isnt_claimed_in_time_fails(story: Callable[[MemoryLog, Session], None]) -> None:
    log, _, session = made(limits={"queue_s": 100})
    story(log, session)
    assert log.decide(session) == log.now + 100
    log.now += 100
    assert log.decide(session) == Fail("infra_error", "queue_expired", "not claimed within 100 s")


def test_a_running_session_is_left_alone_until_its_owner_is_hopelessly_silent() -> None:
    log, _, session = made(Rules(owner_grace_s=50), limits={"session_s": 200})
    log.start(session)
    assert log.decide(session) == log.now + 250
    log.now += 249
    assert isinstance(log.decide(session), float)
    log.now += 1
    assert log.decide(session) == Fail("infra_error", "owner_silent", "attempt 1: nothing after `claimed`")


def test_a_silent_owner_of_a_cancelled_session() -> None:
    log, _, session = made(Rules(owner_grace_s=50), limits={"session_s": 200})
    log.start(session)
    log.cancel(session)
    assert isinstance(log.decide(session), float)
    log.now += 250
    assert log.decide(session) == Cancel("enough")


def test_artifacts_without_an_evaluation_wait_for_it_then_fail() -> None:
    log, _, session = made(Rules(evaluation_patience_s=500), evaluator={"command": "true", "timeout_s": 100})
    log.start(session)
    log.exit(session)
    assert log.decide(session) == log.now + 600
    log.now += 600
    found = log.decide(session)
    assert isinstance(found, Fail)
    assert (found.outcome, found.cause) == ("infra_error", "owner_silent")


def test_a_good_exit_waits_for_its_artifacts() -> None:
    log, _, session = made()
    log.start(session)
    log.exit(session, artifacts=False)
    log.now += 100
    assert isinstance(log.decide(session), float)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"fault": "infra", "cause": "daemon"}, Queue(2)),
        ({"fault": "harness"}, Fail("harness_error", "harness", "")),
        ({"cancelled": True}, Cancel("")),
    ],
)
def test_a_bad_exit_waits_only_a_moment_for_its_artifacts(fields: dict[str, object], expected: object) -> None:
    log, _, session = made(Rules(exited_patience_s=15))
    log.start(session)
    log.exit(session, artifacts=False, **fields)
    assert log.decide(session) == log.now + 15
    log.now += 15
    assert log.decide(session) == expected


def test_attempts_run_out() -> None:
    log, _, session = made(Rules(retry_delay_s=0), limits={"attempts": 2})
    for _ in range(2):
        log.start(session)
        log.lose(session)
    found = log.decide(session)
    assert isinstance(found, Fail)
    assert (found.outcome, found.cause, found.detail) == ("infra_error", "node_lost", "attempt 2 of 2")


def test_retries_back_off() -> None:
    log, _, session = made(Rules(retry_delay_s=4), limits={"attempts": 5})
    for wait in (4, 8, 16):
        log.start(session)
        log.lose(session)
        assert log.decide(session) == log.now + wait
        log.now += wait
        assert log.decide(session) == Queue(session.attempt + 1)


def test_no_attempt_starts_that_cant_have_its_minimum() -> None:
    log, _, session = made(limits={"session_s": 100, "attempt_min_s": 10})
    log.start(session)
    log.now += 89
    log.lose(session)
    log.now += 1
    assert log.decide(session) == Queue(2)
    log.now += 0.5
    found = log.decide(session)
    assert isinstance(found, Fail)
    assert (found.cause, found.detail) == ("node_lost", "no time is left for another attempt")


def test_a_second_attempt_carries_the_session_deadline_and_expires_at_it() -> None:
    log, _, session = made(Rules(retry_delay_s=0), limits={"session_s": 100})
    log.start(session)
    claimed = log.log_time
    log.lose(session)
    log.end(session)
    queued = log.events[-1]
    assert isinstance(queued, SessionQueued)
    assert queued.session_deadline is not None
    assert (queued.attempt, (queued.session_deadline - claimed).total_seconds()) == (2, 100)
    log.now += 100
    found = log.decide(session)
    assert isinstance(found, Fail)
    assert found.cause == "queue_expired"


def test_facts_of_dead_attempts_change_nothing() -> None:
    log, _, session = made(Rules(retry_delay_s=0))
    log.start(session)
    log.exit(session, fault="infra", artifacts=False)
    log.now += 15
    log.end(session)
    late = log.about(session, 1)
    from polar_common.events import EvaluationEvaluated, SessionArtifacts

    before = session.seq
    log.put(SessionArtifacts(**late))
    log.put(EvaluationEvaluated(**late, evaluator="e", outcome="passed", reward=1.0))
    assert (session.phase, session.attempt, session.evaluation) == ("queued", 2, None)
    assert session.seq == before + 1


def test_the_end_is_the_end() -> None:
    log, _, session = made()
    _evaluated(log, session)
    log.end(session)
    log.cancel(session)
    log.now += 1e9
    assert log.decide(session) == math.inf


def test_poison_ends_a_session_unless_it_was_evaluated() -> None:
    log, _, session = made()
    log.world.poison(session.id, "gateway-local: Poison: bad", attempt=1)
    assert isinstance(log.decide(session), float)
    log.queue(session)
    log.world.poison(session.id, "gateway-local: Poison: bad", attempt=1)
    assert log.decide(session) == Fail("infra_error", "poison", "gateway-local: Poison: bad")
    log, _, session = made()
    _evaluated(log, session)
    log.world.poison(session.id, "evaluator: late", attempt=1)
    assert isinstance(log.decide(session), Complete)


# -- groups


def test_a_group_waits_for_every_end_and_every_build() -> None:
    log, task, first = made(samples=2)
    second = log.session(task, 1)
    for session in (first, second):
        _evaluated(log, session)
        log.end(session)
    log.build(first)
    assert isinstance(log.group(task), float)
    log.build(second)
    assert log.group(task) == CloseGroup("complete")
    log.close(task)
    closed = log.events[-1]
    assert isinstance(closed, GroupClosed)
    assert (closed.expected, closed.terminal, closed.trainable, closed.by) == (2, 2, 2, "complete")
    assert not log.world.tasks
    assert not log.world.sessions


def test_a_group_closes_at_its_deadline_with_what_there_is() -> None:
    log, task, first = made(samples=2, limits={"group_s": 50, "queue_s": 1000})
    _evaluated(log, first)
    log.end(first)
    log.build(first)
    assert log.group(task) == log.now + 50
    log.now += 50
    log.close(task)
    closed = log.events[-1]
    assert isinstance(closed, GroupClosed)
    assert [(m.outcome, m.reason) for m in closed.members] == [("passed", ""), (None, "not_terminal")]
    assert (closed.terminal, closed.trainable, closed.by) == (1, 1, "deadline")
    assert log.group(task) == math.inf
    log.cancel(log.session(task, 1))
    log.end(log.session(task, 1))
    assert not log.world.tasks


@pytest.mark.parametrize(
    ("story", "traces", "excluded", "outcome", "reason"),
    [
        (_evaluated, 1, None, "passed", ""),
        (_timed_out, 1, None, "budget_exhausted", ""),
        (_evaluated, 0, None, "passed", "no_calls"),
        (_evaluated, 0, {"c1": "greedy"}, "passed", "all_excluded"),
        (_harness, 1, None, "harness_error", "harness_error"),
        (_cancel_waiting, 0, None, "cancelled", "cancelled"),
    ],
    ids=["passed", "truncated", "no calls", "excluded", "harness", "cancelled"],
)
def test_what_may_be_trained(
    story: Callable[[MemoryLog, Session], None],
    traces: int,
    excluded: dict[str, str] | None,
    outcome: str,
    reason: str,
) -> None:
    log, _, session = made()
    story(log, session)
    log.end(session)
    log.build(session, traces, excluded)
    found = member(session)
    assert (found.outcome, found.reason, found.trainable) == (outcome, reason, not reason)


@pytest.mark.parametrize(("calls", "reason"), [(1, ""), (0, "no_calls")])
def test_no_action_is_trained_if_the_model_was_asked(calls: int, reason: str) -> None:
    log, _, session = made()
    log.start(session)
    log.exit(session)
    log.evaluate(session, "no_action", 0.0)
    log.end(session)
    log.build(session, calls)
    assert member(session).reason == reason


def test_what_couldnt_be_reconstructed_isnt_trained() -> None:
    log, task, session = made()
    _evaluated(log, session)
    log.end(session)
    log.put(BuildFailed(**log.about(session), build="live", rules_hash="0" * 64, reason="c1: column is short"))
    assert member(session).reason == "build_failed"
    assert log.group(task) == CloseGroup("complete")


def test_a_dead_reconstruction_doesnt_hold_up_its_group() -> None:
    log, task, session = made()
    _evaluated(log, session)
    log.end(session)
    log.world.poison(session.id, "reconstructor-live: boom", build=True)
    assert (member(session).reason, log.group(task)) == ("build_failed", CloseGroup("complete"))


def test_trace_rewards_travel_with_the_group() -> None:
    log, _, session = made()
    log.start(session)
    log.exit(session)
    log.evaluate(session, trace_rewards={"c1": 0.5})
    log.end(session)
    log.build(session)
    assert member(session).trace_rewards == {"c1": 0.5}


def test_an_evaluation_that_failed_is_no_reward_anywhere() -> None:
    log, _, session = made()
    log.start(session)
    log.exit(session)
    log.evaluate(session, "infra_error", None)
    assert log.decide(session) == Complete("infra_error", None, "live")
    log.end(session)
    assert summary_of(session).cause == "evaluation"
    assert log.world.runs["r"].rewards == 0
    assert (member(session).reward, member(session).trainable, member(session).reason) == (None, False, "infra_error")
