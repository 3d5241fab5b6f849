"""Dispatch: built-in commands, commands found as entry points, and errors as one line with what to do."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import httpx
import typer
from typer.core import TyperGroup

from polar_common import __version__
from polar_common.errors import ConfigError, PolarError
from polar_common.logs import configure

from .output import console, fail

__all__ = ["main"]

GROUP = "polar.commands"
_EXAMPLE = "Example:"
_BUILT_IN = {
    "up": "polar_common.cli.house:up",
    "down": "polar_common.cli.house:down",
    "status": "polar_common.cli.house:status",
    "doctor": "polar_common.cli.doctor:doctor",
    "run": "polar_common.cli.tasks:run",
    "submit": "polar_common.cli.tasks:submit",
    "task": "polar_common.cli.tasks:task",
    "session": "polar_common.cli.sessions:session",
    "query": "polar_common.cli.query:query",
    "verify": "polar_common.cli.verify:verify",
    "log": "polar_common.cli.log:log",
    "dlq": "polar_common.cli.dlq:dlq",
    "ledger": "polar_common.cli.dlq:ledger",
    "run-service": "polar_common.cli.house:run_service",
}


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _command(name: str, found: Any) -> Any:
    """A Typer app with one command becomes that command, with several a group; functions are commands."""
    if isinstance(found, typer.Typer):
        app = found
        # A shell completes `polar`, not a group of its commands.
        app._add_completion = False
    else:
        app = typer.Typer(add_completion=False)
        app.command(name)(found)
    command = typer.main.get_command(app)
    command.name = name
    if isinstance(command, TyperGroup) and _EXAMPLE not in (command.help or ""):
        command.help = "\n\n".join(filter(None, (command.help, _example(command))))
    return command


def _example(group: TyperGroup) -> str:
    """The example of a group's first command that has one."""
    helps = (group.commands[name].help or "" for name in sorted(group.commands))
    return next((_EXAMPLE + text.partition(_EXAMPLE)[2] for text in helps if _EXAMPLE in text), "")


class _Commands(TyperGroup):
    """Commands are imported only when they are asked for."""

    def _targets(self) -> dict[str, str]:
        return _BUILT_IN | {e.name: e.value for e in importlib.metadata.entry_points(group=GROUP)}

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self._targets())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        target = self._targets().get(cmd_name)
        return None if target is None else _command(cmd_name, _load(target))


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def polar(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Agentic reinforcement learning on any agent harness, on an immutable event log."""
    if version:
        console.print(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"{__version__}\n")
        return
    # Standard output is the command's alone: what is logged on the way would spoil `--json`.
    configure("cli", "warning")
    try:
        app()
    except ConfigError as error:
        fail(str(error), 2)
    except PolarError as error:
        fail(str(error), 1)
    except httpx.HTTPError as error:
        fail(f"the house doesn't answer ({error!r}); see `polar status`", 1)
