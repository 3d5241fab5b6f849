"""The scheduler's decisions: pure functions of what the log says and of an instant.

`decide` says what must happen to a session now, or when to look again; `decide_group` the same for a group; `release`
picks the sessions that gateways get next. Every decision is published behind the session's fence or as a fact that may
happen once, by `scheduler.py`; of several schedulers that decide at once, one wins.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from polar_common.events import BuildFailed, GroupMember, Outcome, SessionCancelled, SessionCompleted, SessionFailed

from .entries import Session, Task
from .state import World

__all__ = [
    "Cancel", "CloseGroup", "Complete", "Decision", "Fail", "Queue", "Rules", "decide", "decide_group", "member",
    "release",
]  # fmt: skip

_TRAINABLE = ("passed", "failed", "budget_exhausted", "no_action")


@dataclass(frozen=True, slots=True)
class Rules:
    """Patience and bounds, in seconds and sessions. See `settings.py` for what each is for."""

    release_ahead: int = 64
    postrun_bound: int = 64
    retry_delay_s: float = 1.0
    exited_patience_s: float = 15.0
    owner_grace_s: float = 300.0
    evaluation_patience_s: float = 1800.0
    obey_demand: bool = False


@dataclass(frozen=True, slots=True)
class Queue:
    """Release an attempt to gateways."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Evaluated, whatever the outcome."""

    outcome: Outcome
    reward: float | None
    evaluation: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Ended without an evaluation."""

    outcome: Literal["harness_error", "infra_error"]
    cause: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CloseGroup:
    by: Literal["complete", "deadline"]


Decision = Queue | Complete | Fail | Cancel


def decide(session: Session, task: Task, now: float, rules: Rules) -> Decision | float:
    """What must happen to the session now, or the instant at which to ask again (inf: only after another event).

    The first release isn't decided here: it is a matter between sessions (`release`).
    """
    if session.end is not None or session.frozen:
        return math.inf
    if session.poison:
        return Fail("infra_error", "poison", session.poison)
    if session.bucket in ("waiting", "queued"):
        return _unclaimed(session, task, now)
    if session.exited is None and session.lost is None:
        return _silent(session, task, now, rules)
    return _ended_attempt(session, task, now, rules)


def _unclaimed(session: Session, task: Task, now: float) -> Decision | float:
    if session.cancel is not None:
        return Cancel(session.cancel.reason)
    if session.first_claim_at is None:
        limit, detail = session.accepted_at + task.limits.queue_s, f"not claimed within {task.limits.queue_s:g} s"
    else:
        limit = session.first_claim_at + task.limits.session_s
        detail = f"attempt {session.attempt} wasn't claimed before the session's deadline"
    return Fail("infra_error", "queue_expired", detail) if now >= limit else limit


def _silent(session: Session, task: Task, now: float, rules: Rules) -> Decision | float:
    """The last resort. Much earlier, redelivery has another gateway publish `lost`."""
    claimed_at = session.phase_at if session.first_claim_at is None else session.first_claim_at
    limit = claimed_at + task.limits.session_s + rules.owner_grace_s
    if now < limit:
        return limit
    if session.cancel is not None:
        return Cancel(session.cancel.reason)
    return Fail("infra_error", "owner_silent", f"attempt {session.attempt}: nothing after `{session.phase}`")


def _ended_attempt(session: Session, task: Task, now: float, rules: Rules) -> Decision | float:
    """The attempt has exited or was lost."""
    exited, over = session.exited, session.phase in ("artifacts", "lost")
    evaluated = session.evaluation
    if exited is not None and exited.fault in ("none", "agent") and session.lost is None:
        if over and evaluated is not None and evaluated.attempt == session.attempt:
            return Complete(evaluated.outcome, evaluated.reward, evaluated.evaluation)
        if not exited.cancelled and session.cancel is None:
            return _unevaluated(session, task, now, rules) if over else _silent(session, task, now, rules)
    patience = session.phase_at + rules.exited_patience_s
    if not over and now < patience:
        return patience
    if session.cancel is not None or (exited is not None and exited.cancelled):
        return Cancel(session.cancel.reason if session.cancel is not None else "")
    if exited is not None and exited.fault == "harness" and session.lost is None:
        return Fail("harness_error", exited.cause or "harness", exited.detail or exited.log_tail[-500:])
    return _again(session, task, now, rules)


def _unevaluated(session: Session, task: Task, now: float, rules: Rules) -> Decision | float:
    limit = session.phase_at + task.evaluator_timeout_s + rules.evaluation_patience_s
    if now < limit:
        return limit
    return Fail("infra_error", "owner_silent", f"no evaluation within {limit - session.phase_at:g} s of the artifacts")


def _again(session: Session, task: Task, now: float, rules: Rules) -> Decision | float:
    """An infrastructure fault: the next attempt, if attempts and time remain."""
    cause: str
    if session.lost is not None:
        cause, detail = session.lost.cause or "node_lost", session.lost.detail
    else:
        assert session.exited is not None
        cause, detail = session.exited.cause or "daemon", session.exited.detail
    if session.attempt >= task.limits.attempts:
        return Fail("infra_error", cause, _and(detail, f"attempt {session.attempt} of {task.limits.attempts}"))
    # Beyond 2^6 the delay would outlast most sessions.
    at = session.phase_at + rules.retry_delay_s * 2 ** min(session.attempt - 1, 6)
    claimed_at = session.phase_at if session.first_claim_at is None else session.first_claim_at
    if max(now, at) + task.limits.attempt_min_s > claimed_at + task.limits.session_s:
        return Fail("infra_error", cause, _and(detail, "no time is left for another attempt"))
    return Queue(session.attempt + 1) if now >= at else at


def _and(detail: str, more: str) -> str:
    return f"{detail}; {more}" if detail else more


def decide_group(task: Task, now: float) -> CloseGroup | float:
    """Close a group when all its sessions are terminal and reconstructed, or at its deadline."""
    if task.closed:
        return math.inf
    if task.live == 0 and task.unbuilt == 0:
        return CloseGroup("complete")
    limit = task.accepted_at + task.limits.group_s
    return CloseGroup("deadline") if now >= limit else limit


def member(session: Session) -> GroupMember:
    """How a session stands in its group, and whether its traces may be trained."""
    end, evaluation = session.end, session.evaluation
    if end is None:
        outcome: Outcome | None = None
    elif isinstance(end, SessionCancelled):
        outcome = "cancelled"
    else:
        outcome = end.outcome
    completed = isinstance(end, SessionCompleted)
    reason = _untrainable(session, outcome)
    return GroupMember(
        session=session.id,
        outcome=outcome,
        reward=end.reward if isinstance(end, SessionCompleted) else None,
        trainable=not reason,
        reason=reason,
        attempts=session.attempt,
        evaluation=end.evaluation if isinstance(end, SessionCompleted) else "",
        trace_rewards=evaluation.trace_rewards if completed and evaluation is not None else {},
    )


def _untrainable(session: Session, outcome: Outcome | None) -> str:
    """Why a session's traces may not be trained; empty where they may."""
    if outcome is None:
        return "not_terminal"
    if outcome not in _TRAINABLE:
        return outcome
    if isinstance(session.end, SessionFailed):
        return "not_evaluated"
    if isinstance(session.build, BuildFailed) or session.build_poison:
        return "build_failed"
    if session.build is None:
        return "not_reconstructed"
    if session.build.traces == 0:
        return "no_calls" if not session.build.excluded else "all_excluded"
    return ""


def release(world: World, rules: Rules) -> list[str]:
    """Sessions whose first attempt may be queued now, in order. They are taken out of the waiting queues."""
    if world.buckets["postrun"] >= rules.postrun_bound:
        return []
    taken: list[str] = []
    opening: set[str] = set()
    flight = world.demands.in_flight() if rules.obey_demand else Counter[str]()

    def may_open(task: str) -> bool:
        if not rules.obey_demand or task in opening or world.tasks[task].opened:
            return True
        run = world.tasks[task].run
        if not world.demands.room(run, flight):
            return False
        opening.add(task)
        flight[run] += 1
        return True

    for work_class, queue in world.queues.items():
        free = rules.release_ahead - world.unclaimed[work_class]
        if free > 0:
            taken += queue.take(free, is_waiting=world.is_waiting, may_open=may_open)
    return taken
