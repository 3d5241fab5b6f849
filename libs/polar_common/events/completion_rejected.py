"""A call was refused without asking the engine: sealed key, limit, malformed, too long for the window."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import SessionEvent


class CompletionRejected(SessionEvent):
    kind: Literal["completion.rejected"] = "completion.rejected"
    completion: str
    dialect: str
    status: int
    reason: str
    detail: str = ""

    def subject(self) -> str:
        return subjects.completion(self.session, self.attempt, self.completion, "rejected")
