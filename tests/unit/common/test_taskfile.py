"""Task files: defaults, directories, and errors that name the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_common.errors import ConfigError
from polar_common.taskfile import load_tasks

JUDGED = "evaluator: {command: 'true'}"
GOOD = f"tasks:\n  - {{id: a, instruction: do, harness: {{name: pi}}, {JUDGED}}}\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tasks.yaml"
    path.write_text(text)
    return path


def test_defaults_are_merged_under_each_task(tmp_path: Path) -> None:
    text = "run: r\ndefaults: {samples: 4, limits: {calls: 3}, harness: {name: pi}, evaluator: {command: make}}\n" + (
        "tasks:\n  - {id: a, instruction: x, limits: {session_s: 9}}\n  - {id: b, instruction: y, samples: 2}\n"
    )
    run, tasks = load_tasks(write(tmp_path, text))
    assert run == "r"
    assert [(t.id, t.samples, t.limits.calls) for t in tasks] == [("a", 4, 3), ("b", 2, 3)]
    assert tasks[0].limits.session_s == 9


def test_directories_become_files(tmp_path: Path) -> None:
    (tmp_path / "work/sub").mkdir(parents=True)
    (tmp_path / "work/sub/a.py").write_text("1")
    text = "tasks:\n  - {id: a, instruction: x, dir: work, harness: {name: pi}, evaluator: {command: make}}\n"
    assert load_tasks(write(tmp_path, text))[1][0].files == {"sub/a.py": "1"}


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("tasks:\n  - {id: a, instruction: x, harness: {name: pi}, colour: red}\n", "tasks[0].colour"),
        ("tasks:\n  - {id: a, instruction: x}\n", "tasks[0].harness"),
        ("tasks:\n  - {id: a, instruction: x, harness: {name: pi}, samples: 0}\n", "tasks[0].samples"),
        ("tasks:\n  - {id: a, instruction: x, harness: {name: pi, argz: 1}}\n", "tasks[0].harness.argz"),
        ("tasks:\n  - {id: a, instruction: x, harness: {name: pi}, files: {../x: y}}\n", "tasks[0].files"),
        ("tasks:\n  - {id: a, instruction: x, harness: {name: pi}, dir: nowhere}\n", "tasks[0].dir"),
        ("tasks:\n  - {id: a, from: {source: nope}, harness: {name: pi}}\n", "tasks[0].from.source"),
        (GOOD + f"  - {{id: a, instruction: other, harness: {{name: pi}}, {JUDGED}}}\n", "tasks[1].id"),
        (GOOD + "  - {id: b, instruction: x, harness: {name: pi}}\n", "tasks[1].evaluator.command"),
        (GOOD + f"  - {{id: b, instruction: x, harness: {{name: command}}, {JUDGED}}}\n", "tasks[1].harness.args"),
        ("tasks:\n  - just text\n", "tasks[0]"),
        ("taskz: []\ntasks: [{}]\n", "taskz"),
        ("tasks: []\n", "tasks.yaml"),
        ("{", "tasks.yaml"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tasks(write(tmp_path, text))
    assert caught.value.where.endswith(where)


def test_all_that_is_wrong_with_a_task_is_told_at_once(tmp_path: Path) -> None:
    text = "tasks:\n  - {id: a, instruction: x, harness: {name: pi}, colour: red, samples: 0, size: 1}\n"
    with pytest.raises(ConfigError) as caught:
        load_tasks(write(tmp_path, text))
    for said in ("tasks[0].samples: ", "tasks[0].colour: unknown field", "tasks[0].size: unknown field"):
        assert said in str(caught.value)


def test_a_name_that_only_the_house_knows_is_left_to_it(tmp_path: Path) -> None:
    text = f"tasks:\n  - {{id: a, instruction: x, harness: {{name: their_own, args: {{x: 1}}}}, {JUDGED}}}\n"
    assert load_tasks(write(tmp_path, text))[1][0].harness.name == "their_own"


def test_a_huge_instruction_is_refused(tmp_path: Path) -> None:
    text = f"tasks:\n  - {{id: a, instruction: {'x' * 1_100_000}, harness: {{name: pi}}}}\n"
    with pytest.raises(ConfigError) as caught:
        load_tasks(write(tmp_path, text))
    assert caught.value.where == "tasks[0].instruction"
