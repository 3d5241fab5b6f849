"""Messages of the log → rows of tables. Pure: the same message always gives the same rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import orjson

from polar_common.bus import Stored
from polar_common.errors import PolarError
from polar_common.events import (
    BuildFailed,
    BuildReconstructed,
    CompletionAborted,
    CompletionCaptured,
    CompletionRejected,
    CompletionUndelivered,
    EvaluationEvaluated,
    Event,
    GroupClosed,
    PolicyActivated,
    PolicyPublished,
    SessionAccepted,
    SessionArtifacts,
    SessionCancelled,
    SessionClaimed,
    SessionCompleted,
    SessionEvent,
    SessionExited,
    SessionFailed,
    SessionInitialized,
    SessionLost,
    SessionQueued,
    SessionRunning,
    SessionSealed,
    TrainerConsumed,
)
from polar_common.trace_messages import read_message
from polar_common.traces import GroupTraces, Trace, TraceManifest

from .schema import TABLES

__all__ = ["Rows", "project_event", "project_trace", "rows_of"]

Row = dict[str, Any]
Rows = dict[str, list[Row]]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BLANK = {"String": "", "UInt64": 0, "UInt8": 0, "Int64": 0, "Float64": 0.0}


def _default(kind: str) -> Any:
    base = kind.partition(" CODEC")[0].removeprefix("LowCardinality(").rstrip(")")
    if kind.startswith("DateTime64"):
        return EPOCH
    if kind.startswith("Nullable"):
        return None
    if kind.startswith("Array"):
        return []
    if kind.startswith("Map"):
        return {}
    return _BLANK[base]


_DEFAULTS: dict[str, Row] = {t.name: {c: _default(k) for c, k in t.columns.items()} for t in TABLES}


def _row(table: str, **values: Any) -> tuple[str, Row]:
    return table, {**_DEFAULTS[table], **values}


def rows_of(messages: Iterable[tuple[str, Stored]]) -> tuple[Rows, list[tuple[str, Stored, Exception]]]:
    """Rows of all tables for (stream, message) pairs, and the messages that can't be understood."""
    out: Rows = defaultdict(list)
    poison: list[tuple[str, Stored, Exception]] = []
    for stream, stored in messages:
        try:
            made = project_trace(stored) if stored.subject.startswith("polar.traces.") else project_event(stored)
        except (PolarError, ValueError) as error:
            poison.append((stream, stored, error))
            made = []
        for table, row in made:
            out[table].append(row)
        out["events" if not stored.subject.startswith("polar.traces.") else "trace_messages"].append(
            _marker(stream, stored)
        )
    return out, poison


def _marker(stream: str, stored: Stored) -> Row:
    """The row by which progress is known; bodies are kept for events alone."""
    if stored.subject.startswith("polar.traces."):
        return {"stream": stream, "seq": stored.sequence, "subject": stored.subject, "time": stored.time}
    row = {**_DEFAULTS["events"], "stream": stream, "seq": stored.sequence, "time": stored.time}
    row |= {"subject": stored.subject, "bytes": len(stored.body)}
    try:
        event = stored.event
    except PolarError:
        return {**row, "kind": "poison", "body": stored.body[:2000].decode("utf-8", "replace")}
    return {
        **row,
        "kind": event.kind,
        "run": event.run,
        "task": event.task,
        "session": event.session if isinstance(event, SessionEvent) else "",
        "attempt": event.attempt if isinstance(event, SessionEvent) else 0,
        "event_id": event.event_id,
        "producer": event.producer,
        # Token columns stay in the log: they are what makes a body large, and nobody asks SQL for them.
        "body": _light(stored.body) if isinstance(event, CompletionCaptured) else stored.body.decode(),
    }


def _light(body: bytes) -> str:
    value = orjson.loads(body)
    for heavy in ("prompt", "sampled", "logprobs", "messages", "head"):
        value.pop(heavy, None)
    return orjson.dumps(value).decode()


def project_event(stored: Stored) -> list[tuple[str, Row]]:
    """Rows of one event, without its `events` row. Raises Poison or FromTheFuture."""
    event = stored.event
    handler = _HANDLERS.get(type(event))
    return [] if handler is None else handler(event, stored)


def _fact(event: SessionEvent, **values: Any) -> tuple[str, Row]:
    return _row("session_facts", session=event.session, task=event.task, run=event.run, **values)


def _try(event: SessionEvent, **values: Any) -> tuple[str, Row]:
    return _row("attempts", session=event.session, attempt=event.attempt, task=event.task, run=event.run, **values)


def _accepted(e: SessionAccepted, s: Stored) -> list[tuple[str, Row]]:
    return [_fact(e, idx=e.index, accepted=s.time, work_class=e.work_class)]


def _queued(e: SessionQueued, s: Stored) -> list[tuple[str, Row]]:
    return [_fact(e, queued=s.time, attempts=e.attempt, harness=e.spec.harness.name, model=e.spec.model)]


