"""Artifacts became an outcome and a reward."""

from __future__ import annotations

from typing import Any, Literal

from polar_common import subjects
from polar_common.packing import BlobRef

from .base import SessionEvent
from .session_completed import Outcome


class EvaluationEvaluated(SessionEvent):
    """`evaluation` is `live` for the one that counts; later ones have names of their own and alter nothing."""

    kind: Literal["evaluation.evaluated"] = "evaluation.evaluated"
    evaluation: str = "live"
    evaluator: str
    outcome: Outcome
    reward: float
    trace_rewards: dict[str, float] = {}
    """By completion id, where the evaluator scores single traces or steps."""
    exit_code: int | None = None
    detail: str = ""
    log: BlobRef | None = None
    details: dict[str, Any] = {}
    eval_s: float = 0.0

    def subject(self) -> str:
        return subjects.evaluation(self.session, self.attempt, self.evaluation, "evaluated")
