"""What ingest answers: models for people and scripts, and the folds that fill them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from polar_common.bus import Stored
from polar_common.events import (
    BuildFailed,
    BuildReconstructed,
    EvaluationEvaluated,
    GroupClosed,
    SessionCancelled,
    SessionCompleted,
    SessionFailed,
    TaskAccepted,
)
from polar_common.packing import BlobRef
from polar_common.session_state import Attempt, SessionState
from polar_common.task_spec import HarnessSpec, Limits, RuntimeChoice, SamplingSpec

from .entries import End, RunCounts, Session, Task, cause_of, outcome_of
from .state import LIVE_EVALUATION, PHASES

__all__ = [
    "AttemptView", "BuildView", "CancelView", "ErrorView", "EvaluationView", "GroupView", "RunView", "SessionSummary",
    "SessionView", "SubmittedTask", "SubmittedView", "TaskSummary", "TaskView", "ended_summary", "run_view",
    "session_view", "summary_of", "task_view",
]  # fmt: skip


class _View(BaseModel):
    model_config = ConfigDict(frozen=True)


class ErrorBody(_View):
    message: str
    where: str = ""
    """The field at fault, e.g. `tasks[3].harness.name`; empty where it's none."""


class ErrorView(_View):
    error: ErrorBody


class SubmittedTask(_View):
    id: str
    """As submitted."""
    task: str
    """Polar's own id, for all further questions."""
    sessions: tuple[str, ...]


class SubmittedView(_View):
    run: str
    tasks: tuple[SubmittedTask, ...]


class SessionSummary(_View):
    session: str
    index: int
    phase: str
    attempts: int
    outcome: str | None = None
    reward: float | None = None
    cause: str = ""


class TaskSummary(_View):
    """The task as submitted, without its long texts."""

    instruction: str
    """At most the first 400 characters."""
    samples: int
    harness: HarnessSpec
    runtime: RuntimeChoice
    evaluator: str
    limits: Limits
    model: str
    sampling: SamplingSpec
    priority: int
    callback: bool
    metadata: dict[str, str]
    files: BlobRef | None


class GroupView(_View):
    by: str
    expected: int
    terminal: int
    trainable: int


class TaskView(_View):
    task: str
    id: str
    run: str
    spec: TaskSummary
    sessions: tuple[SessionSummary, ...]
    closed: GroupView | None = None


class AttemptView(_View):
    """One execution; `times` are the log's own, by event."""

    attempt: int
    phase: str
    times: dict[str, datetime]
    gateway: str = ""
    runtime: str = ""
    isolation: str = ""
    harness_version: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    cancelled: bool = False
    fault: str = ""
    cause: str = ""
    detail: str = ""
    log_tail: str = ""
    sealed: str = ""
    lost: str = ""
    run_s: float | None = None
    cpu_s: float | None = None
    peak_rss_mb: float | None = None
    peers: tuple[str, ...] = ()
    bypass: tuple[str, ...] = ()
    patch: BlobRef | None = None
    log: BlobRef | None = None
    answer: BlobRef | None = None


class EvaluationView(_View):
    evaluation: str
    attempt: int
    evaluator: str
    outcome: str
    reward: float | None
    exit_code: int | None
    detail: str
    eval_s: float
    log: BlobRef | None


class BuildView(_View):
    build: str
    traces: int
    trained_completions: int
    excluded: dict[str, str]
    sampled_tokens: int
    exact_spans: int
    drifted_spans: int
    failed: str = ""
    """Why there are none."""


class SessionView(_View):
    session: str
    task: str
    run: str
    index: int | None
    phase: str
    outcome: str | None
    reward: float | None
    cause: str = ""
    detail: str = ""
    cancel_requested: bool
    attempts: tuple[AttemptView, ...]
    evaluation: EvaluationView | None
    evaluations: tuple[EvaluationView, ...]
    """Later ones, which alter nothing."""
    completions: dict[str, int]
    """By kind: captured, aborted, undelivered, rejected."""
    builds: tuple[BuildView, ...]


class RunView(_View):
    """Counts from the scheduler's fold."""

    run: str
    tasks: int
    groups_closed: int
    sessions: int
    phases: dict[str, int]
    """Of sessions that aren't terminal."""
    outcomes: dict[str, int]
    attempts: int
    lost_attempts: int
    trainable: int
    traces: int
    sampled_tokens: int
    mean_reward: float | None
    finished: bool
    """Every group is closed and every session terminal."""


class CancelView(_View):
    requested: int
    """Sessions newly asked to end."""
    sessions: int
    """Sessions looked at; the rest had ended or been asked before."""


def session_view(session: str, stored: Sequence[Stored]) -> SessionView:
    """A session from one read of its events, evaluations, builds and completions."""
    state = SessionState(session)
    completions: Counter[str] = Counter()
    evaluations: list[EvaluationView] = []
    builds: list[BuildView] = []
    run = task = ""
    for message in stored:
        kind = message.subject.split(".")[3]
        if kind == "completion":
            completions[message.subject.rpartition(".")[2]] += 1
            continue
        event = message.event
        run, task = event.run or run, event.task or task
        if isinstance(event, EvaluationEvaluated):
            evaluations.append(_evaluation(event))
        elif isinstance(event, BuildReconstructed | BuildFailed):
            builds.append(_build(event))
        else:
            state.apply(event, message.sequence, message.time)
    end = state.end
    last = state.last_attempt.number if state.last_attempt is not None else 0
    live = next((e for e in evaluations if e.evaluation == LIVE_EVALUATION and e.attempt == last), None)
    return SessionView(
        session=session,
        task=task,
        run=run,
        index=state.accepted.index if state.accepted is not None else None,
        phase=state.phase,
        outcome=outcome_of(end) if end is not None else None,
        reward=end.reward if isinstance(end, SessionCompleted) else None,
        cause=cause_of(end),
        detail=_detail(end, live),
        cancel_requested=state.cancel is not None,
        attempts=tuple(_attempt(state.attempts[n]) for n in sorted(state.attempts)),
        evaluation=live,
        evaluations=tuple(e for e in evaluations if e is not live),
        completions=dict(sorted(completions.items())),
        builds=tuple(builds),
    )


