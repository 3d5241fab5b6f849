"""`polar harness`: which agent programs there are, installing them, and trying one out on a house."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from polar_common.cli.output import console, emit, table
from polar_common.cli.waiting import Interrupted, interruptible
from polar_common.errors import ConfigError
from polar_gateway.harnesses import registry, toolchain
from polar_gateway.harnesses.base import Harness
from polar_gateway.smoke import house_of, jobs_of, tried

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Agent programs: list, install, try out.")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Names = Annotated[list[str], typer.Argument(help="Harnesses, each NAME or NAME@VERSION.")]
_COLUMNS = ("api", "calls", "spoken", "streamed", "exit", "outcome", "exact", "continued", "traces", "seconds", "ok")


@app.command("list")
def list_(json: JsonOption = False) -> None:
    """All harnesses: the pinned version, the model APIs each speaks, and which versions are installed.

    Example: polar harness list
    """
    rows = [_row(registry.find(name)) for name in registry.names()]
    if json:
        for row in rows:
            emit(row)
        return
    shown = [
        [r["name"], r["version"] or "-", ", ".join(r["apis"]) or "any", r["kind"], ", ".join(r["installed"]) or "-"]
        for r in rows
    ]
    table("", ["harness", "version", "APIs", "from", "installed"], shown)


def _row(harness: Harness) -> dict[str, Any]:
    kind = harness.recipe.kind
    return {
        "name": harness.name,
        "version": harness.version,
        "apis": list(harness.apis),
        "kind": kind,
        "installed": toolchain.installed(harness.name) if kind != "none" else [],
        "path": str(toolchain.path_of(harness)) if kind != "none" else "",
    }


@app.command("install")
def install(names: Names, json: JsonOption = False) -> None:
    """Install harnesses into the cache, so that no session has to wait for it. What is there is left as it is.

    Example: polar harness install pi codex@0.171.0
    """
    for harness in [registry.find(name) for name in names]:
        began = time.monotonic()
        path = toolchain.ensure(harness)
        told = {"name": harness.name, "version": harness.version, "path": str(path or "")}
        told["s"] = f"{time.monotonic() - began:.1f}"
        if json:
            emit(told)
        else:
            where = told["path"] or "nothing to install"
            console.print(f"{harness.name} {harness.version}: {where} ({told['s']} s)", markup=False)


@app.command("test")
def try_out(
    name: Annotated[str, typer.Argument(help="Harness, NAME or NAME@VERSION.")],
    data: Annotated[Path | None, typer.Option("--data", help="The house's directory; by default $POLAR_DATA.")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=10, help="Give up after this many seconds.")] = 600,
    json: JsonOption = False,
) -> None:
    """Let a harness write a small file, once over each API it speaks, and say what arrived.

    It runs on the house that runs, with its model, or else on a temporary one whose engine follows a script. Exit code
    1 unless every run ended with 0 and each of its calls was captured in an exact context.

    Example: polar harness test pi --json
    """
    harness = registry.find(name)
    if not jobs_of(name, harness):
        raise ConfigError(f"{harness.name} has no job of its own: give it a task", "name")
    toolchain.ensure(harness)
    try:
        with interruptible(), house_of(data) as (house, temporary):
            if temporary and not json:
                console.print("no house runs here: trying it on a temporary one", markup=False)
            rows = tried(house, name, harness, timeout_s, quiet=json)
    except Interrupted as stopped:
        raise typer.Exit(stopped.code) from None
    if json:
        for row in rows:
            emit(row)
    else:
        table(f"{harness.name} {harness.version}", _COLUMNS, [[row[c] for c in _COLUMNS] for row in rows])
        for row in rows:
            if row["detail"]:
                console.print(f"{row['api']}: {row['detail']}", markup=False)
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)
