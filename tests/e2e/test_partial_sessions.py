"""Sessions that break off: agents that get nowhere until a limit, sub-agents that raise. They end with their reason,
what was captured stays, and a reward is only what an evaluator found."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from house_kit import Live

from polar_common.ids import new_id

pytestmark = [pytest.mark.nats, pytest.mark.chdb, pytest.mark.timeout(240)]

_AGENT = """
import json, os, urllib.error, urllib.request as u
history = []
def call(text):
    history.append({"role": "user", "content": text})
    body = json.dumps({"model": "policy", "messages": history}).encode()
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    with u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)) as answer:
        history.append(json.load(answer)["choices"][0]["message"])
"""
_LOOP = "while True: call('There is no such tool: call one of yours')\n"
_CAUGHT = """try:
    while True: call('There is no such tool: call one of yours')
except urllib.error.HTTPError as error:
    print(error.code)
"""
_SUB_AGENTS = """def part(number):
    global history
    history = []
    call(f'Part {number}')
    if number == 2: raise RuntimeError('the sub-agent broke')
    open(f'{number}.txt', 'w').close()
for number in (1, 2, 3): part(number)
"""


def task(name: str, agent: str, check: str, **limits: Any) -> dict[str, Any]:
    return {
        "id": name, "instruction": "x", "files": {"agent.py": _AGENT + agent},
        "harness": {"name": "command", "args": {"argv": ["python3", "agent.py"]}},
        "evaluator": {"kind": "command", "command": check}, "limits": {"attempt_s": 60, **limits},
    }  # fmt: skip


_TASKS = [
    task("crashes", _LOOP, "false", calls=3),
    task("ends", _CAUGHT, "false", calls=3),
    task("tokens", _LOOP, "false", total_tokens=40),
    task("judged", _SUB_AGENTS, "test -e 1.txt && ! test -e 3.txt"),
    task("unjudged", _SUB_AGENTS, "exit 0") | {"evaluator": {"command": "true", "reward_file": "nothing.json"}},
]


@pytest.fixture(scope="module")
def rows(scripted_house: Live, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("partial") / "tasks.yaml"
    path.write_text(yaml.safe_dump({"tasks": _TASKS}))
    name = f"run-{new_id()[:8]}"
    found = {r["id"]: r for r in scripted_house.polar("run", str(path), "--run", name, "--timeout", "200", code=1)}
    for row in found.values():
        (row["last"],) = scripted_house.polar("session", "show", row["session_ids"][0])[0]["attempts"]
    return found


@pytest.mark.parametrize("name", ["crashes", "ends", "tokens"])
def test_who_gets_nowhere_ends_at_a_limit_with_its_reason(rows: dict[str, dict[str, Any]], name: str) -> None:
    row = rows[name]
    limit = "limit of 40 tokens" if name == "tokens" else "limit of 3 calls"
    assert row["outcomes"] == {"budget_exhausted": 1}, row
    assert (row["last"]["fault"], row["last"]["cause"]) == ("agent", "limit")
    assert f"{limit} is used up" in row["last"]["detail"]
    assert row["last"]["exit_code"] == (0 if name == "ends" else 1)
    assert (row["rewards"], row["traces"], row["exact_share"]) == ([0.0], 1, 1.0)
    assert row["completions"] == 3 or name == "tokens"


def test_what_a_sub_agent_that_raises_left_is_judged_and_never_guessed(rows: dict[str, dict[str, Any]]) -> None:
    """Who lets a program crash must not win by it, and no verdict is no reward."""
    judged, unjudged = rows["judged"], rows["unjudged"]
    for row in (judged, unjudged):
        assert (row["last"]["exit_code"], row["completions"], row["traces"]) == (1, 2, 2)
        assert "the sub-agent broke" in row["last"]["log_tail"]
    assert (judged["outcomes"], judged["rewards"]) == ({"passed": 1}, [1.0])
    assert (unjudged["outcomes"], unjudged["rewards"]) == ({"infra_error": 1}, [])
