"""Gateways on nodes that a real Slurm allocates: they join the log, take work, and leave before the allocation ends."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import gateway_kit as kit
import pytest

from polar_common.bus import Bus
from polar_common.nats_server import NatsServer
from slurm_kit import Slurm, own_slurm

pytestmark = [pytest.mark.slurm, pytest.mark.nats, pytest.mark.timeout(300)]

BATCH = Path(__file__).parents[2] / "compose/slurm/gateway.sbatch"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with own_slurm() as started:
        yield started


def environment(server: NatsServer, tmp_path: Path) -> dict[str, str]:
    """What a user exports before `sbatch`."""
    return {
        "POLAR_NATS": server.url,
        "POLAR_SECRET": kit.SECRET,
        "POLAR_DATA": str(tmp_path / "node"),
        "POLAR_COMMAND": str(Path(sys.executable).parent / "polar"),
        "POLAR_GATEWAY_SLOTS": "2",
        "PYTHONPATH": ":".join(p for p in sys.path if p),
    }


async def test_a_job_works_and_leaves_at_its_signal(
    slurm: Slurm, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    job = slurm.submit(BATCH, "--time=20", env=environment(nats_server, tmp_path))
    first = await kit.over(bus, await kit.release(bus, kit.script("echo hello", name="first")), timeout=60)
    assert first.attempts[1].exited is not None and first.attempts[1].exited.exit_code == 0
    assert slurm.state(job)[0] == "RUNNING"
    mark = f"in-job-{job}-{tmp_path.name}"
    running = await kit.release(bus, kit.script(f"sh -c 'sleep 8; : {mark}'; echo finished", name="running"))
    await kit.phase(bus, running, "running")
    assert await kit.there(mark)
    # What Slurm itself sends to the batch shell, without waiting for its clock.
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    await kit.until(bus, running, lambda _: "leaving" in (slurm.directory / "job.log").read_text())
    await asyncio.sleep(2)
    late = await kit.release(bus, kit.script("true", name="late"))
    over = (await kit.over(bus, running, timeout=40)).attempts[1]
    assert over.exited is not None
    assert (over.exited.fault, over.exited.exit_code, over.exited.timed_out) == ("none", 0, False)
    assert "finished" in over.exited.log_tail
    assert slurm.ended(job, 40) == ("COMPLETED", "0:0")
    assert (await kit.load(bus, late)).phase == "queued"
    assert await kit.gone(mark)
    assert not kit.running(str(tmp_path / "node"))
    # Another allocation takes up what was left.
    second = slurm.submit(BATCH, "--time=20", env=environment(nats_server, tmp_path))
    await kit.over(bus, late, timeout=60)
    # A cancel by a user, who wants an orderly end.
    slurm.call("scancel", "--batch", "--signal=TERM", second)
    assert slurm.ended(second, 40) == ("COMPLETED", "0:0")


@pytest.mark.slow
async def test_a_job_that_comes_to_its_time_limit_has_left_before(
    slurm: Slurm, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    began = time.monotonic()
    job = slurm.submit(BATCH, "--time=2", "--signal=B:USR1@60", env=environment(nats_server, tmp_path))
    await kit.over(bus, await kit.release(bus, kit.script("true", name="limit")), timeout=60)
    assert slurm.ended(job, 150) == ("COMPLETED", "0:0")
    assert time.monotonic() - began < 120
    assert "leaving" in (slurm.directory / "job.log").read_text()


async def test_a_job_without_its_settings_says_what_is_missing(
    slurm: Slurm, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    env = environment(nats_server, tmp_path)
    del env["POLAR_SECRET"]
    job = slurm.submit(BATCH, "--time=20", env=env)
    state, code = slurm.ended(job, 40)
    assert state == "FAILED" and code != "0:0"
    assert "POLAR_SECRET" in (slurm.directory / "job.log").read_text()
