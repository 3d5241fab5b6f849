"""A session ended and was evaluated, whatever the outcome."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import SessionEvent

Outcome = Literal["passed", "failed", "no_action", "budget_exhausted", "harness_error", "infra_error", "cancelled"]


class SessionCompleted(SessionEvent):
    """`attempt` is 0 as in all session-wide facts; `last_attempt` is the one that counts."""

    kind: Literal["session.completed"] = "session.completed"
    last_attempt: int
    outcome: Outcome
    reward: float
    evaluation: str

    def subject(self) -> str:
        return subjects.session(self.session, 0, "completed")
