"""`polar query`: read-only SQL on the analytics database."""

from __future__ import annotations

from typing import Annotated

import httpx
import typer

from polar_common.errors import ConfigError, PolarError
from polar_common.house import find_house

from .house import _DATA, DataOption, JsonOption
from .output import emit, records

__all__ = ["ask", "query", "quoted"]


def ask(sql: str, data: DataOption = _DATA) -> tuple[list[str], list[list[object]]]:
    """Columns and rows. Raises PolarError with the engine's own message."""
    found = find_house(data if data != _DATA else None)
    if not found.analytics:
        raise ConfigError("a remote house's tables are reached by POLAR_ANALYTICS_URL", "analytics_url")
    answer = httpx.post(f"{found.analytics}/v1/query", json={"sql": sql}, headers=found.headers, timeout=120)
    try:
        body = answer.json()
    except ValueError as error:
        raise PolarError(f"{answer.request.url}: {answer.status_code} {answer.text[:200]}") from error
    if answer.status_code != 200:
        raise PolarError(body.get("error", {}).get("message", answer.text))
    return body["columns"], body["rows"]


def quoted(text: str) -> str:
    """A string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def query(
    sql: Annotated[str, typer.Argument(help="A SELECT; tables: events, sessions, completions, traces, groups.")],
    data: DataOption = _DATA,
    json: JsonOption = False,
) -> None:
    """Ask the analytics database, in ClickHouse SQL, read-only.

    Example: polar query "SELECT outcome, count(), avg(reward) FROM sessions GROUP BY outcome"
    """
    columns, rows = ask(sql, data)
    if json:
        for row in rows:
            emit(dict(zip(columns, row, strict=True)))
    else:
        records(columns, rows)
