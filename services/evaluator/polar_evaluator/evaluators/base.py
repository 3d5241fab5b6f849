"""What an evaluator is: it judges what an attempt left behind, in a clean copy of the task where it needs one.

Variants are one file each (`command.py`, `answer.py`, `humaneval.py`, or a user's own class). What an agent wrote is
never run or imported in the evaluator's process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from polar_common.built_in import check_known
from polar_common.task_spec import EvaluatorSpec, TaskSpec
from polar_runtime import Runtime

__all__ = ["ARGS", "Case", "Clean", "Evaluator", "Verdict"]


ARGS = "evaluator.args"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reward` None: 1 where passed, else 0. `log` is what the evaluation printed, kept for people."""

    passed: bool
    reward: float | None = None
    exit_code: int | None = None
    detail: str = ""
    log: bytes = b""
    details: Mapping[str, Any] = field(default_factory=dict)
    trace_rewards: Mapping[str, float] = field(default_factory=dict)
    """By completion id."""


class Clean(Protocol):
    """Makes a clean copy: a new runtime with the task's files, its preparation, the agent's patch, and then the
    evaluator's own files; gone when the block ends.

    Raises EvaluationError or RuntimeUnavailable where that can't be done; that says nothing about the agent.
    """

    def __call__(self) -> AbstractAsyncContextManager[Runtime]: ...


@dataclass(frozen=True, slots=True)
class Case:
    """What is judged. `answer` is the agent's standard output, `patch` its change of the working directory."""

    task: TaskSpec
    answer: bytes
    patch: bytes
    clean: Clean
    log_bytes: int = 2 << 20

    @property
    def spec(self) -> EvaluatorSpec:
        return self.task.evaluator


class Evaluator(ABC):
    """Stateless; one instance serves all evaluations."""

    name: ClassVar[str]
    known_args: ClassVar[frozenset[str]] = frozenset()

    def check(self, spec: EvaluatorSpec) -> None:
        """Refuse a spec that makes no sense, and arguments that this evaluator doesn't have. Raises ConfigError naming
        the field."""
        check_known(spec.kind, self.known_args, spec.args, ARGS)

    @abstractmethod
    async def evaluate(self, case: Case) -> Verdict:
        """Judge. Raises ConfigError for the spec's faults, EvaluationError for the evaluator's own, RuntimeUnavailable
        for the host's."""
