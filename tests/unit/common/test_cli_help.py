"""What every command promises: help that says what each option is, an example, and JSON for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from polar_common.cli.main import app


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
    words = (command.help or "").partition("Example: ")
    assert len(words[0].split()) > 3, "says what it does"
    assert words[2].startswith(("polar", "POLAR_")) and name.split()[0] in words[2]
    assert "--install-completion" not in options
    if not isinstance(command, TyperGroup):
        assert "--json" in options


@pytest.mark.parametrize("name", ALL)
def test_every_option_and_argument_says_what_it_is(name: str) -> None:
    assert [p.name for p in ALL[name].params if not p.help] == []


@pytest.mark.parametrize("name", [n for n, c in ALL.items() if not isinstance(c, TyperGroup)])
def test_an_example_is_one_that_its_command_takes(name: str) -> None:
    """Its options are the command's own."""
    example = ALL[name].help.partition("Example: ")[2].splitlines()[0]
    for call in example.split(" && "):
        words = call.split(" > ")[0].split()
        begin = words.index("polar") + 1
        chosen = next(n for n in sorted(ALL, key=len, reverse=True) if words[begin:][: len(n.split())] == n.split())
        known = {option for p in ALL[chosen].params for option in (*p.opts, *p.secondary_opts)}
        assert {w for w in words[begin:] if w.startswith("--")} <= known