def _claimed(e: SessionClaimed, s: Stored) -> list[tuple[str, Row]]:
    return [_fact(e, claimed=s.time, gateway=e.gateway), _try(e, claimed=s.time, gateway=e.gateway)]


def _initialized(e: SessionInitialized, s: Stored) -> list[tuple[str, Row]]:
    return [
        _fact(
            e,
            initialized=s.time,
            harness_version=e.harness_version,
            runtime=e.runtime,
            isolation=e.isolation,
            init_s=e.init_s,
        )
    ]


def _running(e: SessionRunning, s: Stored) -> list[tuple[str, Row]]:
    return [_fact(e, running=s.time, ready_s=e.ready_s)]


def _sealed(e: SessionSealed, s: Stored) -> list[tuple[str, Row]]:
    return [_fact(e, sealed=s.time)]


def _exited(e: SessionExited, s: Stored) -> list[tuple[str, Row]]:
    told = {
        "exit_code": e.exit_code,
        "fault": e.fault,
        "cause": e.cause,
        "run_s": e.run_s,
    }
    return [
        _fact(e, exited=s.time, timed_out=int(e.timed_out), peak_rss_mb=e.peak_rss_mb, **told),
        _try(e, ended=s.time, end="exited", detail=e.detail[:500], **told),
    ]


def _artifacts(e: SessionArtifacts, s: Stored) -> list[tuple[str, Row]]:
    return [_fact(e, artifacts=s.time, postrun_s=e.postrun_s)]


def _lost(e: SessionLost, s: Stored) -> list[tuple[str, Row]]:
    return [_try(e, ended=s.time, end="lost", fault="infra", cause=e.cause, detail=e.detail[:500])]


def _completed(e: SessionCompleted, s: Stored) -> list[tuple[str, Row]]:
    told = {"outcome": e.outcome, "reward": e.reward, "has_reward": _has(e.reward), "cause": e.cause}
    return [_fact(e, ended=s.time, state="completed", **told)]


def _has(reward: float | None) -> int:
    return int(reward is not None)


def _failed(e: SessionFailed, s: Stored) -> list[tuple[str, Row]]:
    return [_fact(e, ended=s.time, state="failed", outcome=e.outcome, cause=e.cause)]


def _cancelled(e: SessionCancelled, s: Stored) -> list[tuple[str, Row]]:
    return [_fact(e, ended=s.time, state="cancelled", outcome="cancelled")]


def _completion(
    event: SessionEvent, stored: Stored, kind: str, completion: str, **values: Any
) -> list[tuple[str, Row]]:
    base = {"session": event.session, "attempt": event.attempt, "task": event.task, "run": event.run}
    return [
        _row("completions", completion=completion, kind=kind, seq=stored.sequence, time=stored.time, **base, **values)
    ]


def _captured(e: CompletionCaptured, s: Stored) -> list[tuple[str, Row]]:
    return _completion(
        e,
        s,
        "captured",
        e.completion,
        dialect=e.dialect,
        stream=int(e.stream),
        model=e.model,
        prompt_tokens=e.prompt.length,
        sampled_tokens=e.sampled.n,
        cached_tokens=e.cached_tokens,
        finish=e.finish,
        untrainable=e.untrainable,
        chain_class=e.chain_class,
        parent=e.parent,
        parent_by=e.parent_by,
        ambiguous=int(e.parent_ambiguous),
        context=e.context,
        context_exact=int(bool(e.context_exact)),
        context_faithful=int(e.context_faithful),
        additions=list(e.additions),
        policy_seq=e.policy_seq,
        version=e.versions[0].version if e.versions else "",
        version_spans=len(e.versions),
        temperature=e.sampling.temperature,
        engine=e.engine.name,
        replica=e.engine.replica,
        agent=e.agent,
        dropped=list(e.dropped),
        ttft_s=e.ttft_s,
        duration_s=e.duration_s,
    )


def _aborted(e: CompletionAborted, s: Stored) -> list[tuple[str, Row]]:
    return _completion(
        e,
        s,
        "aborted",
        e.completion,
        dialect=e.dialect,
        reason=e.reason,
        prompt_tokens=e.prompt_tokens,
        sampled_tokens=e.sampled.n if e.sampled else 0,
        duration_s=e.duration_s,
    )


def _undelivered(e: CompletionUndelivered, s: Stored) -> list[tuple[str, Row]]:
    return _completion(e, s, "undelivered", e.completion)


def _rejected(e: CompletionRejected, s: Stored) -> list[tuple[str, Row]]:
    return _completion(e, s, "rejected", e.completion, dialect=e.dialect, reason=e.reason)


def _evaluated(e: EvaluationEvaluated, s: Stored) -> list[tuple[str, Row]]:
    row = _row(
        "evaluations",
        session=e.session,
        attempt=e.attempt,
        evaluation=e.evaluation,
        seq=s.sequence,
        time=s.time,
        task=e.task,
        run=e.run,
        evaluator=e.evaluator,
        outcome=e.outcome,
        reward=e.reward,
        detail=e.detail[:2000],
        eval_s=e.eval_s,
    )
    return [row, *([_fact(e, evaluated=s.time, eval_s=e.eval_s)] if e.evaluation == "live" else [])]


