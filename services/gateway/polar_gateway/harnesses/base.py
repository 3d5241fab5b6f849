"""What a harness is to the gateway: a pinned program, how it is installed, how it is launched, how it ends.

A harness runs unmodified. Its file says which arguments, environment and configuration files make it use one model at
one base URL, headless, and without asking anybody's permission. `launch` is a pure function; nothing is touched before
the gateway has uploaded `files` and executes `argv` in a runtime. Installing is `toolchain.py`'s.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import ClassVar, Literal, TypeVar

from polar_common.built_in import check_known, folders_of, servers_of, text_of, texts_of
from polar_common.errors import ConfigError

__all__ = ["ARGS", "TOOLCHAIN", "Exit", "Harness", "Launch", "LaunchContext", "Recipe"]

T = TypeVar("T")
ARGS = "harness.args"
TOOLCHAIN = "/polar/harness"
"""Where a toolchain is mounted in every sandbox."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What `toolchain.ensure` installs. `npm` and `pip` packages are exact pins; `node` is the least version."""

    kind: Literal["none", "npm", "pip"] = "none"
    packages: tuple[str, ...] = ()
    node: tuple[int, int] | None = None
    """Set where the harness needs a node to run; it is then put into the toolchain."""
    probe: str = ""
    """A path below the toolchain that must exist after the installation."""


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """Everything a launch depends on; the same context gives the same launch. Paths are as seen inside."""

    instruction: str
    workdir: str
    home: str
    base_url: str
    """The session's model URL without `/v1`: `http://127.0.0.1:P/s/KEY`."""
    api_key: str
    model: str
    context_window: int = 32_768
    """Tokens, prompt and answer together."""
    max_tokens_per_call: int = 4_096
    args: Mapping[str, object] = field(default_factory=dict)
    """The task's `harness.args`; each harness refuses those it doesn't know."""
    toolchain: str = TOOLCHAIN
    call_timeout_s: float = 600.0
    """How long the harness shall wait for one model call, where it can be told."""
    retries: int = 4
    """How often it shall repeat a failed call, where it can be told."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What to execute. `files`: absolute path → text, in the working directory or HOME, written before; `folders`:
    directory in HOME → folder of the task's that is copied there."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    """Empty for the working directory."""
    stdin: bytes | None = None
    folders: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exit:
    """How the harness says it ended; the gateway weighs it with timeouts, limits and completions."""

    kind: Literal["finished", "budget_exhausted", "harness_error"]
    reason: str = ""


_OVERFLOW = re.compile(
    r"context_length_exceeded|maximum context length|prompt is too long|input token count .{0,40}exceeds|"
    r"exceeds? the (?:model's )?(?:maximum )?context|context window|context is too large",
    re.IGNORECASE,
)


class Harness(ABC):
    """One agent program. Subclasses are stateless; one instance serves all sessions."""

    name: ClassVar[str]
    version: ClassVar[str] = ""
    """Of the program that `recipe` installs; empty where it installs nothing."""
    recipe: ClassVar[Recipe] = Recipe()
    apis: ClassVar[tuple[str, ...]] = ()
    """The model APIs it speaks here, the default first: `openai-chat`, `openai-responses`, `anthropic`, `google`."""
    known_args: ClassVar[frozenset[str]] = frozenset()
    session_header: ClassVar[str] = ""
    """The request header that carries the harness's own conversation id, where it sends one."""
    subagent_header: ClassVar[str] = ""
    """The request header by which a sub-agent's calls are told from the main loop's."""
    stops_group_only: ClassVar[bool] = False
    """Whether a signal to the first process alone is ignored by those it started."""

    @abstractmethod
    def launch(self, ctx: LaunchContext) -> Launch:
        """The command for one attempt. `ConfigError` for arguments that make no sense or an instruction that can't be
        passed on."""

    def classify_exit(self, exit_code: int, output_tail: str) -> Exit:
        """What the exit code and the end of the output say. 126 and 127 mean that it never started."""
        if exit_code == 0:
            return Exit("finished")
        if exit_code in (126, 127):
            return Exit("harness_error", f"{self.name} couldn't be started: {_last_line(output_tail)}")
        if _OVERFLOW.search(output_tail):
            return Exit("budget_exhausted", "the context window is full")
        return Exit("harness_error", f"{self.name} ended with {exit_code}: {_last_line(output_tail)}")

    def check(self, ctx: LaunchContext) -> None:
        """Refuse what no command line can carry, and arguments that this harness doesn't have."""
        if "\0" in ctx.instruction:
            raise ConfigError("contains a NUL byte, which no command line or prompt can carry", "instruction")
        check_known(self.name, self.known_args, ctx.args, ARGS)


# Reading a task's arguments in an adapter of one's own; the built-in ones have models in `polar_common.built_in`.


def text(args: Mapping[str, object], name: str, default: str = "") -> str:
    """A string argument. `ConfigError` for anything else."""
    return _read(text_of, args.get(name, default), name)


def texts(args: Mapping[str, object], name: str) -> list[str]:
    """A list of strings, empty by default. `ConfigError` for anything else."""
    return _read(texts_of, args.get(name, []), name)


def choice(args: Mapping[str, object], name: str, options: tuple[str, ...]) -> str:
    """One of `options`, the first by default. `ConfigError` for anything else."""
    value = text(args, name, options[0])
    if value not in options:
        raise ConfigError(f"must be one of {', '.join(options)}, not {value!r}", f"{ARGS}.{name}")
    return value


def servers(args: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """`mcp_servers`: name → `{command, args, env}` or `{url, headers}`. `ConfigError` for anything else."""
    return _read(servers_of, args.get("mcp_servers", {}), "mcp_servers")


def skills(args: Mapping[str, object], directory: str) -> dict[str, str]:
    """`skills`: folders with a `SKILL.md`, relative to the working directory or absolute in it, HOME or `/tmp`.

    Returns where in `directory` each goes, by its own name → the folder. `ConfigError` for anything else."""
    return placed(_read(folders_of, args.get("skills", []), "skills"), directory)


def placed(folders: Sequence[str], directory: str) -> dict[str, str]:
    """Where in `directory` each folder goes, by its own name → the folder."""
    return {f"{directory}/{PurePosixPath(folder).name}": folder for folder in folders}


def _read(as_: Callable[[object], T], value: object, name: str) -> T:
    try:
        return as_(value)
    except ValueError as error:
        raise ConfigError(str(error), f"{ARGS}.{name}") from error


def dump(value: object) -> str:
    """JSON for a configuration file, keys in the order given."""
    return json.dumps(value, indent=1, ensure_ascii=False)


def _last_line(tail: str) -> str:
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
