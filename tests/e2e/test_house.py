"""The main job on a whole house: real log, real ClickHouse engine, real harness CLI, scripted engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from house_kit import Live

from polar_common.bus import Bus, follow
from polar_common.house.layout import find_house
from polar_common.ids import new_id
from polar_common.topology import events_stream

pytestmark = [pytest.mark.nats, pytest.mark.chdb, pytest.mark.harness]

ASK = """
import json, os, urllib.request as u
body = {"model": os.environ["POLAR_MODEL"], "messages": [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]}
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), head)
print(json.load(u.urlopen(request))["choices"][0]["message"]["content"])
"""


def tasks_file(tmp_path: Path, text: str) -> str:
    (tmp_path / "ask").mkdir(exist_ok=True)
    (tmp_path / "ask/ask.py").write_text(ASK)
    path = tmp_path / "tasks.yaml"
    path.write_text(text)
    return str(path)


async def count_log(url: str, run: str) -> Counter[str]:
    """Event kinds of a run, counted over the log itself."""
    bus = await Bus.connect(url, "test/count")
    found: Counter[str] = Counter()
    done = asyncio.Event()

    async def read() -> None:
        async for stored in follow(bus, events_stream("s1"), ["polar.events.>"], on_caught_up=done.set):
            if stored.event.run == run:
                found[stored.event.kind] += 1

    reading = asyncio.ensure_future(read())
    await asyncio.wait_for(done.wait(), 30)
    await asyncio.sleep(0.2)
    reading.cancel()
    await bus.close()
    return found


async def test_pi_writes_a_file_and_table_query_and_log_agree(scripted_house: Live, tmp_path: Path) -> None:
    run = f"run-{new_id()[:8]}"
    file = tasks_file(
        tmp_path,
        """
defaults: {samples: 2, limits: {attempt_s: 90, session_s: 180}}
tasks:
  - {id: ask, instruction: "Say it", dir: ask, harness: {name: command, args: {argv: [python3, ask.py]}},
     evaluator: {kind: answer, args: {expected: Done, mode: contains}}}
  - {id: pi, instruction: "Create hello.txt containing hi", harness: {name: pi},
     evaluator: {kind: command, command: 'test "$(cat hello.txt)" = hi'}}
""",
    )
    rows = {r["id"]: r for r in scripted_house.polar("run", file, "--run", run, "--timeout", "240")}
    assert rows["pi"]["outcomes"] == {"passed": 2}
    assert rows["ask"]["outcomes"] == {"passed": 2}
    # pi calls twice (tool, then answer): one conversation, one trace, every span exact.
    assert (rows["pi"]["completions"], rows["pi"]["traces"], rows["pi"]["exact_share"]) == (4, 2, 1.0)
    log = await count_log(find_house(scripted_house.data).nats, run)
    assert log["completion.captured"] == 6
    assert log["session.completed"] == log["build.reconstructed"] == log["evaluation.evaluated"] == 4
    assert log["group.closed"] == 2
    for _ in range(50):
        asked = scripted_house.sql(
            f"SELECT count() AS sessions, sum(traces) AS traces, sum(sampled_tokens) AS tokens, sum(reward) AS reward "
            f"FROM sessions WHERE run = '{run}' AND state = 'completed'"
        )[0]
        if asked["sessions"] == 4:
            break
        await asyncio.sleep(0.2)
    assert asked["sessions"] == 4
    assert asked["traces"] == sum(r["traces"] for r in rows.values())
    assert asked["tokens"] == sum(r["sampled_tokens"] for r in rows.values())
    assert asked["reward"] == sum(sum(r["rewards"]) for r in rows.values())
    shown = scripted_house.polar("session", "show", rows["pi"]["session_ids"][0])[0]
    assert [a["exit_code"] for a in shown["attempts"]] == [0]
    assert shown["completions"] == {"captured": 2}


def test_the_same_file_again_runs_nothing_twice(scripted_house: Live, tmp_path: Path) -> None:
    run = f"run-{new_id()[:8]}"
    text = (
        'tasks:\n  - {id: a, instruction: "x", harness: {name: command, args: {argv: ["true"]}},'
        ' evaluator: {kind: command, command: "true"}}\n'
    )
    file = tasks_file(tmp_path, text)
    first = scripted_house.polar("run", file, "--run", run)
    again = scripted_house.polar("run", file, "--run", run)
    assert first == again
    other = tasks_file(tmp_path, text.replace('"x"', '"y"'))
    scripted_house.polar("submit", other, "--run", run, code=2)


@pytest.mark.parametrize(
    ("harness", "said"),
    [
        ("{name: command, args: {argv: [sh, -c, 'echo cannot start >&2; exit 3']}}", "cannot start"),
        ("{name: command, args: {argv: [no-such-program]}}", "no-such-program"),
    ],
)
def test_a_harness_that_crashes_at_once_is_a_harness_error_with_its_words(
    scripted_house: Live, tmp_path: Path, harness: str, said: str
) -> None:
    run = f"run-{new_id()[:8]}"
    file = tasks_file(
        tmp_path,
        f"""
tasks:
  - {{id: bad, instruction: x, harness: {harness}, evaluator: {{kind: command, command: "true"}}}}
  - {{id: good, instruction: x, dir: ask, harness: {{name: command, args: {{argv: [python3, ask.py]}}}},
     evaluator: {{kind: command, command: "true"}}}}
""",
    )
    rows = {r["id"]: r for r in scripted_house.polar("run", file, "--run", run, "--timeout", "120", code=1)}
    assert rows["bad"]["outcomes"] == {"harness_error": 1}
    assert rows["good"]["outcomes"] == {"passed": 1}
    shown = scripted_house.polar("session", "show", rows["bad"]["session_ids"][0])[0]
    last = shown["attempts"][-1]
    assert said in last["log_tail"] + last["detail"] + shown["detail"]


def test_doctor_finds_nothing_wrong_with_the_house(scripted_house: Live) -> None:
    lines = scripted_house.polar("doctor")
    assert not [line for line in lines if line["verdict"] == "fail"]
    assert any(line["check"] == "context: exact" and line["verdict"] == "ok" for line in lines)
