"""A house whose log is rolled: it takes nothing new, starts again on the next segment, and may drop the old one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from house_kit import Live, running_house

from polar_common.archive import ArchiveSource
from polar_common.verify import Options, audit

pytestmark = [pytest.mark.nats, pytest.mark.chdb, pytest.mark.timeout(400)]
OPTIONS = ("--model", "tiny", "--setting", "POLAR_ENGINE_SCRIPT=echo", "--lease", "5")
TASKS = """
tasks:
  - id: {name}
    instruction: say it
    samples: 2
    harness: {{name: command, args: {{script: "echo word"}}}}
    evaluator: {{kind: answer, args: {{expected: word}}}}
"""


def submit(live: Live, tmp_path: Path, name: str, *, code: int = 0) -> list[dict[str, object]]:
    file = tmp_path / f"{name}.yaml"
    file.write_text(TASKS.format(name=name))
    return live.polar("run", str(file), "--run", "r", "--timeout", "120", code=code)


def test_a_rolled_log(tmp_path: Path) -> None:
    data, archive = tmp_path / "house", str(tmp_path / "s1")
    with running_house(data, *OPTIONS) as live:
        assert submit(live, tmp_path, "first")[0]["outcomes"] == {"passed": 2}
        assert live.polar("log", "roll") == [{"opened": "s2", "due": ""}]
        assert submit(live, tmp_path, "first")[0]["outcomes"] == {"passed": 2}
        submit(live, tmp_path, "second", code=2)
    with running_house(data, *OPTIONS) as live:
        second = submit(live, tmp_path, "second")[0]
        assert second["outcomes"] == {"passed": 2} and str(second["task"]).startswith("s2-")
        submit(live, tmp_path, "first", code=2)
        (report,) = live.polar("verify", "--settled")
        assert report["ok"] and report["totals"]["sessions"] == 4
        live.polar("log", "export", archive)
        assert live.polar("log", "seal", "s1")[0]["state"] == "sealed"
        assert live.polar("log", "drop", "s1", "--archive", archive)[0]["state"] == "dropped"
        submit(live, tmp_path, "first", code=2)
        assert live.polar("doctor")
    with running_house(data, *OPTIONS) as live:
        states = {r["segment"]: r["state"] for r in live.polar("log", "segments")}
        assert states == {"s1": "dropped", "s2": "open"}
        assert submit(live, tmp_path, "third")[0]["outcomes"] == {"passed": 2}
        (report,) = live.polar("verify", "--settled")
        assert report["ok"] and report["totals"]["sessions"] == 4
    stored = asyncio.run(audit(ArchiveSource(Path(archive)), Options(settled=True)))
    assert stored.ok and stored.totals["sessions"] == 2
