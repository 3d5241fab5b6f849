"""A task was taken in."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects
from polar_common.packing import BlobRef
from polar_common.task_spec import TaskSpec

from .base import Event


class TaskAccepted(Event):
    """Published in one batch with the `accepted` of each of its sessions."""

    kind: Literal["task.accepted"] = "task.accepted"
    spec: TaskSpec
    """What was submitted, without `files` (they are in the blob)."""
    spec_hash: str
    """sha256 of the canonical submitted body; the same id with another hash is a conflict."""
    files: BlobRef | None = None
    """Deterministic tar of the task's files."""
    sessions: tuple[str, ...]

    def subject(self) -> str:
        return subjects.task(self.task, "accepted")
