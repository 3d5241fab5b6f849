"""Harnesses by name: the built-in ones, entry points in the group `polar.harnesses`, or `module:Class`.

`NAME@VERSION` is the same harness with another version of its program.
"""

from __future__ import annotations

import re
from dataclasses import replace

from polar_common.built_in import VERSION
from polar_common.errors import ConfigError
from polar_common.plugins import known_names, load_instance, located
from polar_gateway.harnesses.base import Harness, Recipe

__all__ = ["find", "names"]

_GROUP = "polar.harnesses"
_FIELD = "harness.name"
_HERE = "polar_gateway.harnesses"
_BUILT_IN = {
    "aider": f"{_HERE}.aider:Aider",
    "claude_code": f"{_HERE}.claude_code:ClaudeCode",
    "codex": f"{_HERE}.codex:Codex",
    "command": f"{_HERE}.command:Command",
    "gemini_cli": f"{_HERE}.gemini_cli:GeminiCli",
    "lm_eval": f"{_HERE}.lm_eval:LmEval",
    "mini_swe_agent": f"{_HERE}.mini_swe_agent:MiniSweAgent",
    "opencode": f"{_HERE}.opencode:OpenCode",
    "pi": f"{_HERE}.pi:Pi",
    "qwen_code": f"{_HERE}.qwen_code:QwenCode",
}


def names() -> list[str]:
    """All names that `find` knows."""
    return known_names(_GROUP, _BUILT_IN)


def find(name: str) -> Harness:
    """The harness of that name. `ConfigError`, with the known names, where there is none."""
    plain, at, version = name.partition("@")
    found = _found(plain)
    return _pinned(found, version) if at else found


def _pinned(harness: Harness, version: str) -> Harness:
    """The harness with another version of its program; the pinned one is the one that is tested."""
    if harness.recipe.kind == "none":
        raise ConfigError(f"{harness.name} installs nothing that has a version", _FIELD)
    if not re.fullmatch(VERSION, version):
        raise ConfigError(f"{version!r} is no version", _FIELD)
    first, *others = harness.recipe.packages
    packages = (first.removesuffix(harness.version) + version, *others)
    values = {"version": version, "recipe": replace(harness.recipe, packages=packages)}
    pinned: Harness = type(type(harness).__name__, (type(harness),), values)()
    return pinned


def _found(name: str) -> Harness:
    where = located("harness", name, _GROUP, _BUILT_IN, _FIELD)
    made = load_instance(where, Harness, _FIELD)  # type: ignore[type-abstract]
    if wrong := _incomplete(made):
        raise ConfigError(f"{where!r} {wrong}", _FIELD)
    return made


def _incomplete(harness: Harness) -> str:
    """What a user's own class lacks that others rely on; empty where nothing does."""
    if not isinstance(getattr(harness, "name", None), str) or not harness.name:
        return "has no `name`"
    if not isinstance(harness.version, str):
        return f"has a `version` that isn't a text: {harness.version!r}"
    if not isinstance(harness.recipe, Recipe):
        return f"has a `recipe` that isn't a Recipe: {harness.recipe!r}"
    if harness.recipe.kind != "none" and not harness.version:
        return "installs something and has no `version`"
    for field in ("apis", "known_args"):
        value = getattr(harness, field)
        if not isinstance(value, tuple | list | set | frozenset) or not all(isinstance(v, str) for v in value):
            return f"has `{field}` that aren't names: {value!r}"
    return ""
