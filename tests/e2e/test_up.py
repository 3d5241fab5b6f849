"""Starting, stopping and starting again: taken ports, second houses, read-only directories, kills."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from house_kit import POLAR, Live, running_house

from polar_common.house.layout import process_started

pytestmark = [pytest.mark.nats, pytest.mark.chdb]
SCRIPTED = ("--model", "tiny", "--setting", "POLAR_ENGINE_SCRIPT=file")


def up(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*POLAR, "up", *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_a_second_house_on_the_same_data_is_refused_in_one_line(scripted_house: Live) -> None:
    done = up("--data", str(scripted_house.data), *SCRIPTED)
    assert done.returncode == 2
    assert "already runs" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        done = up("--data", str(tmp_path / "d"), "--ingest-port", str(port), *SCRIPTED)
    assert done.returncode == 2
    assert f"port {port} is taken" in done.stderr


def test_a_directory_that_cant_be_written_is_named(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    done = up("--data", str(blocker / "below"), *SCRIPTED)
    assert done.returncode == 2
    assert "can't be written" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("detach", [(), ("--detach",)])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--engine-kind", "foo"), "--engine-kind: must be one of vllm, sglang"),
        (("--sync", "often"), "--sync: must be always or an interval"),
        (("--setting", "POLAR_X"), "--setting: must be NAME=VALUE"),
        (("--setting", "POLAR_PROXY_DRIAN=1"), "no setting 'POLAR_PROXY_DRIAN'; the nearest is POLAR_PROXY_DRAIN"),
        (("--setting", "proxy_drain=1"), "no setting 'proxy_drain'; the nearest is POLAR_PROXY_DRAIN"),
        (("--tokenizer", "/nowhere"), "--tokenizer: /nowhere is no directory"),
        (("--engine-url", "localhost:8000"), "--engine-url: must begin with http://"),
        (("--engine-url", "http://127.0.0.1:9"), "--tokenizer: name the directory"),
    ],
)
def test_an_option_that_makes_no_sense_is_named_in_one_line_and_nothing_is_started(
    tmp_path: Path, options: tuple[str, ...], told: str, detach: tuple[str, ...]
) -> None:
    done = up("--data", str(tmp_path / "d"), *options, *detach)
    assert done.returncode == 2 and told in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and done.stdout == "" and not (tmp_path / "d").exists()


@pytest.mark.parametrize("detach", [pytest.param((), marks=pytest.mark.slow), ("--detach",)])
def test_a_setting_that_makes_no_sense_is_named_once(tmp_path: Path, detach: tuple[str, ...]) -> None:
    for _ in range(2):
        done = up("--data", str(tmp_path / "d"), *SCRIPTED, "--setting", "POLAR_INGEST_QUEUE_BOUND=many", *detach)
        said = done.stdout + done.stderr
        assert done.returncode in (1, 2) and "Traceback" not in said
        assert said.count("POLAR_INGEST_QUEUE_BOUND: Input should be a valid integer") == 1, said


def test_a_killed_house_leaves_nothing_and_loses_nothing(tmp_path: Path) -> None:
    data = tmp_path / "house"
    text = (
        'tasks:\n  - {id: a, instruction: "x", samples: 2, harness: {name: command, args: {argv: ["true"]}},'
        ' evaluator: {kind: command, command: "true"}}\n'
    )
    file = tmp_path / "tasks.yaml"
    file.write_text(text)
    with running_house(data, *SCRIPTED) as live:
        before = live.polar("run", str(file), "--run", "r")
        children = live.children()
        live.process.kill()
        live.process.wait()
        deadline = time.monotonic() + 20
        while any(process_started(pid) for pid in children.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not {n: p for n, p in children.items() if process_started(p)}
    with running_house(data, *SCRIPTED) as live:
        assert live.polar("run", str(file), "--run", "r") == before


def test_a_service_that_dies_is_started_again(tmp_path: Path) -> None:
    with running_house(tmp_path / "house", *SCRIPTED) as live:
        old = live.children()["reconstructor"]
        os.kill(old, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while live.children().get("reconstructor") == old and time.monotonic() < deadline:
            time.sleep(0.1)
        new = live.children()["reconstructor"]
        assert new != old
        assert process_started(new)


def test_an_engine_without_logprobs_serves_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "tasks.yaml"
    from test_house import ASK, tasks_file

    assert ASK
    path = tasks_file(
        tmp_path,
        """
tasks:
  - {id: ask, instruction: x, dir: ask, harness: {name: command, args: {argv: [python3, ask.py]}},
     evaluator: {kind: command, command: "true"}}
""",
    )
    assert path == str(file)
    with running_house(tmp_path / "house", *SCRIPTED, "--setting", "POLAR_ENGINE_NO_LOGPROBS=true") as live:
        row = live.polar("run", path, "--run", "r", "--timeout", "90")[0]
        assert row["outcomes"] == {"passed": 1}
        assert (row["completions"], row["traces"]) == (1, 0)
        build = live.polar("session", "show", row["session_ids"][0])[0]["builds"][0]
        assert list(build["excluded"].values()) == ["no_logprobs"]
        lines = live.polar("doctor", code=1)
        assert any("log-probs" in x["check"] and x["verdict"] == "fail" for x in lines), json.dumps(lines)
