"""A session as its events tell it: a pure fold, the same for every service that reads one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from . import subjects
from .bus.client import Bus
from .bus.read import Stored
from .events import (
    BuildReconstructed,
    EvaluationEvaluated,
    Event,
    SessionAccepted,
    SessionArtifacts,
    SessionCancelled,
    SessionCancelRequested,
    SessionClaimed,
    SessionCompleted,
    SessionEvent,
    SessionExited,
    SessionFailed,
    SessionInitialized,
    SessionLost,
    SessionQueued,
    SessionReady,
    SessionRunning,
    SessionSealed,
)

__all__ = ["Attempt", "SessionState", "fold", "newest_state"]


@dataclass(slots=True)
class Attempt:
    """One execution. Fields are None until their event is there; `*_at` is the log's own time."""

    number: int
    queued: SessionQueued | None = None
    claimed: SessionClaimed | None = None
    initialized: SessionInitialized | None = None
    ready: SessionReady | None = None
    running: SessionRunning | None = None
    sealed: SessionSealed | None = None
    exited: SessionExited | None = None
    artifacts: SessionArtifacts | None = None
    lost: SessionLost | None = None
    at: dict[str, datetime] = field(default_factory=dict)
    """Event name → log time."""

    @property
    def over(self) -> bool:
        """Nothing more will come from its gateway."""
        return self.lost is not None or self.artifacts is not None


@dataclass(slots=True)
class SessionState:
    """`last_seq` is the fence for the next transition."""

    session: str
    accepted: SessionAccepted | None = None
    accepted_at: datetime | None = None
    cancel: SessionCancelRequested | None = None
    attempts: dict[int, Attempt] = field(default_factory=dict)
    end: SessionCompleted | SessionFailed | SessionCancelled | None = None
    last_seq: int = 0

    @property
    def terminal(self) -> bool:
        return self.end is not None

    @property
    def last_attempt(self) -> Attempt | None:
        return self.attempts[max(self.attempts)] if self.attempts else None

    @property
    def first_claim_at(self) -> datetime | None:
        times = [a.at["claimed"] for a in self.attempts.values() if "claimed" in a.at]
        return min(times) if times else None

    @property
    def phase(self) -> str:
        """For people: the name of the newest fact."""
        if self.end is not None:
            return self.end.kind.removeprefix("session.")
        attempt = self.last_attempt
        if attempt is None:
            return "accepted" if self.accepted else "unknown"
        for name in ("lost", "artifacts", "exited", "sealed", "running", "ready", "initialized", "claimed"):
            if getattr(attempt, name) is not None:
                return name
        return "queued"

    def apply(self, event: Event, sequence: int, time: datetime) -> None:
        """Fold one event of this session. Events of other kinds (evaluations, builds) don't move the fence."""
        if not isinstance(event, SessionEvent) or isinstance(event, EvaluationEvaluated | BuildReconstructed):
            return
        name = event.kind.partition(".")[2]
        if not event.kind.startswith("session."):
            return
        self.last_seq = max(self.last_seq, sequence)
        if isinstance(event, SessionAccepted):
            self.accepted, self.accepted_at = event, time
        elif isinstance(event, SessionCancelRequested):
            self.cancel = event
        elif isinstance(event, SessionCompleted | SessionFailed | SessionCancelled):
            self.end = event
        else:
            attempt = self.attempts.setdefault(event.attempt, Attempt(event.attempt))
            setattr(attempt, name, event)
            attempt.at[name] = time


def fold(session: str, stored: Iterable[Stored]) -> SessionState:
    """The state told by a session's messages (completions among them are skipped undecoded)."""
    state = SessionState(session)
    for message in stored:
        if ".completion." not in message.subject:
            state.apply(message.event, message.sequence, message.time)
    return state


async def newest_state(bus: Bus, session: str) -> SessionState:
    """A session, at least up to the last transition that the log's leader has. Raises Unavailable."""
    newest = await bus.last(subjects.session_filter(session))
    wanted = newest.sequence if newest is not None else 0
    return fold(session, await bus.read_session(session, completions=False, at_least=wanted))
