"""A gateway's decisions as tables."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest

from polar_common.errors import (
    CommandFailed,
    ConfigError,
    HarnessError,
    ResourceExhausted,
    RuntimeFault,
    RuntimeUnavailable,
)
from polar_common.events import (
    Event,
    SessionAccepted,
    SessionArtifacts,
    SessionCancelled,
    SessionCancelRequested,
    SessionClaimed,
    SessionExited,
    SessionLost,
    SessionQueued,
    SessionSealed,
)
from polar_common.session_state import SessionState
from polar_common.task_spec import HarnessSpec, Limits, TaskSpec
from polar_gateway.domain import Evidence, HarnessSays, blame_init, deadlines, disposition, judge

AT = datetime(2026, 1, 1, tzinfo=UTC)
SID = "s1-abc-0"
SPEC = TaskSpec(id="t", instruction="do", harness=HarnessSpec(name="command"))


def state(*events: Event) -> SessionState:
    made, number = SessionState(SID), count(1)
    for event in events:
        made.apply(event, next(number), AT)
    return made


def queued(attempt: int = 1) -> SessionQueued:
    return SessionQueued(session=SID, attempt=attempt, work_class="local", spec=SPEC)


def claimed(attempt: int = 1) -> SessionClaimed:
    return SessionClaimed(session=SID, attempt=attempt, gateway="g", attempt_deadline=AT, session_deadline=AT)


ACCEPTED = SessionAccepted(session=SID, attempt=0, index=0, work_class="local")
SEALED = SessionSealed(session=SID, attempt=1, reason="exited")
EXITED = SessionExited(session=SID, attempt=1, exit_code=0)
ARTIFACTS = SessionArtifacts(session=SID, attempt=1)
LOST = SessionLost(session=SID, attempt=1)
CANCEL = SessionCancelRequested(session=SID, attempt=0)
CANCELLED = SessionCancelled(session=SID, attempt=0, last_attempt=1)


@pytest.mark.parametrize(
    ("events", "what"),
    [
        ((ACCEPTED,), "drop"),
        ((ACCEPTED, queued()), "claim"),
        ((ACCEPTED, queued(), CANCEL), "drop"),
        ((ACCEPTED, queued(), CANCEL, CANCELLED), "drop"),
        ((ACCEPTED, queued(), claimed()), "lose"),
        ((ACCEPTED, queued(), claimed(), CANCEL), "lose"),
        ((ACCEPTED, queued(), claimed(), SEALED), "lose"),
        ((ACCEPTED, queued(), claimed(), SEALED, EXITED), "resume"),
        ((ACCEPTED, queued(), claimed(), SEALED, EXITED, ARTIFACTS), "drop"),
        ((ACCEPTED, queued(), claimed(), LOST, SEALED), "drop"),
        ((ACCEPTED, queued(), claimed(), LOST, SEALED, queued(2)), "drop"),
        ((ACCEPTED, queued(), queued(2)), "drop"),
    ],
)
def test_what_a_delivery_means(events: tuple[Event, ...], what: str) -> None:
    assert disposition(state(*events), 1) == what


def test_the_second_attempt_is_claimed_whatever_became_of_the_first() -> None:
    assert disposition(state(ACCEPTED, queued(), claimed(), LOST, SEALED, queued(2)), 2) == "claim"


@pytest.mark.parametrize(
    ("limits", "session_in", "attempt_s", "harness_s"),
    [
        ({"session_s": 1000, "attempt_s": 400, "postrun_reserve_s": 60}, None, 400, 340),
        ({"session_s": 100, "attempt_s": 400, "postrun_reserve_s": 10}, None, 100, 90),
        ({"session_s": 1000, "attempt_s": 400, "postrun_reserve_s": 60}, 200, 200, 150),
        ({"session_s": 1000, "attempt_s": 8, "postrun_reserve_s": 60}, None, 8, 6),
        ({"session_s": 1000, "attempt_s": 400, "postrun_reserve_s": 0}, None, 400, 400),
        ({"session_s": 1000, "attempt_s": 400}, -5, -5, -5),
    ],
)
def test_deadlines(limits: dict[str, Any], session_in: float | None, attempt_s: float, harness_s: float) -> None:
    known = None if session_in is None else AT + timedelta(seconds=session_in)
    found = deadlines(Limits(**limits), AT, known)
    assert (found.attempt - AT).total_seconds() == attempt_s
    assert (found.harness - AT).total_seconds() == harness_s
    assert found.session == (known or AT + timedelta(seconds=limits["session_s"]))


ERROR = HarnessSays("harness_error", "it died")
BUDGET = HarnessSays("budget_exhausted", "context full")


@pytest.mark.parametrize(
    ("evidence", "fault", "cause"),
    [
        (Evidence(0), "none", ""),
        (Evidence(0, completions=True), "none", ""),
        (Evidence(1, completions=True, says=ERROR), "none", ""),
        (Evidence(137, completions=True, says=ERROR), "none", ""),
        (Evidence(1, says=ERROR), "harness", "crashed"),
        (Evidence(0, says=ERROR), "harness", "crashed"),
        (Evidence(127, says=ERROR), "harness", "missing"),
        (Evidence(126, says=ERROR), "harness", "missing"),
        (Evidence(127, says=ERROR, completions=True), "none", ""),
        (Evidence(1, says=BUDGET, completions=True), "agent", "limit"),
        (Evidence(0, says=BUDGET, completions=True), "agent", "limit"),
        (Evidence(1, says=BUDGET), "agent", "limit"),
        (Evidence(1, says=ERROR, used_up="9 of 8 tokens"), "agent", "limit"),
        (Evidence(0, completions=True, used_up="9 of 8 tokens"), "agent", "limit"),
        (Evidence(143, timed_out=True, completions=True, used_up="9 of 8 tokens"), "agent", "timeout"),
        (Evidence(137, exhausted="memory", completions=True, used_up="x"), "agent", "resource_exhausted"),
        (Evidence(143, timed_out=True, completions=True, says=ERROR), "agent", "timeout"),
        (Evidence(143, timed_out=True), "agent", "timeout"),
        (Evidence(137, exhausted="memory", completions=True), "agent", "resource_exhausted"),
        (Evidence(137, exhausted="memory"), "harness", "resource_exhausted"),
        (Evidence(None, broken="gone", completions=True), "agent", "environment_broken"),
        (Evidence(None, broken="gone"), "harness", "environment_broken"),
        (Evidence(None, unavailable="no daemon", completions=True), "infra", "daemon"),
        (Evidence(1, engine_failed="503", completions=True), "infra", "engine"),
        (Evidence(143, timed_out=True, engine_failed="503"), "infra", "engine"),
        (Evidence(0, timed_out=True, engine_failed="503"), "infra", "engine"),
        (Evidence(0, engine_failed="503", completions=True), "none", ""),
        (Evidence(None, refused="argv: NUL"), "harness", "config"),
    ],
)
def test_whose_fault_an_end_is(evidence: Evidence, fault: str, cause: str) -> None:
    verdict = judge(evidence)
    assert (verdict.fault, verdict.cause) == (fault, cause)


@pytest.mark.parametrize(
    ("error", "fault", "cause"),
    [
        (HarnessError("no such program"), "harness", "missing"),
        (ConfigError("unknown", "harness.name"), "harness", "config"),
        (ConfigError("outside", "files"), "harness", "config"),
        (ConfigError("no such directory", "proxy_socket"), "infra", "daemon"),
        (CommandFailed("make", 2, "no rule"), "harness", "prepare_failed"),
        (ResourceExhausted("too large", "disk"), "harness", "resource_exhausted"),
        (RuntimeUnavailable("no daemon"), "infra", "daemon"),
        (RuntimeUnavailable("no such image", "image"), "infra", "image"),
        (RuntimeFault("exists"), "infra", "daemon"),
        (OSError("disk full"), "infra", "daemon"),
    ],
)
def test_whose_fault_a_failed_preparation_is(error: Exception, fault: str, cause: str) -> None:
    verdict = blame_init(error)
    assert (verdict.fault, verdict.cause) == (fault, cause)
    assert str(error) in verdict.detail
