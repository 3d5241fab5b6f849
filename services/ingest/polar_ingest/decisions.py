"""Decisions as events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from polar_common.errors import BusError
from polar_common.events import (
    Event,
    GroupClosed,
    SessionCancelled,
    SessionCompleted,
    SessionEvent,
    SessionFailed,
    SessionQueued,
    TaskAccepted,
    now,
)

from .domain import Cancel, CloseGroup, Complete, Decision, Fail, Queue, member
from .entries import Session, Task

__all__ = ["Applied", "applied", "group_event", "session_event"]


@dataclass(slots=True)
class Applied:
    """A message that this process has just published, as the fold wants it."""

    subject: str
    sequence: int
    time: datetime
    event: Event


def applied(event: Event, sequence: int) -> Applied:
    return Applied(event.subject(), sequence, now(), event)


def session_event(session: Session, task: Task, decision: Decision, accepted: TaskAccepted | None) -> SessionEvent:
    """The transition that a decision means. `accepted` is needed for `Queue`."""
    about = {"run": task.run, "task": task.id, "session": session.id}
    cancel = session.cancel.event_id if session.cancel is not None else ""
    match decision:
        case Queue(attempt):
            if accepted is None:
                raise BusError(f"{session.id} is to be queued without its task")
            return SessionQueued(
                **about,
                attempt=attempt,
                work_class=session.work_class,
                spec=accepted.spec,
                files=accepted.files,
                session_deadline=_deadline(session, task) if attempt > 1 else None,
                causation=_cause(session),
            )
        case Complete(outcome, reward, evaluation):
            cause = session.evaluation.event_id if session.evaluation is not None else ""
            return SessionCompleted(
                **about,
                attempt=0,
                last_attempt=session.attempt,
                outcome=outcome,
                reward=reward,
                evaluation=evaluation,
                causation=cause,
            )
        case Fail(outcome, cause, detail):
            return SessionFailed(
                **about,
                attempt=0,
                last_attempt=session.attempt,
                outcome=outcome,
                cause=cause,
                detail=detail[:2000],
                causation=_cause(session),
            )
        case Cancel(reason):
            return SessionCancelled(**about, attempt=0, last_attempt=session.attempt, reason=reason, causation=cancel)


def _deadline(session: Session, task: Task) -> datetime | None:
    if session.first_claim_time is None:
        return None
    return session.first_claim_time + timedelta(seconds=task.limits.session_s)


def _cause(session: Session) -> str:
    fact = session.lost or session.exited
    return fact.event_id if fact is not None else ""


def group_event(task: Task, sessions: Sequence[Session], decision: CloseGroup) -> GroupClosed:
    """The group's end, members in order of their index."""
    members = tuple(member(s) for s in sessions)
    return GroupClosed(
        run=task.run,
        task=task.id,
        expected=len(task.sessions),
        terminal=sum(m.outcome is not None for m in members),
        trainable=sum(m.trainable for m in members),
        by=decision.by,
        members=members,
    )
