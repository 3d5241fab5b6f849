"""The subject grammar. A subject is an event's natural key: each is used at most once.

Patterns for consumers stand beside the builders, so that nobody spells a subject anywhere else.
"""

from __future__ import annotations

from .ids import segment_of, token

__all__ = [
    "ANY_ARTIFACTS", "ANY_CANCEL", "ANY_CANCELLED", "ANY_COMPLETION", "ANY_EVALUATED", "ANY_FAILED",
    "ANY_GROUP_CLOSED", "ANY_LOST", "ANY_POLICY_ACTIVATED", "ANY_POLICY_PUBLISHED", "ANY_RUNNING", "ANY_SEALED",
    "ANY_SESSION", "EVENTS", "LIFECYCLE", "blob", "build", "build_filter", "closed_filter", "completion",
    "completion_filter", "dead_letter", "evaluation", "group", "group_traces_filter", "manifests_filter", "policy",
    "queued_filter", "session", "session_filter", "session_traces", "session_traces_filter", "task", "task_filter",
    "trace", "trace_closed", "trace_filter", "trace_manifest", "trainer",
]  # fmt: skip

EVENTS = "polar.events.>"
ANY_RUNNING = "polar.events.*.session.*.*.running"
ANY_LOST = "polar.events.*.session.*.*.lost"
ANY_EVALUATED = "polar.events.*.evaluation.*.*.*.evaluated"
ANY_SEALED = "polar.events.*.session.*.*.sealed"
ANY_ARTIFACTS = "polar.events.*.session.*.*.artifacts"
ANY_CANCEL = "polar.events.*.session.*.0.cancel_requested"
ANY_FAILED = "polar.events.*.session.*.0.failed"
ANY_CANCELLED = "polar.events.*.session.*.0.cancelled"
ANY_SESSION = "polar.events.*.session.>"
ANY_COMPLETION = "polar.events.*.completion.>"
ANY_GROUP_CLOSED = "polar.events.*.group.*.closed"
ANY_POLICY_PUBLISHED = "polar.events.*.policy.*.published"
ANY_POLICY_ACTIVATED = "polar.events.*.policy.*.*.activated"
# What the scheduler folds: everything about tasks, sessions, evaluations, builds and groups, no completions.
LIFECYCLE = (
    "polar.events.*.task.>",
    "polar.events.*.session.>",
    "polar.events.*.evaluation.>",
    "polar.events.*.build.>",
    "polar.events.*.group.>",
)


def task(task: str, event: str) -> str:
    return f"polar.events.{segment_of(task)}.task.{task}.{event}"


def task_filter(task: str) -> str:
    return f"polar.events.{segment_of(task)}.task.{task}.>"


def session(session: str, attempt: int, event: str, work_class: str = "") -> str:
    """Session-wide facts use attempt 0. `queued` has one more token, the class of work."""
    end = f".{token(work_class)}" if work_class else ""
    return f"polar.events.{segment_of(session)}.session.{session}.{attempt}.{event}{end}"


def session_filter(session: str) -> str:
    """The fence of a session: all of its transitions, and nothing else."""
    return f"polar.events.{segment_of(session)}.session.{session}.>"


def queued_filter(work_class: str) -> str:
    return f"polar.events.*.session.*.*.queued.{token(work_class)}"


def completion(session: str, attempt: int, completion: str, event: str) -> str:
    return f"polar.events.{segment_of(session)}.completion.{session}.{attempt}.{completion}.{event}"


def completion_filter(session: str, attempt: int | None = None) -> str:
    which = "" if attempt is None else f".{attempt}"
    return f"polar.events.{segment_of(session)}.completion.{session}{which}.>"


def evaluation(session: str, attempt: int, evaluation: str, event: str) -> str:
    return f"polar.events.{segment_of(session)}.evaluation.{session}.{attempt}.{token(evaluation)}.{event}"


def build(build: str, session: str, event: str) -> str:
    return f"polar.events.{segment_of(session)}.build.{token(build)}.{session}.{event}"


def build_filter(segment: str, build: str | None = None) -> str:
    """Everything that builds (one, or any) said about sessions."""
    return f"polar.events.{segment}.build.{_or_any(build)}.>"


def group(task: str) -> str:
    return f"polar.events.{segment_of(task)}.group.{task}.closed"


def policy(segment: str, version: str, event: str, replica: str = "") -> str:
    middle = f".{token(replica)}" if replica else ""
    return f"polar.events.{segment}.policy.{token(version)}{middle}.{event}"


def trainer(segment: str, trainer: str, epoch: int | str, number: int | str, event: str) -> str:
    """`*` for epoch or number makes it a pattern."""
    return f"polar.events.{segment}.trainer.{token(trainer)}.{epoch}.{number}.{event}"


def trace(run: str, build: str, task: str, session: str, number: int) -> str:
    return f"polar.traces.{token(run)}.{token(build)}.{task}.{session}.{number}"


def trace_manifest(run: str, build: str, task: str, session: str) -> str:
    return f"polar.traces.{token(run)}.{token(build)}.{task}.{session}.manifest"


def session_traces(build: str, task: str, session: str) -> str:
    """All traces of a session in a build, and their manifest, whatever the run."""
    return f"polar.traces.*.{token(build)}.{task}.{session}.*"


def trace_closed(run: str, build: str, task: str) -> str:
    return f"polar.traces.{token(run)}.{token(build)}.{task}.closed"


def _or_any(name: str | None) -> str:
    """None alone means any: an empty name, as an unset variable gives it, is nobody's."""
    return "*" if name is None else token(name)


def trace_filter(run: str | None = None, build: str | None = None) -> str:
    """All traces of a run and build; None for any."""
    return f"polar.traces.{_or_any(run)}.{_or_any(build)}.>"


def closed_filter(run: str | None = None, build: str | None = None) -> str:
    """The groups that closed for a run and build; None for any."""
    return f"polar.traces.{_or_any(run)}.{_or_any(build)}.*.closed"


def group_traces_filter(run: str, build: str, task: str) -> str:
    """A group's traces, manifests and closing."""
    return f"polar.traces.{token(run)}.{token(build)}.{task}.>"


def manifests_filter(run: str | None = None, build: str | None = None) -> str:
    """The manifests of a run and build; None for any."""
    return f"polar.traces.{_or_any(run)}.{_or_any(build)}.*.*.manifest"


def session_traces_filter(run: str, build: str, task: str, session: str) -> str:
    """A session's traces and manifest."""
    return f"polar.traces.{token(run)}.{token(build)}.{task}.{session}.>"


def blob(segment: str, sha256: str, part: int | None = None) -> str:
    """A body, or one of its numbered parts where it is larger than a message."""
    return f"polar.blobs.{segment}.{sha256}" + ("" if part is None else f".{part}")


def dead_letter(consumer: str, stream: str, sequence: int) -> str:
    return f"polar.dlq.{token(consumer)}.{stream}.{sequence}"
