"""A trainer published new weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from polar_common import subjects

from .base import Event


class PolicyPublished(Event):
    kind: Literal["policy.published"] = "policy.published"
    segment: str
    version: str
    policy_seq: Annotated[int, Field(ge=0)]
    """Orders versions; strictly growing per trainer."""
    model: str
    weights: str
    """Where engines load them from: a path or URI."""
    weights_hash: str = ""
    trainer: str = ""
    step: int = 0

    def subject(self) -> str:
        return subjects.policy(self.segment, self.version, "published")
