"""What every command promises: help with an example, and JSON for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from polar_common.cli.main import app

_NO_JSON = ("run-service", "log permissions")
"""One prints nothing, the other a configuration file."""


def commands(group: TyperGroup, prefix: str = "") -> Iterator[tuple[str, Any]]:
    context = typer.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield f"{prefix}{name}", found
        if isinstance(found, TyperGroup):
            yield from commands(found, f"{prefix}{name} ")


ALL = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", ALL)
def test_every_command_has_an_example_and_json(name: str) -> None:
    command = ALL[name]
    options = {option for parameter in command.params for option in parameter.opts}
    assert "Example: " in (command.help or "")
    assert "--install-completion" not in options
    if not isinstance(command, TyperGroup) and name not in _NO_JSON:
        assert "--json" in options
