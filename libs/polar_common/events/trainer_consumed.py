"""A trainer took groups into an update. Follows the save of the checkpoint that contains it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from polar_common import subjects

from .base import Event


class ConsumedTrace(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    trace: str
    session: str
    policy_seq: int
    """Oldest version that sampled in this trace."""


class TrainerConsumed(Event):
    kind: Literal["trainer.consumed"] = "trainer.consumed"
    segment: str
    trainer: str
    epoch: int
    step: int
    build: str
    policy_version: str
    policy_seq: int
    """The trainer's version when it used the traces."""
    groups: tuple[str, ...]
    traces: tuple[ConsumedTrace, ...]

    def subject(self) -> str:
        return subjects.trainer(self.segment, self.trainer, self.epoch, self.step, "consumed")