def _reconstructed(e: BuildReconstructed, s: Stored) -> list[tuple[str, Row]]:
    counts = {
        "traces": e.traces,
        "trained_completions": e.trained_completions,
        "sampled_tokens": e.sampled_tokens,
        "exact_spans": e.exact_spans,
        "drifted_spans": e.drifted_spans,
    }
    row = _row(
        "builds",
        build=e.build,
        session=e.session,
        seq=s.sequence,
        time=s.time,
        task=e.task,
        run=e.run,
        rules=e.rules,
        rules_hash=e.rules_hash,
        ok=1,
        ambiguous=e.ambiguous,
        excluded=e.excluded,
        **counts,
    )
    live = e.build == "live"
    return [row, *([_fact(e, reconstructed=s.time, excluded=len(e.excluded), **counts)] if live else [])]


def _build_failed(e: BuildFailed, s: Stored) -> list[tuple[str, Row]]:
    return [
        _row(
            "builds",
            build=e.build,
            session=e.session,
            seq=s.sequence,
            time=s.time,
            task=e.task,
            run=e.run,
            rules_hash=e.rules_hash,
            ok=0,
            reason=e.reason[:2000],
        )
    ]


def _group(e: GroupClosed, s: Stored) -> list[tuple[str, Row]]:
    return [
        _row(
            "group_members",
            task=e.task,
            run=e.run,
            session=m.session,
            seq=s.sequence,
            time=s.time,
            closed_by=e.by,
            outcome=m.outcome or "",
            reward=m.reward,
            has_reward=_has(m.reward),
            trainable=int(m.trainable),
            reason=m.reason,
            attempts=m.attempts,
        )
        for m in e.members
    ]


def _published(e: PolicyPublished, s: Stored) -> list[tuple[str, Row]]:
    return [
        _row(
            "policies",
            version=e.version,
            policy_seq=e.policy_seq,
            kind="published",
            seq=s.sequence,
            time=s.time,
            trainer=e.trainer,
        )
    ]


def _activated(e: PolicyActivated, s: Stored) -> list[tuple[str, Row]]:
    return [
        _row(
            "policies",
            version=e.version,
            policy_seq=e.policy_seq,
            kind="activated",
            replica=e.replica,
            seq=s.sequence,
            time=s.time,
            update_s=e.update_s,
        )
    ]


def _consumed(e: TrainerConsumed, s: Stored) -> list[tuple[str, Row]]:
    return [
        _row(
            "consumed",
            trainer=e.trainer,
            epoch=e.epoch,
            step=e.step,
            trace=t.trace,
            session=t.session,
            build=e.build,
            seq=s.sequence,
            time=s.time,
            policy_seq=e.policy_seq,
            trace_policy_seq=t.policy_seq,
        )
        for t in e.traces
    ]


_HANDLERS: dict[type[Event], Callable[[Any, Stored], list[tuple[str, Row]]]] = {
    SessionAccepted: _accepted,
    SessionQueued: _queued,
    SessionClaimed: _claimed,
    SessionInitialized: _initialized,
    SessionRunning: _running,
    SessionSealed: _sealed,
    SessionExited: _exited,
    SessionArtifacts: _artifacts,
    SessionLost: _lost,
    SessionCompleted: _completed,
    SessionFailed: _failed,
    SessionCancelled: _cancelled,
    CompletionCaptured: _captured,
    CompletionAborted: _aborted,
    CompletionUndelivered: _undelivered,
    CompletionRejected: _rejected,
    EvaluationEvaluated: _evaluated,
    BuildReconstructed: _reconstructed,
    BuildFailed: _build_failed,
    GroupClosed: _group,
    PolicyPublished: _published,
    PolicyActivated: _activated,
    TrainerConsumed: _consumed,
}


def project_trace(stored: Stored) -> list[tuple[str, Row]]:
    """Rows of a message of the trace stream; manifests and closings have none of their own, but must be some.

    Raises Poison or FromTheFuture.
    """
    last = stored.subject.rpartition(".")[2]
    if last == "manifest":
        _ = read_message(TraceManifest, stored.body)
        return []
    if last == "closed":
        _ = read_message(GroupTraces, stored.body)
        return []
    t = read_message(Trace, stored.body)
    trained = [s for s in t.spans if s.trained]
    return [
        _row(
            "traces",
            trace=t.trace_id,
            run=t.run,
            build=t.build,
            task=t.task,
            session=t.session,
            number=t.number,
            seq=stored.sequence,
            time=stored.time,
            rules=t.rules,
            status=t.status,
            chain_class=t.chain_class,
            prompt_tokens=t.prompt_ids.n,
            response_tokens=t.response_ids.n,
            action_tokens=t.action_tokens,
            spans=len(trained),
            exact_spans=sum(s.context_exact for s in trained),
            drift=[s.drift_class for s in trained if s.drift_class],
            policy_seq_min=t.policy_seq_min,
            policy_seq_max=t.policy_seq_max,
        )
    ]
