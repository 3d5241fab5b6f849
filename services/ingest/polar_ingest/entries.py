"""What is remembered of a task, a session and a run. Instants (`*_at`) are seconds of the local monotonic clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime

from polar_common.events import (
    BuildFailed,
    BuildReconstructed,
    EvaluationEvaluated,
    SessionCancelled,
    SessionCancelRequested,
    SessionCompleted,
    SessionExited,
    SessionFailed,
    SessionLost,
)
from polar_common.task_spec import Limits

__all__ = ["End", "RunCounts", "Session", "Task", "cause_of", "outcome_of"]

End = SessionCompleted | SessionFailed | SessionCancelled


@dataclass(slots=True)
class Task:
    """One group."""

    id: str
    user_id: str
    run: str
    order: int
    """Sequence of its `accepted`."""
    accepted_at: float
    limits: Limits
    work_class: str
    priority: int
    evaluator_timeout_s: float
    sessions: tuple[str, ...]
    opened: bool = False
    """A session of it has been released."""
    closed: bool = False
    live: int = 0
    """Sessions not terminal."""
    unbuilt: int = 0
    """Sessions not reconstructed, nor known to be impossible to reconstruct."""


@dataclass(slots=True)
class Session:
    """One session. `seq` is its fence."""

    id: str
    task: str
    work_class: str
    index: int
    seq: int
    accepted_at: float
    phase: str = "accepted"
    phase_at: float = 0.0
    attempt: int = 0
    first_claim_at: float | None = None
    first_claim_time: datetime | None = None
    exited: SessionExited | None = None
    lost: SessionLost | None = None
    evaluation: EvaluationEvaluated | None = None
    build: BuildReconstructed | BuildFailed | None = None
    end: End | None = None
    cancel: SessionCancelRequested | None = None
    poison: str = ""
    build_poison: str = ""
    frozen: bool = False
    """A newer version wrote one of its facts: nothing is decided until this service is upgraded."""

    @property
    def built(self) -> bool:
        return self.build is not None or bool(self.build_poison)

    @property
    def bucket(self) -> str:
        """Where it counts for admission: waiting, queued, active, postrun, retry or ended."""
        if self.end is not None:
            return "ended"
        if self.attempt == 0:
            return "waiting"
        if self.phase == "queued":
            return "queued"
        if self.phase == "lost" or (self.exited is not None and self.exited.fault == "infra"):
            return "retry"
        return "postrun" if self.exited is not None else "active"


@dataclass(slots=True)
class RunCounts:
    """What stays of a run when its sessions are forgotten."""

    name: str
    tasks: int = 0
    sessions: int = 0
    attempts: int = 0
    lost: int = 0
    groups_closed: int = 0
    trainable: int = 0
    traces: int = 0
    sampled_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reward_sum: float = 0.0
    rewards: int = 0


def cause_of(end: End | None) -> str:
    """Why a session wasn't judged; empty where it was, or has none."""
    return end.cause if isinstance(end, SessionCompleted | SessionFailed) else ""


def outcome_of(end: End) -> str:
    """A terminal event's outcome."""
    return "cancelled" if isinstance(end, SessionCancelled) else end.outcome
