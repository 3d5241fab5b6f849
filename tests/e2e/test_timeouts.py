"""Time runs out in each stage of a session: it ends with a word on where, and what was captured is in traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from house_kit import Live

from polar_common.ids import new_id

pytestmark = [pytest.mark.nats, pytest.mark.chdb, pytest.mark.timeout(240)]

_ASK = """python3 -c '
import json, os, urllib.request as u
body = {"model": "policy", "messages": [{"role": "user", "content": "Say it"}]}
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), head)).read()
'
echo done > done.txt
"""
_KINDS = "tests.e2e.slow_runtime"


def task(name: str, script: str = "", **fields: Any) -> dict[str, Any]:
    """A model call, a file, then `script`; all in 20 seconds, one attempt."""
    limits = {"attempt_s": 20, "session_s": 40, "attempts": 1, "postrun_reserve_s": 5, **fields.pop("limits", {})}
    runtime = {"kind": "local", "work_class": "local", **fields.pop("runtime", {})}
    evaluator = {"kind": "command", "command": "test -e done.txt", "timeout_s": 20, **fields.pop("evaluator", {})}
    harness = {"name": "command", "args": {"script": _ASK + script}}
    return {
        "id": name, "instruction": "x", "harness": harness, "runtime": runtime, "evaluator": evaluator,
        "limits": limits, **fields,
    }  # fmt: skip


_STAGES = [
    task("prepare", runtime={"prepare": [{"exec": "sleep 600"}]}, limits={"attempt_s": 6}),
    task("step", runtime={"prepare": [{"exec": "sleep 600", "timeout_s": 2}]}),
    task("running", "sleep 600", limits={"attempt_s": 12}),
    task("postrun", runtime={"kind": f"{_KINDS}:SlowDiff"}, limits={"attempt_s": 12}),
    task("evaluating", evaluator={"command": "sleep 600", "timeout_s": 3}),
    task("fine"),
]


def run(house: Live, directory: Path, tasks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Summary rows by task; `last` is the attempt, `shown` the session. Some of them end as infra or harness errors."""
    name, path = f"run-{new_id()[:8]}", directory / "tasks.yaml"
    path.write_text(yaml.safe_dump({"tasks": tasks}))
    found = {r["id"]: r for r in house.polar("run", str(path), "--run", name, "--timeout", "200", code=1)}
    for row in found.values():
        row["shown"] = house.polar("session", "show", row["session_ids"][0])[0]
        (row["last"],) = row["shown"]["attempts"]
    return found


@pytest.fixture(scope="module")
def rows(scripted_house: Live, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run(scripted_house, tmp_path_factory.mktemp("timeouts"), _STAGES)


@pytest.mark.parametrize("stage", ["running", "postrun", "evaluating", "fine"])
def test_what_was_captured_before_the_timeout_is_in_a_trace(rows: dict[str, dict[str, Any]], stage: str) -> None:
    row = rows[stage]
    assert (row["completions"], row["traces"], row["exact_share"]) == (1, 1, 1.0), row["shown"]
    assert row["shown"]["phase"] == "completed"


def test_each_stage_ends_with_its_own_word(rows: dict[str, dict[str, Any]]) -> None:
    told = {
        name: (next(iter(row["outcomes"])), row["last"]["timed_out"], row["last"]["fault"], row["last"]["cause"])
        for name, row in rows.items()
    }
    assert told == {
        "prepare": ("infra_error", True, "infra", "queue_expired"),
        "step": ("harness_error", False, "harness", "prepare_failed"),
        "running": ("passed", True, "agent", "timeout"),
        "postrun": ("failed", False, "agent", "resource_exhausted"),
        "evaluating": ("failed", False, "none", ""),
        "fine": ("passed", False, "none", ""),
    }
    assert "collecting took more than" in rows["postrun"]["last"]["detail"]
    for name in ("prepare", "step"):
        assert (rows[name]["completions"], rows[name]["traces"]) == (0, 0)


def test_a_patch_that_takes_for_ever_costs_neither_log_nor_answer(
    rows: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    last = rows["postrun"]["last"]
    assert last["patch"] is None
    assert rows["running"]["last"]["patch"] is not None
    assert 0 < last["run_s"] < 10


@pytest.mark.slow
def test_an_evaluators_own_preparation_that_hangs_is_nobodys_reward(scripted_house: Live, tmp_path: Path) -> None:
    """It is tried again before the session is given up; the call stays in its trace."""
    hangs = task("hangs", evaluator={"prepare": [{"exec": "sleep 600", "timeout_s": 2}]})
    row = run(scripted_house, tmp_path, [hangs])["hangs"]
    assert (row["outcomes"], row["rewards"]) == ({"infra_error": 1}, [])
    assert row["not_passed"][0]["cause"] == "evaluation" and "sleep 600" in row["not_passed"][0]["detail"]
    assert (row["completions"], row["traces"]) == (1, 1)


@pytest.mark.slow
def test_a_host_that_doesnt_get_a_runtime_ready_is_left_in_the_end(scripted_house: Live, tmp_path: Path) -> None:
    """What was begun is waited for, up to a minute, before it is removed."""
    hangs = task("hangs", runtime={"kind": f"{_KINDS}:SlowStart"}, limits={"attempt_s": 6})
    row = run(scripted_house, tmp_path, [hangs])["hangs"]
    assert row["outcomes"] == {"infra_error": 1}
    assert (row["last"]["timed_out"], row["last"]["fault"], row["last"]["cause"]) == (True, "infra", "queue_expired")
    assert (row["completions"], row["traces"]) == (0, 0)
