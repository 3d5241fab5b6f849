"""Whoever ran something finds its sessions again, and why they didn't pass, without writing SQL."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from house_kit import POLAR, Live

from polar_common.ids import new_id

pytestmark = [pytest.mark.nats, pytest.mark.chdb]
TASKS = """
tasks:
  - {id: NAME-broken, instruction: x, harness: {name: command, args: {argv: [no-such-program]}},
     evaluator: {kind: answer, args: {expected: word}}}
  - {id: NAME-wrong, instruction: x, harness: {name: command, args: {argv: [echo, another]}},
     evaluator: {kind: answer, args: {expected: word}}}
  - {id: NAME-right, instruction: x, harness: {name: command, args: {argv: [echo, word]}},
     evaluator: {kind: answer, args: {expected: word}}}
"""


def tasks_file(folder: Path, text: str) -> str:
    path = folder / "tasks.yaml"
    path.write_text(text)
    return str(path)


def said(live: Live, *arguments: str, code: int = 0) -> tuple[str, str]:
    """What a command tells a person."""
    argv = [*POLAR, *arguments, "--data", str(live.data)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def name() -> str:
    return f"find-{new_id()[:8]}"


@pytest.fixture(scope="module")
def told(scripted_house: Live, tmp_path_factory: pytest.TempPathFactory, name: str) -> str:
    """What `polar run` printed."""
    file = tasks_file(tmp_path_factory.mktemp("run"), TASKS.replace("NAME", name))
    return said(scripted_house, "run", file, "--run", name, "--timeout", "200", code=1)[0]


def listed(live: Live, *arguments: str, count: int) -> list[dict[str, object]]:
    """The projection follows the log: what ended a moment ago may not be listed yet."""
    for _ in range(100):
        rows = live.polar("session", "list", *arguments)
        if len(rows) == count and all(r["state"] in ("completed", "failed") for r in rows):
            break
        time.sleep(0.2)
    return rows


def test_a_run_tells_which_sessions_didnt_pass_and_why(scripted_house: Live, told: str, name: str) -> None:
    rows = {str(r["task"]): r for r in listed(scripted_house, "--run", name, count=3)}
    after = told[told.index("not passed") :]
    broken, wrong = (str(rows[f"{name}-{which}"]["session"]) for which in ("broken", "wrong"))
    assert broken in after and "no-such-program" in after and "missing" in after
    assert wrong in after and "the answer is 'another'" in after
    assert after.index(broken) < after.index(wrong), "what says nothing about the model comes first"
    assert str(rows[f"{name}-right"]["session"]) not in after
    assert "harness fault: missing" in said(scripted_house, "session", "show", broken)[0]
    shown = said(scripted_house, "session", "show", wrong)[0]
    assert "failed, reward 0\n" in shown and "attempt 1  artifacts  exit 0\n" in shown


def test_what_is_misspelt_is_refused_before_anything_runs(scripted_house: Live, tmp_path: Path) -> None:
    for wrong, told in (
        ("name: comand", "tasks[0].harness.name: unknown harness 'comand'"),
        ("args: {argw: [x]}, name: command", "tasks[0].harness.args: command has no argument 'argw'"),
    ):
        text = f"tasks:\n  - {{id: a, instruction: x, harness: {{{wrong}}}, evaluator: {{command: make}}}}\n"
        _, error = said(scripted_house, "run", tasks_file(tmp_path, text), code=2)
        assert told in " ".join(error.split())


def test_sessions_are_listed_by_run_task_and_outcome(scripted_house: Live, told: str, name: str) -> None:
    rows = {str(r["task"]): r for r in listed(scripted_house, "--run", name, count=3)}
    shown = {key.removeprefix(f"{name}-"): (r["outcome"], r["reward"], r["cause"]) for key, r in rows.items()}
    assert shown == {
        "broken": ("harness_error", None, "missing"),
        "wrong": ("failed", 0.0, ""),
        "right": ("passed", 1.0, ""),
    }
    [by_task] = listed(scripted_house, "--task", f"{name}-wrong", count=1)
    assert by_task["session"] == rows[f"{name}-wrong"]["session"]
    [by_outcome] = listed(scripted_house, "--run", name, "--outcome", "harness_error", count=1)
    assert by_outcome["session"] == rows[f"{name}-broken"]["session"]
    assert "and more" in said(scripted_house, "session", "list", "--run", name, "--limit", "2")[0]
    assert said(scripted_house, "session", "list", "--run", "no'such\\\\run")[0] == "no such sessions\n"


def test_ones_own_task_id_is_enough_where_one_run_has_it(scripted_house: Live, told: str, name: str) -> None:
    listed(scripted_house, "--run", name, count=3)
    [found] = scripted_house.polar("task", f"{name}-wrong")
    assert (found["run"], found["id"]) == (name, f"{name}-wrong")


def test_what_was_handed_in_before_is_told(scripted_house: Live, tmp_path: Path, told: str, name: str) -> None:
    file = tasks_file(tmp_path, TASKS.replace("NAME", name))
    shown, warned = said(scripted_house, "run", file, "--run", name, code=1)
    assert "3 of 3 tasks; they don't run again" in warned and "not passed" in shown
    more = tasks_file(tmp_path, TASKS.replace("NAME", f"{name}-more"))
    assert "before" not in said(scripted_house, "submit", more, "--run", name)[1]
