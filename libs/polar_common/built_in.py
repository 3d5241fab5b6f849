"""What is built in, by name, and the arguments that each takes: known before anything runs.

Ingest refuses a task by it at submission; the adapters (`polar_gateway.harnesses`, `polar_evaluator.evaluators`) read
their arguments through it. A class of the user's own (`module:Class`, or an entry point) says itself what it takes.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .errors import ConfigError
from .plugins import known_names, unknown
from .task_spec import EvaluatorSpec, TaskSpec

__all__ = [
    "EVALUATORS", "HARNESSES", "RUNTIMES", "VERSION", "AiderArgs", "AnswerArgs", "Args", "ClaudeCodeArgs", "CodexArgs",
    "CommandArgs", "GeminiCliArgs", "HumanEvalArgs", "LmEvalArgs", "MiniSweAgentArgs", "NoArgs", "OpenCodeArgs",
    "PiArgs", "QwenCodeArgs", "check_arguments", "check_command", "check_evaluator", "check_known", "check_names",
    "folders_of", "read_args", "servers_of", "text_of", "texts_of",
]  # fmt: skip

RUNTIMES = ("apptainer", "docker", "local")
VERSION = r"[0-9A-Za-z][0-9A-Za-z.+-]*"


def text_of(value: object) -> str:
    """Raises ValueError for what no command line can carry."""
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("must be a text")
    return value


def texts_of(value: object) -> list[str]:
    """Raises ValueError for anything but a list of texts."""
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) and "\0" not in v for v in value):
        raise ValueError("must be a list of texts")
    return list(value)


def folders_of(value: object) -> list[str]:
    """Skills: folders with a `SKILL.md`, relative to the working directory or absolute in it, HOME or `/tmp`."""
    folders = texts_of(value)
    names = [PurePosixPath(folder).name for folder in folders]
    for folder, name in zip(folders, names, strict=True):
        if name in ("", "..") or names.count(name) > 1:
            raise ValueError(f"must be folders with names of their own, not {folder!r}")
    return folders


def servers_of(value: object) -> dict[str, dict[str, object]]:
    """Tool servers: name → `{command, args, env}` or `{url, headers}`."""
    found: dict[str, dict[str, object]] = {}
    for name, server in value.items() if isinstance(value, Mapping) else [("", None)]:
        if not isinstance(server, Mapping) or ("command" in server) == ("url" in server):
            raise ValueError(f"{name!r} needs either `command` or `url`")
        found[str(name)] = {str(k): v for k, v in server.items()}
    return found


def _environment(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise ValueError("must map names to texts")
    return dict(value)


def _wanted(value: object) -> list[str]:
    wanted = [value] if isinstance(value, str) else value
    if not isinstance(wanted, list | tuple) or not wanted or not all(isinstance(w, str) and w for w in wanted):
        raise ValueError("must be a text or a list of texts")
    return list(wanted)


Text = Annotated[str, BeforeValidator(text_of)]
Texts = Annotated[list[str], BeforeValidator(texts_of)]
Folders = Annotated[list[str], BeforeValidator(folders_of)]
Servers = Annotated[dict[str, dict[str, object]], BeforeValidator(servers_of)]


class Args(BaseModel):
    """Arguments of one built-in. What else is in the mapping isn't its concern: a subclass may take more."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Options(Args):
    options: Texts = []
    """More of its own command-line options."""


class _Agent(_Options):
    mcp_servers: Servers = {}
    skills: Folders = []


class AiderArgs(_Options):
    files: Texts = []
    edit_format: Literal["whole", "diff", "udiff"] = "whole"


class ClaudeCodeArgs(_Agent):
    append_system_prompt: Text = ""
    allowed_tools: Texts = []
    disallowed_tools: Texts = []
    max_turns: Annotated[int, Field(ge=1)] | None = None


class CodexArgs(_Agent):
    pass


class CommandArgs(Args):
    argv: Texts = []
    script: Text = ""
    env: Annotated[dict[str, str], BeforeValidator(_environment)] = {}

    @model_validator(mode="after")
    def _one(self) -> Self:
        if bool(self.argv) == bool(self.script):
            raise ValueError("needs either `argv` or `script`")
        return self


class GeminiCliArgs(_Agent):
    pass


class LmEvalArgs(_Options):
    tasks: Annotated[Texts, Field(min_length=1)]
    include_path: Text = ""
    limit: Annotated[float, Field(gt=0)] | None = None
    concurrent: Annotated[int, Field(ge=1)] = 2


class MiniSweAgentArgs(_Options):
    pass


class OpenCodeArgs(_Agent):
    pass


class PiArgs(_Options):
    api: Literal["openai-chat", "openai-responses", "anthropic", "google"] = "openai-chat"
    tools: Texts = []
    skills: Texts = []


class QwenCodeArgs(_Agent):
    pass


