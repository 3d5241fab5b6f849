"""A session couldn't be turned into traces; the others of the build can."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import SessionEvent


class BuildFailed(SessionEvent):
    kind: Literal["build.failed"] = "build.failed"
    build: str
    rules_hash: str
    reason: str
    """Names the place: which completion, which column."""

    def subject(self) -> str:
        return subjects.build(self.build, self.session, "failed")
