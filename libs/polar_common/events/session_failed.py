"""A session ended without an evaluation."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import SessionEvent


class SessionFailed(SessionEvent):
    kind: Literal["session.failed"] = "session.failed"
    last_attempt: int
    """0 where no attempt was ever released."""
    outcome: Literal["harness_error", "infra_error"]
    cause: str = ""
    detail: str = ""

    def subject(self) -> str:
        return subjects.session(self.session, 0, "failed")
