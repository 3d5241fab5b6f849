"""From an evaluator's verdict and the way the attempt ended to an outcome and a reward; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

import orjson

from polar_common.events import SessionExited
from polar_common.events.session_completed import Outcome
from polar_common.session_state import SessionState

from .evaluators.base import Verdict

__all__ = ["moot", "outcome_of", "reward_of", "unusable", "wanted"]


def wanted(state: SessionState, attempt: int) -> bool:
    """Whether an attempt's artifacts are to be evaluated: it ran to an end of its own or its agent's, not by a
    cancel, and no later attempt replaced it."""
    current = state.attempts.get(attempt)
    if state.terminal or current is None or max(state.attempts) > attempt:
        return False
    exited = current.exited
    return exited is not None and exited.fault in ("none", "agent") and not exited.cancelled


def moot(state: SessionState, attempt: int) -> bool:
    """Whether nobody will evaluate an attempt any more, evaluated or not."""
    current = state.attempts[attempt]
    if current.exited is None:
        return state.terminal or max(state.attempts) > attempt or current.lost is not None
    return not wanted(state, attempt)


def unusable(verdict: object) -> str:
    """What an evaluator returned where it should have been a verdict that can be recorded; empty for a good one."""
    if not isinstance(verdict, Verdict):
        return f"a {type(verdict).__name__} and not a Verdict"
    if not isinstance(verdict.passed, bool):
        return f"`passed` that is neither true nor false: {verdict.passed!r}"
    if verdict.reward is not None and not _finite(verdict.reward):
        return f"a reward that is no finite number: {verdict.reward!r}"
    scored = verdict.trace_rewards
    if not isinstance(scored, Mapping) or not all(isinstance(k, str) and _finite(v) for k, v in scored.items()):
        return "trace_rewards that don't map completions to finite numbers"
    if not isinstance(verdict.detail, str) or not isinstance(verdict.log, bytes):
        return "a detail that isn't a text, or a log that isn't bytes"
    if verdict.exit_code is not None and not isinstance(verdict.exit_code, int):
        return f"an exit code that is no number: {verdict.exit_code!r}"
    try:
        orjson.dumps(dict(verdict.details))
    except (TypeError, ValueError) as error:
        return f"details that aren't JSON: {error}"
    return ""


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
