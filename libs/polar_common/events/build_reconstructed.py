"""One session was turned into traces under one build."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import SessionEvent


class BuildReconstructed(SessionEvent):
    """Published after the session's manifest."""

    kind: Literal["build.reconstructed"] = "build.reconstructed"
    build: str
    rules: str
    rules_hash: str
    manifest_hash: str
    traces: int
    trained_completions: int
    excluded: dict[str, str]
    """Completion id → reason."""
    sampled_tokens: int
    exact_spans: int
    drifted_spans: int
    ambiguous: int = 0
    chain_classes: dict[str, int] = {}
    """Why traces begin where they do → traces: where there are many, this tells the cause."""
    drift: dict[str, int] = {}
    """Class of drift → trained spans."""

    def subject(self) -> str:
        return subjects.build(self.build, self.session, "reconstructed")
