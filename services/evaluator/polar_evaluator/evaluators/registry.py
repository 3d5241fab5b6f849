"""Evaluators by name: the built-in ones, entry points in the group `polar.evaluators`, or `module:Class`."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from polar_common.built_in import known_names
from polar_common.errors import ConfigError

from .base import Evaluator

__all__ = ["find", "names"]

_GROUP = "polar.evaluators"
_HERE = "polar_evaluator.evaluators"
_BUILT_IN = {
    "answer": f"{_HERE}.answer:AnswerEvaluator",
    "command": f"{_HERE}.command:CommandEvaluator",
    "humaneval": f"{_HERE}.humaneval:HumanEvalEvaluator",
}


def names() -> list[str]:
    """All names that `find` knows."""
    return known_names(_GROUP, _BUILT_IN)


def find(name: str) -> Evaluator:
    """The evaluator of that name. `ConfigError`, with the known names, where there is none."""
    where = _BUILT_IN.get(name) or next((e.value for e in entry_points(group=_GROUP) if e.name == name), name)
    module, colon, attribute = where.partition(":")
    if not colon:
        known = ", ".join(names())
        raise ConfigError(f"unknown evaluator {name!r}; known: {known}, or module:Class", "evaluator.kind")
    try:
        found = getattr(importlib.import_module(module), attribute)
        if not (isinstance(found, type) and issubclass(found, Evaluator)):
            raise ConfigError(f"{where!r} isn't an Evaluator", "evaluator.kind")
        made: Evaluator = found()
    except ConfigError:
        raise
    except Exception as error:
        # A user's own module may raise anything.
        raise ConfigError(f"cannot load {where!r}: {error!r}", "evaluator.kind") from error
    return made
