"""The database: the embedded engine or a server, behind the same client and the same SQL.

One process owns an embedded path, and its client isn't safe to share between threads: everything runs on one thread.
User queries get a fresh read-only client each, since a failed query leaves its settings behind on the embedded one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import clickhouse_connect
import orjson
import pyarrow as pa
from clickhouse_connect.driver.exceptions import ClickHouseError

from polar_common.errors import RequestError

from .domain import Rows
from .schema import TABLES, VERSION, Table, create_statements
from .views import statements

__all__ = ["Answer", "Store"]

T = TypeVar("T")
_ARROW: dict[str, Any] = {
    "String": pa.string(),
    "UInt64": pa.uint64(),
    "UInt8": pa.uint8(),
    "Int64": pa.int64(),
    "Float64": pa.float64(),
    "DateTime64(6, 'UTC')": pa.timestamp("us", "UTC"),
    "Array(String)": pa.list_(pa.string()),
    "Map(String, String)": pa.map_(pa.string(), pa.string()),
}
# NaN and infinities become null, 64-bit integers stay numbers.
_JSON = {"output_format_json_quote_64bit_integers": 0, "output_format_json_quote_denormals": 0}
_READS = re.compile(r"\s*(select|with|show|describe|desc|explain|exists)\b", re.IGNORECASE)
_LITERALS = re.compile(r"'(?:[^'\\]|\\.|'')*'|`[^`]*`|\"(?:[^\"\\]|\\.)*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Answer:
    """A query's result: column names, and rows of JSON-safe values."""

    columns: list[str]
    rows: list[list[Any]]


def arrow_type(kind: str) -> Any:
    base = kind.partition(" CODEC")[0]
    base = base.removeprefix("Nullable(").removesuffix(")") if base.startswith("Nullable") else base
    return _ARROW[base.removeprefix("LowCardinality(").removesuffix(")") if base.startswith("Low") else base]


class Store:
    """All database work of analytics."""

    def __init__(self, path: Path | None, dsn: str = "", *, max_rows: int = 10_000, max_s: int = 30) -> None:
        self._options: dict[str, Any] = {"dsn": dsn} if dsn else {"interface": "chdb", "path": str(path)}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="clickhouse")
        self._client: Any = None
        self._limits = {"max_result_rows": max_rows, "result_overflow_mode": "throw", "max_execution_time": max_s}
        self._schemas = {t.name: pa.schema([(c, arrow_type(k)) for c, k in t.columns.items()]) for t in TABLES}

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def open(self) -> None:
        """Connect and create what is missing. Tables of another schema version are dropped: the log has it all."""
        await self._on_thread(self._open)

    def _open(self) -> None:
        self._client = clickhouse_connect.get_client(**self._options)
        self._client.command("CREATE TABLE IF NOT EXISTS schema_version (v UInt64) ENGINE = MergeTree ORDER BY v")
        found = {r[0] for r in self._client.query("SELECT v FROM schema_version").result_rows}
        if found != {VERSION}:
            self._drop()
            self._client.command("TRUNCATE TABLE schema_version")
            self._client.command(f"INSERT INTO schema_version VALUES ({VERSION})")
        self._create()

    def _create(self) -> None:
        for statement in [*create_statements(), *statements()]:
            self._client.command(statement)

    def _drop(self) -> None:
        for table in TABLES:
            self._client.command(f"DROP TABLE IF EXISTS {table.name} SYNC")

    async def reset(self) -> None:
        """Throw everything away; the projection starts again from the log's beginning."""

        def work() -> None:
            self._drop()
            self._create()

        await self._on_thread(work)

    async def progress(self, stream: str) -> int:
        """Highest sequence of a stream that is in the tables."""

        def work() -> int:
            table = "trace_messages" if stream == "POLAR_TRACES" else "events"
            rows = self._client.query(f"SELECT max(seq) FROM {table} WHERE stream = '{stream}'").result_rows
            return int(rows[0][0] or 0)

        return await self._on_thread(work)

    async def insert(self, rows: Rows) -> None:
        """Insert one batch; the tables that mark progress come last."""

        def work() -> None:
            for table in TABLES:
                if found := rows.get(table.name):
                    self._client.insert_arrow(table.name, self._arrow(table, found))

        await self._on_thread(work)

    def _arrow(self, table: Table, rows: list[dict[str, Any]]) -> Any:
        columns = {c: [row[c] for row in rows] for c in table.columns}
        for name, kind in table.columns.items():
            if kind.startswith("Map"):
                columns[name] = [list(value.items()) for value in columns[name]]
        return pa.table(columns, schema=self._schemas[table.name])

    async def query(self, sql: str) -> Answer:
        """A user's read. Raises RequestError with the engine's words if it isn't one, is wrong, or too large."""
        checked = check_read(sql)
        return await self._on_thread(lambda: self._read(checked))

    def _read(self, sql: str) -> Answer:
        client = clickhouse_connect.get_client(**self._options)
        try:
            raw = client.raw_query(sql, settings={**_JSON, **self._limits, "readonly": 1}, fmt="JSONCompact")
            found = orjson.loads(raw)
            return Answer([column["name"] for column in found["meta"]], found["data"])
        except ClickHouseError as error:
            raise RequestError(str(error)[:2000], 400, "sql") from error
        finally:
            client.close()

    async def close(self) -> None:
        if self._client is not None:
            await self._on_thread(self._client.close)
        self._pool.shutdown()


def check_read(sql: str) -> str:
    """The statement without its final semicolon. Raises RequestError unless it is one reading statement."""
    text = sql.strip().rstrip(";").strip()
    bare = _LITERALS.sub(" ", text)
    if not _READS.match(bare):
        raise RequestError("only SELECT, WITH, SHOW, DESCRIBE, EXPLAIN and EXISTS are answered", 400, "sql")
    if ";" in bare:
        raise RequestError("one statement at a time", 400, "sql")
    if re.search(r"\b(outfile|format|settings)\b", bare, re.IGNORECASE):
        raise RequestError("INTO OUTFILE, FORMAT and SETTINGS aren't allowed", 400, "sql")
    return text
