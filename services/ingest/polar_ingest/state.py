"""What the scheduler remembers of the log: live tasks and sessions, compact, and counts per run.

`World.apply` folds one message; bodies are decoded only where their content matters. Instants (`*_at`) are seconds of
the local monotonic clock, as converted by the caller, so that a clock that jumps moves no deadline; only what goes
into events is log time. A task is forgotten when its group is closed and all its sessions are terminal.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Protocol

from polar_common.errors import FromTheFuture, Poison
from polar_common.events import (
    BuildFailed,
    BuildReconstructed,
    EvaluationEvaluated,
    Event,
    GroupClosed,
    PolicyActivated,
    PolicyPublished,
    SessionAccepted,
    SessionCancelled,
    SessionCancelRequested,
    SessionCompleted,
    SessionExited,
    SessionFailed,
    SessionLost,
    TaskAccepted,
    TrainerConsumed,
    TrainerDemanded,
)

from .demand import Demand
from .entries import RunCounts, Session, Task, outcome_of
from .fairness import FairQueue

__all__ = ["LIVE_EVALUATION", "PHASES", "Message", "World"]

LIVE_EVALUATION = "live"
_ENDS = ("completed", "failed", "cancelled")
_BODIES = (*_ENDS, "accepted", "cancel_requested", "exited", "lost")
PHASES = ("queued", "claimed", "initialized", "ready", "running", "sealed", "exited", "artifacts", "lost")
"""An attempt's facts in the order in which they may come."""
_RANK = {name: rank for rank, name in enumerate(PHASES)}


class Message(Protocol):
    """The part of a stored message that the fold needs (`polar_common.bus.Stored` fits)."""

    subject: str
    sequence: int
    time: datetime

    @property
    def event(self) -> Event:
        """Decoded when asked. Raises Poison or FromTheFuture."""


