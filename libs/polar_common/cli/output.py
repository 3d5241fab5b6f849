"""What commands print: tables for people, one JSON object a line for scripts (`--json`)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import orjson
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

__all__ = ["console", "emit", "fail", "records", "table", "warn"]

_IDS = ("session", "completion", "trace")
"""Columns that stay whole, as somebody will copy them: but for a terminal in which nothing else would be left."""
_NARROW = 60
_PIPE_COLUMNS = 200
"""A pipe has no width: wide enough that ids stay whole."""


_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(
    range(127, 160), 0xFFFD
)
"""Control characters → what stands for them: a model or a harness may have written them, and terminals obey them."""


class _Console(Console):
    """Prints text as text: nothing in it moves the cursor, colours or retitles a terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(segment.text.translate(_VISIBLE), segment.style)


def _console(*, stderr: bool = False) -> Console:
    made = _Console(stderr=stderr, highlight=False, soft_wrap=True)
    return made if made.is_terminal else _Console(stderr=stderr, highlight=False, soft_wrap=True, width=_PIPE_COLUMNS)


console = _console()
_errors = _console(stderr=True)


def emit(value: Any) -> None:
    """One JSON object on one line of standard output."""
    sys.stdout.write(orjson.dumps(value, default=str).decode() + "\n")
    sys.stdout.flush()


def warn(text: str) -> None:
    _errors.print(text, style="yellow", markup=False)


def fail(text: str, code: int = 1) -> NoReturn:
    """Say what happened and end."""
    _errors.print(f"polar: {text}", style="red", markup=False)
    raise SystemExit(code)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table; numbers are right-aligned. Cells are plain text, never markup: they may come from a harness."""
    out = Table(title=title or None, title_justify="left", header_style="bold", pad_edge=False, box=None)
    whole = console.width >= _NARROW
    for index, name in enumerate(columns):
        number = any(isinstance(r[index], int | float) for r in rows)
        out.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=whole and name in _IDS)
    for row in rows:
        out.add_row(*(Text(_cell(c).translate(_VISIBLE)) for c in row))
    console.print(out)


def records(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table where its cells fit into the width that there is, else one field a line, so that ids stay whole."""
    cells = [[str(c) for c in columns], *([_cell(v) for v in row] for row in rows)]
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in zip(*cells, strict=True)]
    if sum(widths) + len(widths) - 1 <= console.width:
        table("", columns, rows)
        return
    name_width = max(len(c) for c in columns)
    for number, row in enumerate(cells[1:], 1):
        console.print(f"── row {number}", markup=False, style="dim")
        for name, cell in zip(columns, row, strict=True):
            console.print(f"{name:<{name_width}}  {cell}", markup=False)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
