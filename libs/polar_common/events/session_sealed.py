"""No completion after this belongs to the attempt. Published before the runtime is stopped."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import SessionEvent


class SessionSealed(SessionEvent):
    kind: Literal["session.sealed"] = "session.sealed"
    reason: Literal["exited", "timeout", "cancelled", "lost", "limit", "failed"]

    def subject(self) -> str:
        return subjects.session(self.session, self.attempt, "sealed")
