"""A session exists and waits for release."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import SessionEvent


class SessionAccepted(SessionEvent):
    kind: Literal["session.accepted"] = "session.accepted"
    index: int
    """Which of the task's samples, from 0."""
    work_class: str

    def subject(self) -> str:
        return subjects.session(self.session, 0, "accepted")
