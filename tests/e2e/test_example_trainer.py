"""examples/trainer on a house with the tiny model: updates, new weights in the engine, a kill, and nothing twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from house_kit import Live, running_house

pytestmark = [pytest.mark.nats, pytest.mark.chdb, pytest.mark.model, pytest.mark.timeout(300)]
EXAMPLES = Path(__file__).parents[2] / "examples"


def tasks(count: int) -> str:
    rows = "".join(f"  - {{id: t{n}, instruction: 'go {n}'}}\n" for n in range(count))
    return f"""
defaults:
  samples: 4
  limits: {{attempt_s: 60, max_tokens_per_call: 8}}
  dir: {EXAMPLES / "quickstart/ask"}
  harness: {{name: command, args: {{argv: [python3, ask.py]}}}}
  evaluator: {{kind: command, command: "test $(od -An -N1 -tu1 /dev/urandom) -lt 128"}}
tasks:
{rows}"""


def trainer(live: Live, out: Path, steps: int, run: str = "r") -> subprocess.Popen[str]:
    argv = [sys.executable, str(EXAMPLES / "trainer/grpo.py"), "--run", run, "--model", "tiny"]
    return subprocess.Popen(
        [*argv, "--out", str(out), "--steps", str(steps), "--patience", "60"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "POLAR_DATA": str(live.data)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_the_example_trainer_updates_the_engine_and_trains_no_group_twice_across_a_kill(tmp_path: Path) -> None:
    file, out = tmp_path / "tasks.yaml", tmp_path / "checkpoints"
    # Rewards are drawn: of each group of four, one in eight is alike and dropped.
    file.write_text(tasks(24))
    with running_house(tmp_path / "house", "--model", "tiny", "--setting", "POLAR_INGEST_OBEY_DEMAND=true") as live:
        first = trainer(live, out, 6)
        for _ in range(100):
            if live.sql("SELECT 1 AS there FROM events WHERE kind = 'trainer.demanded'"):
                break
        live.polar("submit", str(file), "--run", "r")
        deadline = time.monotonic() + 120
        while not (out / "step-00002").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        first.kill()
        told, _ = first.communicate()
        second = trainer(live, out, 6)
        again, _ = second.communicate(timeout=120)
        assert second.returncode == 0, told + again
        steps = [line.split(":")[0] for line in (told + again).splitlines() if line.startswith("step")]
        # The step that was being made at the kill may not have been told; the last one was.
        assert steps[-1] == "step 6" and len(steps) == len(set(steps)), told + again
        consumed = live.sql("SELECT step, count() AS n FROM consumed GROUP BY step ORDER BY step")
        assert [row["step"] for row in consumed] == [1, 2, 3, 4, 5, 6]
        twice = live.sql("SELECT trace, count() AS n FROM consumed GROUP BY trace HAVING n > 1")
        assert not twice
        events = live.sql("SELECT kind, body FROM events WHERE kind = 'policy.activated'")
        assert any("r-6" in str(row) for row in events), events
        assert live.polar("verify")[-1]["ok"]
        opened = live.sql("SELECT count(DISTINCT task) AS n FROM events WHERE kind = 'session.queued'")[0]["n"]
        assert 6 <= opened < 20, "no more was opened than was asked for"
        third = trainer(live, tmp_path / "other", 1, "again")
        file.write_text(tasks(6))
        live.polar("submit", str(file), "--run", "again")
        told, _ = third.communicate(timeout=120)
        assert third.returncode == 0 and "step 1:" in told
        # Who begins where others trained counts on, and gives the engine the weights that it begins with.
        rows = live.sql("SELECT DISTINCT version, policy_seq FROM policies WHERE kind LIKE '%activated'")
        assert {("again-0", 7), ("again-1", 8)} <= {(r["version"], r["policy_seq"]) for r in rows}
