"""Facts of a log in a temporary SQLite file, written in one pass and asked by `checks.py`.

A file, because a log may be larger than memory; without a journal, because a crash just means to audit again.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Facts"]

_TABLES: dict[str, str] = {
    # name: columns. `seq` is the message's sequence in its stream, `at` its log time in Unix seconds.
    "subjects": "key BLOB, stream TEXT, seq INTEGER",
    "tasks": "task TEXT, run TEXT, samples INTEGER, deadline REAL, seq INTEGER, at REAL",
    "task_sessions": "task TEXT, session TEXT",
    "sessions": "session TEXT, task TEXT, run TEXT, seq INTEGER, at REAL",
    "mentions": "session TEXT, what TEXT, seq INTEGER",
    "steps": "session TEXT, attempt INTEGER, name TEXT, rank INTEGER, seq INTEGER, at REAL, detail TEXT",
    "deadlines": "session TEXT, attempt INTEGER, until REAL",
    "ends": "session TEXT, kind TEXT, outcome TEXT, reward REAL, last_attempt INTEGER, evaluation TEXT, seq INTEGER,"
    " at REAL",
    "decided": "session TEXT, attempt INTEGER, seq INTEGER, at REAL, void TEXT",
    "completions": "session TEXT, attempt INTEGER, completion TEXT, kind TEXT, seq INTEGER, tokens INTEGER,"
    " policy INTEGER",
    "refs": "session TEXT, attempt INTEGER, completion TEXT, target TEXT, what TEXT, seq INTEGER",
    "blob_refs": "sha TEXT, size INTEGER, subject TEXT",
    "blobs": "sha TEXT, size INTEGER",
    "evaluations": "session TEXT, attempt INTEGER, evaluation TEXT, outcome TEXT, reward REAL, seq INTEGER",
    "builds": "build TEXT, session TEXT, attempt INTEGER, ok INTEGER, manifest TEXT, traces INTEGER, trained INTEGER,"
    " excluded INTEGER, tokens INTEGER, rules TEXT, rules_hash TEXT, run TEXT, task TEXT, seq INTEGER",
    "excluded": "build TEXT, session TEXT, completion TEXT, reason TEXT",
    "groups": "task TEXT, expected INTEGER, terminal INTEGER, trainable INTEGER, manner TEXT, seq INTEGER",
    "members": "task TEXT, session TEXT, outcome TEXT, reward REAL, trainable INTEGER, reason TEXT",
    "traces": "build TEXT, session TEXT, number INTEGER, id TEXT, tokens INTEGER, subject TEXT, seq INTEGER",
    "spans": "build TEXT, session TEXT, completion TEXT, number INTEGER, trained INTEGER, length INTEGER",
    "manifests": "build TEXT, session TEXT, hash TEXT, traces INTEGER, tokens INTEGER, seq INTEGER",
    "manifest_traces": "build TEXT, session TEXT, number INTEGER, id TEXT",
    "projections": "build TEXT, task TEXT, tokens INTEGER, traces INTEGER, seq INTEGER",
    "projected": "build TEXT, task TEXT, session TEXT, manifest TEXT",
    "dead": "consumer TEXT, stream TEXT, seq INTEGER, reason TEXT",
    "unread": "stream TEXT, seq INTEGER, subject TEXT, reason TEXT, newer INTEGER",
}

_INDEXES = (
    "sessions(session)", "sessions(task)", "steps(session, attempt)", "ends(session)", "decided(session)",
    "completions(session, completion)", "builds(session, build)", "excluded(build, session, completion)",
    "evaluations(session)", "spans(build, session, completion)", "traces(build, session, number)",
    "manifests(build, session)", "manifest_traces(build, session)", "blobs(sha)", "groups(task)", "members(task)",
    "dead(stream, seq)", "task_sessions(session)", "tasks(task)",
)  # fmt: skip

_BUFFER = 4000


class Facts:
    """A context manager: the file is gone at its end."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="polar-verify-")
        self._db = sqlite3.connect(Path(self._directory.name) / "facts.db", isolation_level=None)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-65536", "temp_store=FILE"):
            self._db.execute(f"PRAGMA {pragma}")
        for name, columns in _TABLES.items():
            self._db.execute(f"CREATE TABLE {name} ({columns})")
        self._waiting: dict[str, list[Sequence[Any]]] = {name: [] for name in _TABLES}
        self._insert = {
            name: f"INSERT INTO {name} VALUES ({','.join('?' * len(columns.split(',')))})"
            for name, columns in _TABLES.items()
        }

    def __enter__(self) -> Facts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()
        self._directory.cleanup()

    def add(self, table: str, *row: Any) -> None:
        """One row, in the order of the table's columns."""
        waiting = self._waiting[table]
        waiting.append(row)
        if len(waiting) >= _BUFFER:
            self._write(table)

    def index(self) -> None:
        """Call when everything has been added."""
        for table in _TABLES:
            self._write(table)
        for index in _INDEXES:
            name = "i_" + "".join(c if c.isalnum() else "_" for c in index)
            self._db.execute(f"CREATE INDEX {name} ON {index}")
        self._db.execute("ANALYZE")

    def run(self, sql: str) -> None:
        """A statement that makes facts of facts."""
        self._db.execute(sql)

    def rows(self, sql: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        """A query's rows, one at a time."""
        yield from self._db.execute(sql, values)

    def one(self, sql: str, *values: Any) -> Any:
        """The single value of a query."""
        return self._db.execute(sql, values).fetchone()[0]

    def _write(self, table: str) -> None:
        if self._waiting[table]:
            self._db.execute("BEGIN")
            self._db.executemany(self._insert[table], self._waiting[table])
            self._db.execute("COMMIT")
            self._waiting[table] = []
