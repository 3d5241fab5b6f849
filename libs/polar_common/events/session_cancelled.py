"""A session ended because a user wanted it to."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import SessionEvent


class SessionCancelled(SessionEvent):
    kind: Literal["session.cancelled"] = "session.cancelled"
    last_attempt: int
    reason: str = ""

    def subject(self) -> str:
        return subjects.session(self.session, 0, "cancelled")
