"""Artifacts became an outcome and a reward."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from polar_common import subjects
from polar_common.packing import BlobRef

from .base import SessionEvent, Upcaster
from .session_completed import Outcome, reward_may_be_none


class EvaluationEvaluated(SessionEvent):
    """`evaluation` is `live` for the one that counts; later ones have names of their own and alter nothing."""

    VERSION: ClassVar[int] = 2
    UPCASTERS: ClassVar[dict[int, Upcaster]] = {1: reward_may_be_none}
    kind: Literal["evaluation.evaluated"] = "evaluation.evaluated"
    schema_version: Annotated[int, Field(ge=1)] = 2
    evaluation: str = "live"
    evaluator: str
    outcome: Outcome
    reward: float | None
    """None where nothing was judged, because the evaluation itself failed."""
    trace_rewards: dict[str, float] = {}
    """By completion id, where the evaluator scores single traces or steps."""
    exit_code: int | None = None
    detail: str = ""
    log: BlobRef | None = None
    details: dict[str, Any] = {}
    eval_s: float = 0.0

    def subject(self) -> str:
        return subjects.evaluation(self.session, self.attempt, self.evaluation, "evaluated")
