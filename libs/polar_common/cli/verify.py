"""`polar verify`: audit a log like a file system."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from polar_common.verify import CHECKS, LiveSource, Options, Report, audit

from .connect import with_bus
from .house import _DATA, DataOption, JsonOption
from .output import console, emit, table

__all__ = ["tell", "verify"]


def verify(
    data: DataOption = _DATA,
    settled: Annotated[
        bool, typer.Option("--settled", help="Nothing should be under way: what hasn't ended is a finding.")
    ] = False,
    build: Annotated[str, typer.Option(help="The build in which every session must be.")] = "live",
    rebuild: Annotated[bool, typer.Option(help="Build every trace anew and compare hashes.")] = True,
    json: JsonOption = False,
) -> None:
    """Audit the log: ends, conservation, references, hashes, groups. Exit code 1 if anything is wrong.

    Example: polar verify --json
    """
    columns = (TextColumn("{task.description}"), TextColumn("{task.completed:,.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=json or not console.is_terminal) as progress:
        shown = progress.add_task("reading", total=None)

        def on_progress(what: str, count: int) -> None:
            progress.update(shown, description=what, completed=count)

        options = Options(build=build, settled=settled, rebuild=rebuild, progress=on_progress)

        report = with_bus(data, lambda bus: audit(LiveSource(bus), options))
    tell(report, json)


def tell(report: Report, json: bool) -> None:
    """Print a report; exit code 1 unless it's clean."""
    if json:
        emit({"ok": report.ok, **asdict(report)})
    else:
        rows = [[name, report.counts.get(name, 0), report.notes.get(name, 0), text] for name, text in CHECKS.items()]
        table("", ["check", "findings", "notes", "what must hold"], rows)
        for f in report.findings:
            console.print(f"{f.severity} {f.check}: {f.where}: {f.detail}", markup=False)
        totals = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in report.totals.items() if count)
        console.print(f"{'clean' if report.ok else 'NOT CLEAN'} after {report.seconds:.1f} s: {totals}", markup=False)
    if not report.ok:
        raise typer.Exit(1)
