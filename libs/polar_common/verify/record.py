"""Messages in, facts out: what an audit remembers of each kind of message. Problems that one message shows by itself
are told at once; what needs others is left to the checks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import orjson

from polar_common.bus.read import Stored
from polar_common.errors import FromTheFuture, Misplaced, Poison
from polar_common.events import (
    BuildFailed,
    BuildReconstructed,
    CompletionAborted,
    CompletionCaptured,
    EvaluationEvaluated,
    Event,
    GroupClosed,
    SessionAccepted,
    SessionCancelled,
    SessionClaimed,
    SessionCompleted,
    SessionEvent,
    SessionExited,
    SessionFailed,
    SessionLost,
    SessionQueued,
    SessionSealed,
    TaskAccepted,
)
from polar_common.letters import is_letter

from .facts import Facts
from .findings import Finding, Findings

__all__ = ["EventRecorder", "blob_refs", "natural_key", "record_dead_letter"]

RANKS = {
    name: rank
    for rank, name in enumerate(
        ("queued", "claimed", "initialized", "ready", "running", "sealed", "exited", "artifacts", "lost")
    )
}


def natural_key(subject: str) -> bytes:
    """A short name of a subject; two subjects with one name are beyond chance."""
    return hashlib.blake2b(subject.encode(), digest_size=12).digest()


def blob_refs(value: Any) -> Iterator[tuple[str, int]]:
    """Every (hash, size) named anywhere inside a JSON value."""
    waiting = [value]
    while waiting:
        at = waiting.pop()
        if isinstance(at, dict):
            if isinstance(at.get("sha256"), str) and "size" in at and "media_type" in at:
                yield at["sha256"], int(at["size"])
            else:
                waiting += at.values()
        elif isinstance(at, list):
            waiting += at


def record_dead_letter(facts: Facts, findings: Findings, stored: Stored) -> None:
    """A dead letter excuses the message it is about; notes of retries lie below them."""
    if not is_letter(stored.subject):
        return
    try:
        letter = orjson.loads(stored.body)
        facts.add(
            "dead", str(letter["consumer"]), str(letter["stream"]), int(letter["sequence"]), str(letter["reason"])
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        findings.add(Finding("unreadable", stored.subject, f"a dead letter that isn't one: {error!r}", stored.sequence))


class EventRecorder:
    """Records the messages of one event stream."""

    def __init__(self, facts: Facts, findings: Findings, stream: str) -> None:
        self._facts = facts
        self._findings = findings
        self._stream = stream
        self._by_type: dict[type[Event], Callable[[Any, Stored], None]] = {
            TaskAccepted: self._task,
            CompletionCaptured: self._captured,
            CompletionAborted: self._aborted,
            EvaluationEvaluated: self._evaluated,
            BuildReconstructed: self._built,
            BuildFailed: self._build_failed,
            GroupClosed: self._group,
        }
        self.count = 0
        self.last_time: datetime | None = None

    def record(self, stored: Stored) -> None:
        """One message."""
        self.count += 1
        self.last_time = stored.time
        self._facts.add("subjects", natural_key(stored.subject), self._stream, stored.sequence)
        try:
            event = stored.event
        except Misplaced as error:
            self._add("misplaced", stored, str(error))
            return
        except Poison as error:
            newer = isinstance(error, FromTheFuture)
            self._facts.add("unread", self._stream, stored.sequence, stored.subject, str(error)[:300], int(newer))
            return
        if event.schema_version == type(event).VERSION and not _says_what_it_said(event, stored):
            self._add("body_hash", stored, f"published as {stored.body_hash[:16]!r}, says something else now")
        if b'"sha256"' in stored.body:
            for sha, size in blob_refs(orjson.loads(stored.body)):
                self._facts.add("blob_refs", sha, size, stored.subject)
        handler = self._by_type.get(type(event))
        if handler is not None:
            handler(event, stored)
        elif isinstance(event, SessionEvent) and event.kind.startswith("session."):
            self._session(event, stored)
        elif isinstance(event, SessionEvent):
            self._facts.add("mentions", event.session, event.kind, stored.sequence)

    def _add(self, check: str, stored: Stored, detail: str) -> None:
        self._findings.add(Finding(check, stored.subject, detail, stored.sequence))

    # -- kinds

    def _task(self, event: TaskAccepted, stored: Stored) -> None:
        at = stored.time.timestamp()
        self._facts.add(
            "tasks", event.task, event.run, len(event.sessions), at + event.spec.limits.queue_s, stored.sequence, at
        )
        for session in event.sessions:
            self._facts.add("task_sessions", event.task, session)

    def _session(self, event: SessionEvent, stored: Stored) -> None:
        session, seq, at = event.session, stored.sequence, stored.time.timestamp()
        if isinstance(event, SessionAccepted):
            self._facts.add("sessions", session, event.task, event.run, seq, at)
        elif isinstance(event, SessionCompleted):
            self._facts.add(
                "ends", session, "completed", event.outcome, event.reward, event.last_attempt, event.evaluation, seq, at
            )
        elif isinstance(event, SessionFailed):
            self._facts.add("ends", session, "failed", event.outcome, None, event.last_attempt, event.cause, seq, at)
        elif isinstance(event, SessionCancelled):
            self._facts.add("ends", session, "cancelled", "cancelled", None, event.last_attempt, "", seq, at)
        elif event.attempt > 0:
            name = event.kind.partition(".")[2]
            self._facts.add("steps", session, event.attempt, name, RANKS[name], seq, at, _detail(event))
            if isinstance(event, SessionClaimed):
                until = event.session_deadline + timedelta(0)
                self._facts.add("deadlines", session, event.attempt, until.timestamp())
        else:
            self._facts.add("mentions", session, event.kind, seq)

    def _captured(self, event: CompletionCaptured, stored: Stored) -> None:
        about = (event.session, event.attempt, event.completion)
        self._facts.add("completions", *about, "captured", stored.sequence, event.sampled.n, event.policy_seq)
        for target, what in _references(event):
            self._facts.add("refs", *about, target, what, stored.sequence)

    def _aborted(self, event: CompletionAborted, stored: Stored) -> None:
        tokens = event.sampled.n if event.sampled is not None else 0
        self._facts.add(
            "completions", event.session, event.attempt, event.completion, "aborted", stored.sequence, tokens, None
        )

    def _evaluated(self, event: EvaluationEvaluated, stored: Stored) -> None:
        self._facts.add(
            "evaluations", event.session, event.attempt, event.evaluation, event.outcome, event.reward, stored.sequence
        )

    def _built(self, event: BuildReconstructed, stored: Stored) -> None:
        self._facts.add(
            "builds", event.build, event.session, event.attempt, 1, event.manifest_hash, event.traces,
            event.trained_completions, len(event.excluded), event.sampled_tokens, event.rules, event.rules_hash,
            event.run, event.task, stored.sequence,
        )  # fmt: skip
        for completion, reason in event.excluded.items():
            self._facts.add("excluded", event.build, event.session, completion, reason)

    def _build_failed(self, event: BuildFailed, stored: Stored) -> None:
        self._facts.add(
            "builds", event.build, event.session, event.attempt, 0, "", 0, 0, 0, 0, event.reason, event.rules_hash,
            event.run, event.task, stored.sequence,
        )  # fmt: skip

    def _group(self, event: GroupClosed, stored: Stored) -> None:
        self._facts.add(
            "groups", event.task, event.expected, event.terminal, event.trainable, event.by, stored.sequence
        )
        for m in event.members:
            self._facts.add("members", event.task, m.session, m.outcome, m.reward, int(m.trainable), m.reason)


def _says_what_it_said(event: Event, stored: Stored) -> bool:
    """The hash of the values, or (completions, which are written as JSON directly) of the text from `session` on."""
    if stored.body_hash == event.body_hash():
        return True
    at = stored.body.find(b'"session":')
    return at > 0 and hashlib.sha256(b"{" + stored.body[at:]).hexdigest() == stored.body_hash


def _detail(event: SessionEvent) -> str:
    match event:
        case SessionQueued():
            return event.work_class
        case SessionClaimed():
            return event.gateway
        case SessionExited():
            return event.fault
        case SessionLost():
            return event.cause
        case SessionSealed():
            return event.reason
    return ""


def _references(event: CompletionCaptured) -> Iterator[tuple[str, str]]:
    """Every completion that this one can't be read without, or says that it stands beside."""
    for name in (event.prompt.base, *event.prompt.via):
        if name:
            yield name, "prompt"
    for name in (event.messages.base, *event.messages.via):
        if name:
            yield name, "messages"
    for body in event.messages.new:
        if isinstance(body.get("echo"), str):
            yield body["echo"], "echo"
    for name, what in ((event.head.at, "head"), (event.parent, "parent"), (event.replay_of, "replay_of")):
        if name:
            yield name, what
