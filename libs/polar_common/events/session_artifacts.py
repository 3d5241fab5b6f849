"""What an attempt left behind, as blobs."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects
from polar_common.packing import BlobRef

from .base import SessionEvent


class SessionArtifacts(SessionEvent):
    kind: Literal["session.artifacts"] = "session.artifacts"
    patch: BlobRef | None = None
    """Binary git diff of the working directory; None where nothing changed."""
    log: BlobRef | None = None
    """Capped standard output and error."""
    answer: BlobRef | None = None
    """Standard output alone."""
    files: dict[str, BlobRef] = {}
    postrun_s: float = 0.0
    """Seconds from the harness's end to here, waiting for a place included."""
    teardown_s: float = 0.0
    """Of them, for stopping and removing the runtime."""

    def subject(self) -> str:
        return subjects.session(self.session, self.attempt, "artifacts")
