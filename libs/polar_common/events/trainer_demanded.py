"""A trainer says how many groups it wants and how stale they may be; admission obeys."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import Event


class TrainerDemanded(Event):
    kind: Literal["trainer.demanded"] = "trainer.demanded"
    segment: str
    trainer: str
    epoch: int
    number: int
    groups: int
    """Groups wanted in flight."""
    staleness: int
    """Versions a trace may lag behind when it is consumed: nothing opens while engines lag further behind already."""

    def subject(self) -> str:
        return subjects.trainer(self.segment, self.trainer, self.epoch, self.number, "demanded")
