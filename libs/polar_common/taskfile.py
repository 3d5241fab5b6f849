"""Task files: YAML with `tasks`, optional `defaults` merged under each of them, and directories turned into files."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from .built_in import check_arguments
from .errors import ConfigError
from .task_spec import TaskSpec

__all__ = ["MAX_FILE", "load_tasks", "where_of"]

MAX_FILE = 64 << 20
_MORE = 5
_TOP = {"run", "defaults", "tasks"}


def load_tasks(path: Path) -> tuple[str, list[TaskSpec]]:
    """The file's run name ("" if it gives none) and its tasks. Raises ConfigError naming the field."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise ConfigError(f"larger than {MAX_FILE >> 20} MB", str(path))
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"can't be read: {error.strerror}", str(path)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"not YAML: {error}", str(path)) from error
    if isinstance(content, list):
        content = {"tasks": content}
    if not isinstance(content, dict) or not isinstance(content.get("tasks"), list) or not content["tasks"]:
        raise ConfigError("needs a list `tasks`", str(path))
    if unknown := sorted(set(map(str, content)) - _TOP):
        raise ConfigError(f"unknown field; there are {', '.join(sorted(_TOP))}", unknown[0])
    defaults = content.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise ConfigError("must be a mapping", "defaults")
    tasks = [_task(path.parent, defaults, raw, number) for number, raw in enumerate(content["tasks"])]
    seen: dict[str, TaskSpec] = {}
    for number, task in enumerate(tasks):
        if seen.setdefault(task.id, task) != task:
            raise ConfigError(f"{task.id!r} is used twice with different bodies", f"tasks[{number}].id")
    return str(content.get("run") or ""), list(seen.values())


def _task(base: Path, defaults: Mapping[str, Any], raw: object, number: int) -> TaskSpec:
    where = f"tasks[{number}]"
    if not isinstance(raw, dict):
        raise ConfigError("must be a mapping", where)
    value = _from_source(_merged(defaults, raw), where)
    if (folder := value.pop("dir", None)) is not None:
        value["files"] = _read_dir(base, folder, f"{where}.dir") | value.get("files", {})
    evaluator = value.get("evaluator")
    if isinstance(evaluator, dict) and (folder := evaluator.pop("dir", None)) is not None:
        evaluator["files"] = _read_dir(base, folder, f"{where}.evaluator.dir") | evaluator.get("files", {})
    try:
        spec = TaskSpec.model_validate(value)
        # Here for all of the file at once: it's handed in by parts. Names are the house's to judge.
        check_arguments(spec)
    except ValidationError as error:
        raise _invalid(where, error) from error
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix(f"{error.where}: "), f"{where}.{error.where}") from error
    return spec


def _invalid(where: str, error: ValidationError) -> ConfigError:
    """All that is wrong with a task: the first, then the others in words."""
    first, *others = (
        (where_of(where, e["loc"]), "unknown field" if e["type"] == "extra_forbidden" else e["msg"])
        for e in error.errors()
    )
    more = "".join(f"; {place}: {said}" for place, said in others[:_MORE])
    more += f"; and {len(others) - _MORE} more" if len(others) > _MORE else ""
    return ConfigError(first[1] + more, first[0])


def _from_source(value: dict[str, Any], where: str) -> dict[str, Any]:
    """`from: {source: NAME, …}` fills in what a data set knows (entry points `polar.task_sources`); the task wins."""
    wanted = value.pop("from", None)
    if wanted is None:
        return value
    if not isinstance(wanted, dict) or not isinstance(wanted.get("source"), str):
        raise ConfigError("needs a `source`", f"{where}.from")
    found = {e.name: e for e in importlib.metadata.entry_points(group="polar.task_sources")}
    if (source := found.get(wanted["source"])) is None:
        raise ConfigError(f"unknown; there are: {', '.join(sorted(found))}", f"{where}.from.source")
    try:
        filled: dict[str, Any] = source.load()(**{k: v for k, v in wanted.items() if k != "source"})
    except TypeError as error:
        raise ConfigError(str(error), f"{where}.from") from error
    return _merged(filled, value)


def where_of(prefix: str, loc: tuple[int | str, ...]) -> str:
    """`tasks[3].harness.name` for pydantic's location."""
    out = prefix
    for step in loc:
        out += f"[{step}]" if isinstance(step, int) else f".{step}" if out else str(step)
    return out


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {k: _merged(v, {}) if isinstance(v, dict) else v for k, v in under.items()}
    for key, value in over.items():
        mine = out.get(key)
        out[key] = _merged(mine if isinstance(mine, dict) else {}, value) if isinstance(value, dict) else value
    return out


def _read_dir(base: Path, folder: object, where: str) -> dict[str, str]:
    if not isinstance(folder, str):
        raise ConfigError("must be a path", where)
    root = base / folder
    if not root.is_dir():
        raise ConfigError(f"{root} is no directory", where)
    files = {}
    for path in sorted(p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        try:
            files[str(path.relative_to(root))] = path.read_text()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} isn't text", where) from error
    return files