HARNESSES: dict[str, type[Args]] = {
    "aider": AiderArgs,
    "claude_code": ClaudeCodeArgs,
    "codex": CodexArgs,
    "command": CommandArgs,
    "gemini_cli": GeminiCliArgs,
    "lm_eval": LmEvalArgs,
    "mini_swe_agent": MiniSweAgentArgs,
    "opencode": OpenCodeArgs,
    "pi": PiArgs,
    "qwen_code": QwenCodeArgs,
}


class AnswerArgs(Args):
    mode: Literal["exact", "contains", "regex"] = "exact"
    expected: Annotated[list[str], BeforeValidator(_wanted)]
    ignore_case: StrictBool = False

    @field_validator("expected")
    @classmethod
    def _patterns(cls, expected: list[str], info: ValidationInfo) -> list[str]:
        for pattern in expected if info.data.get("mode") == "regex" else ():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"{pattern[:200]!r} is no regular expression: {error}") from error
        return expected


class HumanEvalArgs(Args):
    test: Annotated[Text, Field(min_length=1)]
    entry_point: Text
    prompt: Text = ""
    file: Text = ""

    @field_validator("entry_point")
    @classmethod
    def _name(cls, value: str) -> str:
        if not value.isidentifier():
            raise ValueError("must be a function's name")
        return value


class NoArgs(Args):
    pass


EVALUATORS: dict[str, type[Args]] = {"answer": AnswerArgs, "command": NoArgs, "humaneval": HumanEvalArgs}
A = TypeVar("A", bound=Args)


def read_args(model: type[A], args: Mapping[str, object], where: str) -> A:
    """The arguments, typed. Raises ConfigError naming the field below `where`."""
    try:
        return model.model_validate(dict(args))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(_said(first), ".".join([where, *(str(part) for part in first["loc"])])) from error


def _said(error: Any) -> str:
    match error["type"]:
        case "value_error":
            return str(error["ctx"]["error"])
        case "missing":
            return "is needed"
        case "bool_type":
            return "must be true or false"
        case "literal_error":
            options = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
            return f"must be one of {options}, not {error['input']!r}"
    return str(error["msg"])


def check_names(spec: TaskSpec) -> None:
    """Refuse a harness, evaluator or runtime that nobody knows; whether a `module:Class` can be loaded, only they see
    who load it. Raises ConfigError naming the field."""
    harness, at, version = spec.harness.name.partition("@")
    _check_name("harness", harness, "polar.harnesses", HARNESSES, "harness.name")
    if at and not re.fullmatch(VERSION, version):
        raise ConfigError(f"{version!r} is no version", "harness.name")
    _check_name("evaluator", spec.evaluator.kind, "polar.evaluators", EVALUATORS, "evaluator.kind")
    _check_name("runtime", spec.runtime.kind, "polar.runtimes", RUNTIMES, "runtime.kind")


def _check_name(what: str, name: str, group: str, built_in: Iterable[str], where: str) -> None:
    module, colon, attribute = name.partition(":")
    if colon and not (module and attribute):
        raise ConfigError(f"{name!r} isn't of the form module:Class", where)
    if not colon and name not in (known := known_names(group, built_in)):
        raise unknown(what, name, known, where)


def check_arguments(spec: TaskSpec) -> None:
    """Refuse arguments that a built-in harness or evaluator doesn't take. Raises ConfigError naming the field."""
    name = spec.harness.name.partition("@")[0]
    if (model := HARNESSES.get(name)) is not None:
        check_known(name, model.model_fields, spec.harness.args, "harness.args")
        read_args(model, spec.harness.args, "harness.args")
    if spec.evaluator.kind in EVALUATORS:
        check_evaluator(spec.evaluator)


def check_known(name: str, known: Iterable[str], args: Mapping[str, object], where: str) -> None:
    """Refuse an argument that isn't among the known ones."""
    if unknown := sorted(set(args) - set(known)):
        raise ConfigError(f"{name} has no argument {unknown[0]!r}; it has: {', '.join(sorted(known)) or 'none'}", where)


def check_evaluator(spec: EvaluatorSpec) -> None:
    """Refuse what a built-in evaluator can't work with. Raises ConfigError naming the field."""
    model = EVALUATORS[spec.kind]
    check_known(spec.kind, model.model_fields, spec.args, "evaluator.args")
    read_args(model, spec.args, "evaluator.args")
    if spec.kind == "command":
        check_command(spec)


def check_command(spec: EvaluatorSpec) -> None:
    """The fields of the evaluator `command`, which has no arguments. Raises ConfigError naming the field."""
    if not spec.command.strip():
        raise ConfigError("needs a command, or another `kind` of evaluator", "evaluator.command")
    if spec.reward_file.startswith("/") or ".." in spec.reward_file.split("/"):
        raise ConfigError("must lie in the working directory", "evaluator.reward_file")