class World:
    """The fold. `dirty` and `dirty_tasks` name what has changed since they were last emptied."""

    def __init__(self, build: str, *, demand: bool = False) -> None:
        self.build = build
        self.demand = demand
        """Whether trainers' demands are followed."""
        self.tasks: dict[str, Task] = {}
        self.sessions: dict[str, Session] = {}
        self.runs: dict[str, RunCounts] = {}
        self.run_tasks: dict[str, set[str]] = {}
        self.queues: dict[str, FairQueue] = {}
        self.unclaimed: Counter[str] = Counter()
        self.buckets: Counter[str] = Counter()
        self.dirty: set[str] = set()
        self.dirty_tasks: set[str] = set()
        self.demands = Demand()

    # -- folding

    def apply(self, message: Message, at: float) -> None:
        """Fold one message. Raises Poison or FromTheFuture after marking the session concerned."""
        parts = message.subject.split(".")
        if len(parts) < 6:
            return
        try:
            match parts[3]:
                case "session":
                    self._session(message, parts, at)
                case "task":
                    self._task(message, parts, at)
                case "evaluation":
                    self._evaluation(message, parts)
                case "build":
                    self._build(message, parts)
                case "group":
                    self._group(message)
                case "trainer" | "policy" if self.demand:
                    self._trainer(message)
        except FromTheFuture:
            if (session := self.sessions.get(parts[5 if parts[3] == "build" else 4])) is not None:
                session.frozen = True
            raise
        except Poison as error:
            self._poisoned(parts, str(error))
            raise

    def poison(self, session: str, reason: str, *, build: bool = False, attempt: int | None = None) -> None:
        """A message about this session can't be handled by a service: its dead letter says why.

        `attempt`: only if this is still the session's attempt.
        """
        entry = self.sessions.get(session)
        if entry is None or (attempt is not None and attempt != entry.attempt):
            return
        if build and not entry.built:
            entry.build_poison = reason
            self._built(entry)
        elif not build and not entry.poison and entry.evaluation is None:
            entry.poison = reason
            self.dirty.add(session)

    def _poisoned(self, parts: list[str], reason: str) -> None:
        if parts[3] == "group":
            # The subject is used up: nobody will ever close this group.
            if (task := self.tasks.get(parts[4])) is not None and not task.closed:
                self._close(task)
        elif parts[3] == "build":
            if parts[4] == self.build:
                self.poison(parts[5], reason, build=True)
        else:
            self.poison(parts[4], reason)

    def _task(self, message: Message, parts: list[str], at: float) -> None:
        if parts[5] != "accepted" or parts[4] in self.tasks:
            return
        event = message.event
        if not isinstance(event, TaskAccepted) or event.task != parts[4]:
            raise Poison(f"{message.subject} holds a {event.kind}")
        spec = event.spec
        task = Task(
            id=event.task,
            user_id=spec.id,
            run=event.run,
            order=message.sequence,
            accepted_at=at,
            limits=spec.limits,
            work_class=spec.runtime.queue_class,
            priority=spec.priority,
            evaluator_timeout_s=spec.evaluator.timeout_s,
            sessions=event.sessions,
            live=len(event.sessions),
            unbuilt=len(event.sessions),
        )
        self.tasks[task.id] = task
        run = self.runs.setdefault(task.run, RunCounts(task.run))
        run.tasks += 1
        run.sessions += len(task.sessions)
        self.run_tasks.setdefault(task.run, set()).add(task.id)
        self.dirty_tasks.add(task.id)

    def _session(self, message: Message, parts: list[str], at: float) -> None:
        name, session = parts[6], self.sessions.get(parts[4])
        if session is None:
            if name == "accepted":
                self._accepted(message, parts[4], at)
            return
        if message.sequence <= session.seq:
            return
        session.seq = message.sequence
        before = session.bucket
        event = message.event if name in _BODIES else None
        if parts[5] == "0":
            self._session_wide(session, event)
        elif parts[5].isdecimal():
            self._attempt(session, int(parts[5]), name, event, message.time, at)
        self._moved(session, before)

    def _accepted(self, message: Message, session_id: str, at: float) -> None:
        event = message.event
        task = self.tasks.get(event.task)
        if not isinstance(event, SessionAccepted) or task is None or session_id not in task.sessions:
            raise Poison(f"{message.subject} belongs to no accepted task")
        session = Session(session_id, task.id, event.work_class, event.index, message.sequence, at, phase_at=at)
        self.sessions[session_id] = session
        self.buckets["waiting"] += 1
        self.wait(session)
        self.dirty.add(session_id)

    def wait(self, session: Session) -> None:
        """Put a session that waits for release in its queue."""
        task = self.tasks[session.task]
        queue = self.queues.setdefault(session.work_class, FairQueue())
        queue.push(task.run, task.id, session.id, priority=task.priority, order=task.order, opened=task.opened)

    def _session_wide(self, session: Session, event: Event | None) -> None:
        if isinstance(event, SessionCancelRequested):
            session.cancel = session.cancel or event
        elif isinstance(event, SessionCompleted | SessionFailed | SessionCancelled) and session.end is None:
            session.end = event
            task, run = self.tasks[session.task], self.runs[self.tasks[session.task].run]
            task.live -= 1
            run.outcomes[outcome_of(event)] += 1
            if isinstance(event, SessionCompleted) and event.reward is not None:
                run.reward_sum += event.reward
                run.rewards += 1
            self.dirty_tasks.add(task.id)

    def _attempt(
        self, session: Session, attempt: int, name: str, event: Event | None, time: datetime, at: float
    ) -> None:
        if name == "queued" and attempt > session.attempt and session.end is None:
            self._opened(session)
            session.attempt, session.phase, session.phase_at = attempt, "queued", at
            session.exited = session.lost = session.evaluation = None
            self.runs[self.tasks[session.task].run].attempts += 1
            return
        if attempt != session.attempt or _RANK.get(name, -1) <= _RANK.get(session.phase, -1):
            return
        session.phase, session.phase_at = name, at
        if name == "claimed" and session.first_claim_at is None:
            session.first_claim_at, session.first_claim_time = at, time
        elif isinstance(event, SessionExited):
            session.exited = event.model_copy(update={"log_tail": event.log_tail[-500:], "detail": event.detail[:2000]})
        elif isinstance(event, SessionLost):
            session.lost = event
            self.runs[self.tasks[session.task].run].lost += 1

    def _opened(self, session: Session) -> None:
        task = self.tasks[session.task]
        if not task.opened:
            task.opened = True
            self.demands.open[task.run] += not task.closed
            if (queue := self.queues.get(session.work_class)) is not None:
                queue.open(task.id)

    def _moved(self, session: Session, before: str) -> None:
        after = session.bucket
        self.dirty.add(session.id)
        if before == after:
            return
        self.buckets[before] -= 1
        self.buckets[after] += 1
        self.unclaimed[session.work_class] += (after == "queued") - (before == "queued")
        if after == "ended":
            self._forget(self.tasks[session.task])

    def _evaluation(self, message: Message, parts: list[str]) -> None:
        session = self.sessions.get(parts[4])
        if session is None or parts[6] != LIVE_EVALUATION or parts[5] != str(session.attempt) or session.evaluation:
            return
        event = message.event
        if not isinstance(event, EvaluationEvaluated):
            raise Poison(f"{message.subject} holds a {event.kind}")
        session.evaluation = event.model_copy(update={"details": {}, "detail": "", "log": None})
        self.dirty.add(session.id)

    def _build(self, message: Message, parts: list[str]) -> None:
        session = self.sessions.get(parts[5])
        if session is None or parts[4] != self.build or session.build is not None:
            return
        event = message.event
        if not isinstance(event, BuildReconstructed | BuildFailed):
            raise Poison(f"{message.subject} holds a {event.kind}")
        first = not session.built
        # Whether anything was excluded is all that a group needs to know.
        few = dict(list(event.excluded.items())[:1]) if isinstance(event, BuildReconstructed) else None
        session.build = event if few is None else event.model_copy(update={"excluded": few})
        run = self.runs[self.tasks[session.task].run]
        if isinstance(event, BuildReconstructed):
            run.traces += event.traces
            run.sampled_tokens += event.sampled_tokens
        if first:
            self._built(session)

    def _built(self, session: Session) -> None:
        self.tasks[session.task].unbuilt -= 1
        self.dirty_tasks.add(session.task)

    def _group(self, message: Message) -> None:
        event = message.event
        task = self.tasks.get(event.task)
        if not isinstance(event, GroupClosed) or task is None or task.closed:
            return
        self.runs[task.run].trainable += event.trainable
        self._close(task)

    def _close(self, task: Task) -> None:
        task.closed = True
        if task.opened:
            self.demands.open[task.run] -= 1
            if self.demand:
                self.demands.closed(task.id, task.run)
        self.runs[task.run].groups_closed += 1
        self._forget(task)

    def _trainer(self, message: Message) -> None:
        event = message.event
        if isinstance(event, TrainerDemanded):
            self.demands.demanded(event.trainer, event.run, event.groups, event.staleness)
        elif isinstance(event, TrainerConsumed):
            self.demands.consumed(event.groups)
        elif isinstance(event, PolicyPublished):
            self.demands.published(event.trainer, event.version, event.policy_seq)
        elif isinstance(event, PolicyActivated):
            self.demands.activated(event.version, event.policy_seq)

    def _forget(self, task: Task) -> None:
        """Drop a task of which nothing more is to be decided."""
        if not task.closed or task.live > 0:
            return
        for session in task.sessions:
            entry = self.sessions.pop(session, None)
            if entry is not None:
                self.buckets[entry.bucket] -= 1
            self.dirty.discard(session)
        del self.tasks[task.id]
        self.dirty_tasks.discard(task.id)
        self.run_tasks[task.run].discard(task.id)

    # -- asking

    @property
    def pending(self) -> int:
        """Sessions accepted and not yet claimed for the first time, or queued again."""
        return self.buckets["waiting"] + self.buckets["queued"]

    @property
    def open_groups(self) -> int:
        return self.demands.open.total()

    def is_waiting(self, session: str) -> bool:
        entry = self.sessions.get(session)
        if entry is None or entry.cancel is not None or entry.poison or entry.frozen:
            return False
        return entry.bucket == "waiting"

    def live_sessions(self, run: str) -> list[Session]:
        """The run's sessions still remembered."""
        tasks = (self.tasks[t] for t in self.run_tasks.get(run, ()))
        return [self.sessions[s] for task in tasks for s in task.sessions if s in self.sessions]
