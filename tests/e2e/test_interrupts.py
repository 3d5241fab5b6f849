"""Commands that wait for sessions, stopped in the middle: they say what goes on, or end what nobody else wants."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from house_kit import POLAR, Live, running_house

from polar_common.cli.ingest import Ingest
from polar_common.house.layout import find_house

pytestmark = [pytest.mark.nats, pytest.mark.chdb, pytest.mark.timeout(300)]

SLOW = """
tasks:
  - {id: slow, instruction: x, harness: {name: command, args: {argv: [sleep, "250"]}},
     evaluator: {kind: command, command: "true"}}
"""


@pytest.fixture(scope="module")
def slow_house() -> Iterator[Live]:
    """Its engine needs two seconds for a token."""
    settings = {"ENGINE_SCRIPT": "file", "ENGINE_MAX_MODEL_LEN": "262144", "ENGINE_SCRIPT_TOKEN_MS": "2000"}
    options = [x for k, v in settings.items() for x in ("--setting", f"POLAR_{k}={v}")]
    with (
        tempfile.TemporaryDirectory(prefix="polar-e2e-") as directory,
        running_house(Path(directory) / "house", "--model", "tiny", *options) as live,
    ):
        yield live


def started(live: Live, *arguments: str) -> subprocess.Popen[str]:
    argv = [*POLAR, *arguments, "--data", str(live.data)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until_running(command: subprocess.Popen[str]) -> None:
    assert command.stdout is not None
    for line in command.stdout:
        if "running" in line:
            return
    raise AssertionError(command.communicate())


def phases(live: Live, run: str) -> set[str]:
    """Of a run's sessions: what they are at, or how they ended."""
    state = Ingest(find_house(live.data)).get(f"/v1/runs/{run}")
    return {*state["phases"], *state["outcomes"]}


def cancelled(live: Live, run: str) -> bool:
    """Whether all sessions of a run are, within half a minute."""
    deadline = time.monotonic() + 30
    while phases(live, run) != {"cancelled"} and time.monotonic() < deadline:
        time.sleep(0.3)
    return phases(live, run) == {"cancelled"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_says_what_goes_on_and_how_to_end_it(slow_house: Live, tmp_path: Path, number: signal.Signals) -> None:
    file, run = tmp_path / "tasks.yaml", f"stopped-{number.name.lower()}"
    file.write_text(SLOW)
    command = started(slow_house, "run", str(file), "--run", run)
    until_running(command)
    command.send_signal(number)
    _, told = command.communicate(timeout=20)
    assert command.returncode == 128 + number
    assert f"run {run} goes on (1 running)" in told and "Traceback" not in told
    assert phases(slow_house, run) == {"running"}
    found = re.search(r"polar (task .*--cancel)", told)
    assert found is not None, told
    slow_house.polar(*shlex.split(found[1]))
    assert cancelled(slow_house, run)


def test_run_that_gives_up_says_so_too(slow_house: Live, tmp_path: Path) -> None:
    file = tmp_path / "tasks.yaml"
    file.write_text(SLOW)
    command = started(slow_house, "run", str(file), "--run", "late", "--timeout", "3")
    _, told = command.communicate(timeout=60)
    assert command.returncode == 1 and "polar task slow --run late --cancel" in told
    slow_house.polar("task", "slow", "--run", "late", "--cancel")
    assert cancelled(slow_house, "late")


@pytest.mark.harness
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_trial_that_is_stopped_takes_its_sessions_along(slow_house: Live, number: signal.Signals) -> None:
    subprocess.run([*POLAR, "harness", "install", "pi"], check=True, capture_output=True)
    command = started(slow_house, "harness", "test", "pi")
    until_running(command)
    command.send_signal(number)
    _, told = command.communicate(timeout=20)
    assert command.returncode == 128 + number and "Traceback" not in told, told
    found = re.search(r"the sessions of run (\S+) are cancelled", told)
    assert found is not None, told
    assert cancelled(slow_house, found[1])


@pytest.mark.harness
def test_a_trial_that_takes_too_long_ends_and_so_do_its_sessions(slow_house: Live) -> None:
    subprocess.run([*POLAR, "harness", "install", "pi"], check=True, capture_output=True)
    rows = slow_house.polar("harness", "test", "pi", "--timeout", "10", code=1, timeout=90)
    assert {row["outcome"] for row in rows} == {"cancelled"} and len(rows) == 4
