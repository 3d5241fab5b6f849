"""All sessions of a task are terminal and reconstructed, or the group's deadline passed."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from polar_common import subjects

from .base import Event
from .session_completed import Outcome


class GroupMember(BaseModel):
    """One session's end. `trainable` by EXACT §7; `reason` says why not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    session: str
    outcome: Outcome | None
    """None: not terminal at the deadline."""
    reward: float | None
    trainable: bool
    reason: str = ""
    attempts: int = 0
    evaluation: str = ""
    trace_rewards: dict[str, float] = {}


class GroupClosed(Event):
    """The fact; the trace stream's `closed` is its projection for a build."""

    kind: Literal["group.closed"] = "group.closed"
    agent_role: str = "main"
    expected: int
    terminal: int
    trainable: int
    by: Literal["complete", "deadline"]
    members: tuple[GroupMember, ...]

    def subject(self) -> str:
        return subjects.group(self.task)