def _detail(end: End | None, evaluation: EvaluationView | None) -> str:
    if isinstance(end, SessionFailed):
        return end.detail
    if isinstance(end, SessionCompleted):
        return evaluation.detail if evaluation is not None else ""
    return end.reason if isinstance(end, SessionCancelled) else ""


def _attempt(attempt: Attempt) -> AttemptView:
    found: dict[str, Any] = {}
    if (claimed := attempt.claimed) is not None:
        found["gateway"] = claimed.gateway
    if (ready := attempt.initialized) is not None:
        found |= {"runtime": ready.runtime, "isolation": ready.isolation, "harness_version": ready.harness_version}
    if (sealed := attempt.sealed) is not None:
        found["sealed"] = sealed.reason
    if (lost := attempt.lost) is not None:
        found |= {"lost": lost.cause, "detail": lost.detail}
    if (exited := attempt.exited) is not None:
        names = (
            "exit_code", "timed_out", "cancelled", "fault", "cause", "detail", "log_tail", "run_s", "cpu_s",
            "peak_rss_mb", "peers", "bypass",
        )  # fmt: skip
        found |= {name: getattr(exited, name) for name in names}
    if (artifacts := attempt.artifacts) is not None:
        found |= {"patch": artifacts.patch, "log": artifacts.log, "answer": artifacts.answer}
    phase = next((name for name in reversed(PHASES) if name in attempt.at), "unknown")
    return AttemptView(attempt=attempt.number, phase=phase, times=attempt.at, **found)


def _evaluation(event: EvaluationEvaluated) -> EvaluationView:
    return EvaluationView(**event.model_dump(include=set(EvaluationView.model_fields)))


def _build(event: BuildReconstructed | BuildFailed) -> BuildView:
    if isinstance(event, BuildFailed):
        return BuildView(
            build=event.build,
            traces=0,
            trained_completions=0,
            excluded={},
            sampled_tokens=0,
            exact_spans=0,
            drifted_spans=0,
            failed=event.reason,
        )
    return BuildView(**event.model_dump(include=set(BuildView.model_fields) - {"failed"}))


def summary_of(session: Session) -> SessionSummary:
    """A remembered session in a list."""
    end = session.end
    return SessionSummary(
        session=session.id,
        index=session.index,
        phase=end.kind.removeprefix("session.") if end is not None else session.phase,
        attempts=session.attempt,
        outcome=outcome_of(end) if end is not None else None,
        reward=end.reward if isinstance(end, SessionCompleted) else None,
        cause=cause_of(end),
    )


def ended_summary(state: SessionState, index: int) -> SessionSummary:
    """A session read from the log in a list."""
    end = state.end
    return SessionSummary(
        session=state.session,
        index=index,
        phase=state.phase,
        attempts=max(state.attempts, default=0),
        outcome=outcome_of(end) if end is not None else None,
        reward=end.reward if isinstance(end, SessionCompleted) else None,
        cause=cause_of(end),
    )


def task_view(accepted: TaskAccepted, sessions: Sequence[SessionSummary], closed: GroupClosed | None) -> TaskView:
    """A task with its sessions."""
    spec = accepted.spec
    summary = TaskSummary(
        instruction=spec.instruction[:400],
        samples=spec.samples,
        harness=spec.harness,
        runtime=spec.runtime,
        evaluator=spec.evaluator.kind,
        limits=spec.limits,
        model=spec.model,
        sampling=spec.sampling,
        priority=spec.priority,
        callback=bool(spec.callback),
        metadata=spec.metadata,
        files=accepted.files,
    )
    group = None
    if closed is not None:
        group = GroupView(by=closed.by, expected=closed.expected, terminal=closed.terminal, trainable=closed.trainable)
    return TaskView(
        task=accepted.task, id=spec.id, run=accepted.run, spec=summary, sessions=tuple(sessions), closed=group
    )


def run_view(counts: RunCounts, live: Sequence[Session], open_tasks: Sequence[Task]) -> RunView:
    """A run's counts now."""
    phases = Counter(s.phase for s in live if s.end is None)
    return RunView(
        run=counts.name,
        tasks=counts.tasks,
        groups_closed=counts.groups_closed,
        sessions=counts.sessions,
        phases=dict(sorted(phases.items())),
        outcomes=dict(sorted(counts.outcomes.items())),
        attempts=counts.attempts,
        lost_attempts=counts.lost,
        trainable=counts.trainable,
        traces=counts.traces,
        sampled_tokens=counts.sampled_tokens,
        mean_reward=counts.reward_sum / counts.rewards if counts.rewards else None,
        finished=not open_tasks,
    )
