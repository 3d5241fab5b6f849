"""Evaluators by name: the built-in ones, entry points in the group `polar.evaluators`, or `module:Class`."""

from __future__ import annotations

from polar_common.plugins import known_names, load_instance, located

from .base import Evaluator

__all__ = ["find", "names"]

_GROUP = "polar.evaluators"
_FIELD = "evaluator.kind"
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
    place = located("evaluator", name, _GROUP, _BUILT_IN, _FIELD)
    return load_instance(place, Evaluator, _FIELD)  # type: ignore[type-abstract]
