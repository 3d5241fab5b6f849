"""A user wants a session to end."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import SessionEvent


class SessionCancelRequested(SessionEvent):
    kind: Literal["session.cancel_requested"] = "session.cancel_requested"
    reason: str = ""

    def subject(self) -> str:
        return subjects.session(self.session, 0, "cancel_requested")
