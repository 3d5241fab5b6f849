"""A gateway took an attempt. Claimed once, it's never run again; the next attempt is."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime

from polar_common import subjects

from .base import SessionEvent


class SessionClaimed(SessionEvent):
    kind: Literal["session.claimed"] = "session.claimed"
    gateway: str
    attempt_deadline: AwareDatetime
    session_deadline: AwareDatetime
    queue_s: float = 0.0
    """Seconds from this attempt's release to its claim, by the log's clock."""

    def subject(self) -> str:
        return subjects.session(self.session, self.attempt, "claimed")
