"""An attempt is released to gateways: this event is the work itself."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime

from polar_common import subjects
from polar_common.packing import BlobRef
from polar_common.task_spec import TaskSpec

from .base import SessionEvent


class SessionQueued(SessionEvent):
    kind: Literal["session.queued"] = "session.queued"
    work_class: str
    spec: TaskSpec
    """All a gateway needs; files are in the blob."""
    files: BlobRef | None = None
    session_deadline: AwareDatetime | None = None
    """Set from the second attempt on: counted from the first claim."""

    def subject(self) -> str:
        return subjects.session(self.session, self.attempt, "queued", self.work_class)
