"""Everything that isn't the log may be deleted: from its log and archives a house is what it was, row by row."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from house_kit import Live, running_house
from test_house import tasks_file
from test_segments import OPTIONS

from polar_analytics.schema import TABLES
from polar_common.cli.query import ask
from polar_common.house.layout import House

pytestmark = [pytest.mark.nats, pytest.mark.chdb, pytest.mark.timeout(580)]
Tables = dict[str, list[str]]
TASK = """
tasks:
  - id: {name}
    instruction: say it
    samples: 2
    dir: {folder}
    harness: {{name: command, args: {{argv: [python3, ask.py]}}}}
    evaluator: {{kind: command, command: "true"}}
"""


def submit(live: Live, tmp_path: Path, name: str, *, code: int = 0) -> list[dict[str, object]]:
    file = tasks_file(tmp_path, TASK.format(name=name, folder=tmp_path / "ask"))
    return live.polar("run", file, "--run", "r", "--timeout", "120", code=code)


def tables(live: Live) -> Tables:
    # Asked as `polar query` asks, without a process for each.
    return {t.name: sorted(map(str, ask(f"SELECT * FROM {t.name} FINAL", live.data)[1])) for t in TABLES}


def same(live: Live, wanted: Tables) -> Tables:
    """The tables once they are as wanted, or after a while."""
    until = time.monotonic() + 30
    while (found := tables(live)) != wanted and time.monotonic() < until:
        time.sleep(0.5)
    return found


def settled(live: Live) -> Tables:
    """The tables once nothing is added any more."""
    found: Tables = {"": []}
    while found != (found := tables(live)):
        time.sleep(1)
    return found


def only_the_log(data: Path) -> None:
    for part in data.iterdir():
        if part != House(data).nats:
            shutil.rmtree(part) if part.is_dir() else part.unlink()


def test_a_house_on_its_log_alone_is_what_it_was(tmp_path: Path) -> None:
    data, archive = tmp_path / "house", str(tmp_path / "s1")
    with running_house(data, *OPTIONS) as live:
        first = submit(live, tmp_path, "first")[0]
        live.polar("log", "roll")
        assert all(settled(live)[name] for name in ("events", "completions", "traces", "group_members"))
    with running_house(data, *OPTIONS) as live:
        second = submit(live, tmp_path, "second")[0]
        before = settled(live)
    only_the_log(data)
    with running_house(data, *OPTIONS) as live:
        assert same(live, before) == before
        assert submit(live, tmp_path, "second")[0]["task"] == second["task"]
        submit(live, tmp_path, "first", code=2)
        (report,) = live.polar("verify", "--settled")
        assert report["ok"] and report["totals"]["sessions"] == 4
        live.polar("log", "export", archive)
        live.polar("log", "seal", "s1")
        live.polar("log", "drop", "s1", "--archive", archive)
    only_the_log(data)
    assert str(first["task"]).startswith("s1-")
    with running_house(data, *OPTIONS) as live:
        assert same(live, before) == before, "the dropped segment's from its archive"
        submit(live, tmp_path, "first", code=2)
        assert submit(live, tmp_path, "third")[0]["outcomes"] == {"passed": 2}
        assert live.polar("verify", "--settled")[0]["ok"]
