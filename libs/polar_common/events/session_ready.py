"""A prepared attempt waits in the READY buffer."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import SessionEvent


class SessionReady(SessionEvent):
    kind: Literal["session.ready"] = "session.ready"

    def subject(self) -> str:
        return subjects.session(self.session, self.attempt, "ready")
