"""From an evaluator's verdict and the way the attempt ended to an outcome and a reward; pure."""

from __future__ import annotations

from polar_common.events import SessionExited
from polar_common.events.session_completed import Outcome
from polar_common.session_state import SessionState

from .evaluators.base import Verdict

__all__ = ["outcome_of", "reward_of", "wanted"]


def wanted(state: SessionState, attempt: int) -> bool:
    """Whether an attempt's artifacts are to be evaluated: it ran to an end of its own or its agent's, not by a
    cancel, and no later attempt replaced it."""
    current = state.attempts.get(attempt)
    if state.terminal or current is None or max(state.attempts) > attempt:
        return False
    exited = current.exited
    return exited is not None and exited.fault in ("none", "agent") and not exited.cancelled


def outcome_of(exited: SessionExited, verdict: Verdict, *, acted: bool) -> Outcome:
    """`acted`: there is a patch or an answer. Passing counts however the attempt ended."""
    if verdict.passed:
        return "passed"
    if exited.timed_out or exited.cause in ("timeout", "limit"):
        return "budget_exhausted"
    return "failed" if acted or exited.fault == "agent" else "no_action"


def reward_of(verdict: Verdict) -> float:
    """The evaluator's own, else 1 or 0."""
    if verdict.reward is not None:
        return verdict.reward
    return 1.0 if verdict.passed else 0.0
