"""A gateway's decisions, as pure functions: what to do with delivered work, how long it may take, and who is to blame.

Sources: the attempt rules and deadlines of the log's design; whose fault an end is follows "after the first completion
a fault confined to the session's own limits is the agent's".
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from polar_common.errors import CommandFailed, ConfigError, HarnessError, ResourceExhausted, RuntimeUnavailable
from polar_common.events.session_exited import Fault
from polar_common.session_state import SessionState
from polar_common.task_spec import Limits

__all__ = [
    "Deadlines", "Disposition", "Ending", "Evidence", "HarnessSays", "SealReason", "Verdict", "blame_init", "deadlines",
    "disposition", "judge",
]  # fmt: skip

Disposition = Literal["claim", "resume", "lose", "drop"]
SealReason = Literal["exited", "timeout", "cancelled", "lost", "limit", "failed"]


def disposition(state: SessionState, attempt: int) -> Disposition:
    """What the receiver of an attempt's `queued` does.

    claim: nobody has it. resume: it ended, only its artifacts are missing. lose: its owner is gone; it is never run
    again. drop: nothing is left to do.
    """
    current = state.attempts.get(attempt)
    if state.terminal or current is None or max(state.attempts) > attempt or current.over:
        return "drop"
    if current.claimed is None:
        # The scheduler ends what is cancelled before its claim.
        return "drop" if state.cancel is not None else "claim"
    return "resume" if current.exited is not None else "lose"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """In the log's time."""

    session: datetime
    attempt: datetime
    harness: datetime
    """Earlier than the attempt's by the reserve for POSTRUN."""


_RESERVE_SHARE = 0.25


def deadlines(limits: Limits, claimed: datetime, session_deadline: datetime | None) -> Deadlines:
    """Deadlines of an attempt claimed at `claimed`; `session_deadline` is known from the second attempt on.

    The reserve is `postrun_reserve_s`, but never more than a quarter of the attempt's time.
    """
    session = session_deadline or claimed + timedelta(seconds=limits.session_s)
    attempt = min(claimed + timedelta(seconds=limits.attempt_s), session)
    span = max(0.0, (attempt - claimed).total_seconds())
    reserve = min(limits.postrun_reserve_s, span * _RESERVE_SHARE)
    return Deadlines(session, attempt, attempt - timedelta(seconds=reserve))


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended; becomes `exited`."""

    exit_code: int | None = None
    timed_out: bool = False
    cancelled: bool = False
    fault: Fault = "none"
    cause: str = ""
    detail: str = ""
    log_tail: str = ""
    run_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HarnessSays:
    """The adapter's reading of exit code and output."""

    kind: Literal["finished", "budget_exhausted", "harness_error"] = "finished"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known when a harness has ended. `completions`: at least one was captured. `engine_failed`: the last
    model call of the attempt was ended by the engine, `used_up`: it didn't fit into the window, or one was beyond the
    session's own limits; why, as the proxy recorded."""

    exit_code: int | None
    timed_out: bool = False
    exhausted: str = ""
    broken: str = ""
    """The runtime itself failed under the harness: its message."""
    unavailable: str = ""
    """The host's daemon or image did: its message."""
    refused: str = ""
    """The launch makes no sense: why."""
    completions: bool = False
    engine_failed: str = ""
    used_up: str = ""
    says: HarnessSays = HarnessSays()


@dataclass(frozen=True, slots=True)
class Verdict:
    fault: Fault
    cause: str = ""
    detail: str = ""


def judge(evidence: Evidence) -> Verdict:
    """On whose side the end was.

    What the agent can bring about (exit codes, output, its own container) never makes an attempt vanish once a
    completion was captured: otherwise crashing would be a way not to lose. `infra` rests on evidence outside.
    """
    e = evidence
    if e.refused:
        return Verdict("harness", "config", e.refused)
    if e.unavailable:
        return Verdict("infra", "daemon", e.unavailable)
    if e.engine_failed and (e.timed_out or e.exit_code != 0):
        return Verdict("infra", "engine", e.engine_failed)
    if e.timed_out:
        return Verdict("agent", "timeout", "the attempt's time is used up")
    own_limit = _own_limit(e)
    if own_limit is not None:
        return own_limit if e.completions else Verdict("harness", own_limit.cause, own_limit.detail)
    if e.used_up:
        # Some programs end with 0 all the same, and some were too long from the start; none does better next time.
        return Verdict("agent", "limit", e.used_up)
    if e.says.kind == "budget_exhausted":
        return Verdict("agent", "limit", e.says.reason + ("" if e.completions else ", before its first model call"))
    if not e.completions and e.exit_code in (126, 127):
        return Verdict("harness", "missing", e.says.reason)
    if not e.completions and (e.exit_code != 0 or e.says.kind == "harness_error"):
        return Verdict("harness", "crashed", e.says.reason or f"ended with {e.exit_code} before its first model call")
    return Verdict("none", "", e.says.reason)


def _own_limit(e: Evidence) -> Verdict | None:
    if e.exhausted:
        return Verdict("agent", "resource_exhausted", f"{e.exhausted} limit reached")
    if e.broken:
        return Verdict("agent", "environment_broken", e.broken)
    return None


_OURS = ("proxy_socket", "runtime.proxy_socket", "runtime.root", "secret")
"""Settings of the house, which no task can have caused to be wrong."""


def blame_init(error: BaseException) -> Verdict:
    """Whose fault it is that an attempt couldn't be prepared; no agent has run yet."""
    detail = str(error) or repr(error)
    match error:
        case HarnessError():
            return Verdict("harness", "missing", detail)
        case ConfigError() if error.where not in _OURS:
            return Verdict("harness", "config", detail)
        case CommandFailed():
            return Verdict("harness", "prepare_failed", detail)
        case ResourceExhausted():
            return Verdict("harness", "resource_exhausted", detail)
        case RuntimeUnavailable():
            return Verdict("infra", error.cause, detail)
    return Verdict("infra", "daemon", detail)
