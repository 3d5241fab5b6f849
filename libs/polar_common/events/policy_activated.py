"""One engine replica samples with a new version."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import Event


class PolicyActivated(Event):
    kind: Literal["policy.activated"] = "policy.activated"
    segment: str
    version: str
    policy_seq: int
    replica: str
    update_s: float = 0.0
    mode: Literal["drain", "in_flight"] = "in_flight"

    def subject(self) -> str:
        return subjects.policy(self.segment, self.version, "activated", self.replica)
