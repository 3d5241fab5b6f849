"""A session ended and was evaluated, whatever the outcome."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from polar_common import subjects

from .base import SessionEvent, Upcaster

Outcome = Literal["passed", "failed", "no_action", "budget_exhausted", "harness_error", "infra_error", "cancelled"]


def reward_may_be_none(body: dict[str, Any]) -> dict[str, Any]:
    """From version 1, which had a number always."""
    return {**body, "schema_version": 2}


class SessionCompleted(SessionEvent):
    """`attempt` is 0 as in all session-wide facts; `last_attempt` is the one that counts."""

    VERSION: ClassVar[int] = 2
    UPCASTERS: ClassVar[dict[int, Upcaster]] = {1: reward_may_be_none}
    kind: Literal["session.completed"] = "session.completed"
    schema_version: Annotated[int, Field(ge=1)] = 2
    last_attempt: int
    outcome: Outcome
    reward: float | None
    """None where the evaluation failed: that is no reward, and never a 0."""
    evaluation: str

    @property
    def cause(self) -> str:
        """As of a failed session: here only the evaluation may have failed."""
        return "evaluation" if self.outcome == "infra_error" else ""

    def subject(self) -> str:
        return subjects.session(self.session, 0, "completed")
