"""A captured answer didn't reach the harness: its connection was gone before the end."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import SessionEvent


class CompletionUndelivered(SessionEvent):
    kind: Literal["completion.undelivered"] = "completion.undelivered"
    completion: str
    detail: str = ""

    def subject(self) -> str:
        return subjects.completion(self.session, self.attempt, self.completion, "undelivered")
