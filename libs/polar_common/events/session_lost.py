"""The owner of an attempt is gone. Published in one batch with the attempt's `sealed`."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import SessionEvent
from .session_exited import InfraCause


class SessionLost(SessionEvent):
    kind: Literal["session.lost"] = "session.lost"
    cause: InfraCause = "node_lost"
    detail: str = ""

    def subject(self) -> str:
        return subjects.session(self.session, self.attempt, "lost")
