"""The runtime of an attempt exists and is prepared."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import SessionEvent


class SessionInitialized(SessionEvent):
    kind: Literal["session.initialized"] = "session.initialized"
    runtime: str
    isolation: str
    """What separates the harness from the host: `bubblewrap`, `docker`, `apptainer`, `none`."""
    harness: str
    harness_version: str
    harness_config_hash: str
    """sha256 over argv, environment names and files the adapter produced."""
    init_s: float

    def subject(self) -> str:
        return subjects.session(self.session, self.attempt, "initialized")
