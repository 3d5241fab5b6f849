"""The harness of an attempt was started."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import SessionEvent


class SessionRunning(SessionEvent):
    kind: Literal["session.running"] = "session.running"
    ready_s: float = 0.0
    """Seconds spent in the READY buffer."""

    def subject(self) -> str:
        return subjects.session(self.session, self.attempt, "running")
