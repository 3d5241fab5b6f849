"""The analytics tables. All are rebuildable from the log, and inserting a message twice changes nothing.

Facts with one row per message are ReplacingMergeTree by natural key, read with FINAL; what several events tell about
one session is an AggregatingMergeTree of `max` columns, where every event fills in its own.
`events` is written last in every batch, so its highest sequence is the projection's progress.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TABLES", "VERSION", "Table", "create_statements"]

VERSION = 2
"""Raise it when a table changes: the projection is then rebuilt from the log."""

S, U, F, B, T = "String", "UInt64", "Float64", "UInt8", "DateTime64(6, 'UTC')"
NF, NI = "Nullable(Float64)", "Nullable(Int64)"
"""NULL where there is none: a reward may be negative, and so may an exit code."""
LS = "LowCardinality(String)"


@dataclass(frozen=True, slots=True)
class Table:
    """`columns`: name → ClickHouse type. `folded`: columns outside the key are `SimpleAggregateFunction(max, …)`."""

    name: str
    columns: dict[str, str]
    key: tuple[str, ...]
    folded: bool = False
    partition: str = ""


_SESSION = {
    "session": S, "task": S, "run": S, "idx": U, "harness": S, "harness_version": S, "runtime": S, "isolation": S,
    "work_class": S, "model": S, "gateway": S, "attempts": U, "accepted": T, "queued": T, "claimed": T,
    "initialized": T, "running": T, "sealed": T, "exited": T, "artifacts": T, "reconstructed": T, "evaluated": T,
    "ended": T, "state": S, "outcome": S, "reward": NF, "has_reward": B, "exit_code": NI, "timed_out": B,
    "fault": S, "cause": S, "run_s": F, "init_s": F, "ready_s": F, "postrun_s": F, "eval_s": F, "peak_rss_mb": F,
    "traces": U, "trained_completions": U, "excluded": U, "sampled_tokens": U, "exact_spans": U, "drifted_spans": U,
}  # fmt: skip

TABLES: tuple[Table, ...] = (
    Table("session_facts", _SESSION, ("session",), folded=True),
    Table(
        "completions",
        {
            "session": S,
            "attempt": U,
            "completion": S,
            "kind": LS,
            "seq": U,
            "time": T,
            "task": S,
            "run": LS,
            "dialect": LS,
            "stream": B,
            "model": LS,
            "prompt_tokens": U,
            "sampled_tokens": U,
            "cached_tokens": U,
            "finish": LS,
            "untrainable": LS,
            "reason": LS,
            "chain_class": LS,
            "parent": S,
            "parent_by": LS,
            "ambiguous": B,
            "context": LS,
            "context_exact": B,
            "context_faithful": B,
            "additions": "Array(String)",
            "policy_seq": U,
            "version": LS,
            "version_spans": U,
            "temperature": F,
            "engine": LS,
            "replica": LS,
            "agent": S,
            "dropped": "Array(String)",
            "ttft_s": F,
            "duration_s": F,
        },
        ("session", "completion", "kind"),
    ),
    Table(
        "attempts",
        {
            "session": S,
            "attempt": U,
            "task": S,
            "run": S,
            "gateway": S,
            "claimed": T,
            "ended": T,
            "end": S,
            "exit_code": NI,
            "fault": S,
            "cause": S,
            "detail": S,
            "run_s": F,
        },
        ("session", "attempt"),
        folded=True,
    ),
    Table(
        "evaluations",
        {
            "session": S,
            "attempt": U,
            "evaluation": LS,
            "seq": U,
            "time": T,
            "task": S,
            "run": LS,
            "evaluator": LS,
            "outcome": LS,
            "reward": NF,
            "detail": S,
            "eval_s": F,
        },
        ("session", "evaluation"),
    ),
    Table(
        "builds",
        {
            "build": LS,
            "session": S,
            "seq": U,
            "time": T,
            "task": S,
            "run": LS,
            "rules": LS,
            "rules_hash": LS,
            "ok": B,
            "reason": S,
            "traces": U,
            "trained_completions": U,
            "sampled_tokens": U,
            "exact_spans": U,
            "drifted_spans": U,
            "ambiguous": U,
            "excluded": "Map(String, String)",
        },
        ("build", "session"),
    ),
    Table(
        "traces",
        {
            "trace": S,
            "run": LS,
            "build": LS,
            "task": S,
            "session": S,
            "number": U,
            "seq": U,
            "time": T,
            "rules": LS,
            "status": LS,
            "chain_class": LS,
            "prompt_tokens": U,
            "response_tokens": U,
            "action_tokens": U,
            "spans": U,
            "exact_spans": U,
            "drift": "Array(String)",
            "policy_seq_min": U,
            "policy_seq_max": U,
        },
        ("build", "session", "number"),
    ),
    Table(
        "group_members",
        {
            "task": S,
            "run": LS,
            "session": S,
            "seq": U,
            "time": T,
            "closed_by": LS,
            "outcome": LS,
            "reward": NF,
            "has_reward": B,
            "trainable": B,
            "reason": LS,
            "attempts": U,
        },
        ("task", "session"),
    ),
    Table(
        "policies",
        {"version": S, "policy_seq": U, "replica": S, "kind": LS, "seq": U, "time": T, "trainer": LS, "update_s": F},
        ("version", "kind", "replica"),
    ),
    Table(
        "consumed",
        {
            "trainer": LS,
            "epoch": U,
            "step": U,
            "trace": S,
            "session": S,
            "build": LS,
            "seq": U,
            "time": T,
            "policy_seq": U,
            "trace_policy_seq": U,
        },
        ("trainer", "epoch", "step", "trace"),
    ),
    Table(
        "trace_messages",
        {"stream": LS, "seq": U, "subject": S, "time": T},
        ("stream", "seq"),
    ),
    Table(
        "events",
        {
            "stream": LS,
            "seq": U,
            "time": T,
            "subject": S,
            "kind": LS,
            "run": LS,
            "task": S,
            "session": S,
            "attempt": U,
            "event_id": S,
            "producer": LS,
            "bytes": U,
            "body": "String CODEC(ZSTD(3))",
        },
        ("stream", "seq"),
    ),
)


def create_statements(cluster: str = "", ttl_days: int = 0) -> list[str]:
    """CREATE TABLE statements; on a cluster the tables are replicated."""
    return [_create(t, cluster, ttl_days) for t in TABLES]


def _create(table: Table, cluster: str, ttl_days: int) -> str:
    columns = []
    for name, kind in table.columns.items():
        base, _, codec = kind.partition(" CODEC")
        folded = table.folded and name not in table.key
        shown = f"SimpleAggregateFunction(max, {base})" if folded else base
        columns.append(f"    {name} {shown}{' CODEC' + codec if codec else ''}")
    engine = "AggregatingMergeTree" if table.folded else "ReplacingMergeTree"
    version = "" if table.folded or "seq" in table.key else "seq"
    where = f" ON CLUSTER {cluster}" if cluster else ""
    kind = f"Replicated{engine}({version})" if cluster else f"{engine}({version})"
    ttl = f"\nTTL toDateTime(time) + INTERVAL {ttl_days} DAY" if ttl_days and "time" in table.columns else ""
    body = ",\n".join(columns)
    key = ", ".join(table.key)
    return f"CREATE TABLE IF NOT EXISTS {table.name}{where} (\n{body}\n) ENGINE = {kind}\nORDER BY ({key}){ttl}"
