"""A house on one host, its gateway in a Slurm job: an agent CLI is run, recorded and judged as if it were at home."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest
import yaml
from house_kit import Live, running_house

from polar_common.house.layout import House, nats_secret
from slurm_kit import own_slurm

pytestmark = [pytest.mark.slurm, pytest.mark.nats, pytest.mark.chdb, pytest.mark.harness, pytest.mark.timeout(400)]

BATCH = Path(__file__).parents[2] / "compose/slurm/gateway.sbatch"


def environment(live: Live, node: Path) -> dict[str, str]:
    """What a user of this house exports before `sbatch`."""
    house = House(live.data)
    told = house.read()
    assert told is not None
    model = httpx.get(f"{told.engine}/v1/models").json()["data"][0]["root"]
    return {
        "POLAR_NATS": told.nats,
        "POLAR_NATS_USER": "gateway",
        "POLAR_NATS_PASSWORD": house.secret(nats_secret("gateway")),
        "POLAR_PROXY_NATS_USER": "proxy",
        "POLAR_PROXY_NATS_PASSWORD": house.secret(nats_secret("proxy")),
        "POLAR_SECRET": house.secret("session-keys"),
        "POLAR_PROXY_ENGINES": f'["{told.engine}"]',
        "POLAR_PROXY_MODEL_DIR": model,
        "POLAR_GATEWAY_CLASSES": '["local"]',
        "POLAR_DATA": str(node),
        "POLAR_COMMAND": str(Path(sys.executable).parent / "polar"),
        "PYTHONPATH": ":".join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
    }


def test_an_agent_in_a_job_is_recorded_exactly(tmp_path: Path) -> None:
    options = ("--model", "tiny", "--setting", "POLAR_ENGINE_SCRIPT=file")
    # The house's own gateway serves another class, so that only the job's can take the work.
    options += ("--setting", 'POLAR_GATEWAY_CLASSES=["docker"]')
    task = {
        "id": "pi",
        "instruction": "Create hello.txt containing hi",
        "harness": {"name": "pi"},
        "evaluator": {"kind": "command", "command": 'test "$(cat hello.txt)" = hi'},
        "limits": {"attempt_s": 120, "session_s": 200, "attempts": 1},
    }
    file = tmp_path / "tasks.yaml"
    file.write_text(yaml.safe_dump({"tasks": [task]}))
    with own_slurm() as slurm, running_house(tmp_path / "house", *options) as live:
        job = slurm.submit(BATCH, "--time=20", env=environment(live, tmp_path / "node"))
        (row,) = live.polar("run", str(file), "--run", "slurm", "--timeout", "240")
        shown = live.polar("session", "show", row["session_ids"][0])[0]
        assert row["outcomes"] == {"passed": 1}, (shown, slurm.logs())
        assert (row["completions"], row["traces"], row["exact_share"]) == (2, 1, 1.0)
        assert [a["exit_code"] for a in shown["attempts"]] == [0]
        slurm.call("scancel", "--batch", "--signal=USR1", job)
        assert slurm.ended(job, 60) == ("COMPLETED", "0:0")
        assert not (tmp_path / "node/gateway.pid").exists()
