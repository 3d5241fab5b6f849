"""The reconstructor as a process: wired to its consumers, killed while it works, started again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.scripted_sessions import Script

from polar_common import subjects
from polar_common.bus import Bus
from polar_common.errors import ConfigError
from polar_common.events import GroupClosed, GroupMember
from polar_common.nats_server import NatsServer
from polar_common.topology import TRACES, Topology, apply
from polar_common.traces import GroupTraces, TraceManifest
from polar_reconstructor.app import build_service
from polar_reconstructor.settings import ReconstructorSettings

pytestmark = pytest.mark.nats
E = 99


class Process:
    """`polar run-service reconstructor`."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url, self.ready = url, directory / "ready"
        self.log = directory / "log"
        self.child: subprocess.Popen[bytes] | None = None

    def start(self, **settings: str) -> None:
        self.ready.unlink(missing_ok=True)
        env = os.environ | {"POLAR_NATS": self.url, "POLAR_READY_FILE": str(self.ready)} | settings
        with self.log.open("ab") as log:
            command = [sys.executable, "-c", "from polar_reconstructor.app import run; run()"]
            self.child = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def stop(self, how: int = signal.SIGKILL) -> None:
        if self.child is not None:
            self.child.send_signal(how)
            self.child.wait(15)


@pytest.fixture
def process(nats_server: NatsServer, tmp_path: Path) -> Iterator[Process]:
    found = Process(nats_server.url, tmp_path)
    yield found
    found.stop()


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    """Short leases: what a killed process held comes again soon."""
    connected = await Bus.connect(nats_server.url, "test/bus")
    await apply(connected.js, Topology(lease_s=2.0))
    yield connected
    await connected.close()


async def until_built(bus: Bus, scripts: list[Script]) -> None:
    async with asyncio.timeout(60):
        for script in scripts:
            while await bus.last(subjects.build("live", script.session, "*")) is None:
                await asyncio.sleep(0.05)


async def test_sessions_are_built_once_though_the_process_is_killed_again_and_again(bus: Bus, process: Process) -> None:
    process.start()
    scripts = []
    for index in range(24):
        script = Script(index=index).started()
        for turn in range(3):
            script.call(f"c{turn}", [index, turn], [10 + turn, E])
        await script.ended().publish(bus)
        scripts.append(script)
        if index in (3, 4, 15):
            await until_built(bus, scripts[: index - 1])
            process.stop()
            process.start()
    await until_built(bus, scripts)
    for script in scripts:
        found = await bus.read(TRACES, [f"polar.traces.run.live.{script.task}.{script.session}.>"])
        manifest = TraceManifest.model_validate_json(found[-1].body)
        assert len(manifest.traces) == len(found) - 1 == 3
        fact = await bus.last(subjects.build("live", script.session, "*"))
        assert fact is not None and fact.event.kind == "build.reconstructed"
    members = tuple(GroupMember(session=s.session, outcome="passed", reward=1.0, trainable=True) for s in scripts)
    await bus.once(
        GroupClosed(
            run="run", task=scripts[0].task, expected=24, terminal=24, trainable=24, by="complete", members=members
        )
    )
    async with asyncio.timeout(20):
        while (closed := await bus.last(subjects.trace_closed("run", "live", scripts[0].task))) is None:
            await asyncio.sleep(0.05)
    assert GroupTraces.model_validate_json(closed.body).traces == 72


async def test_it_stops_cleanly(bus: Bus, process: Process) -> None:
    process.start()
    async with asyncio.timeout(30):
        while not process.ready.exists():
            await asyncio.sleep(0.05)
    process.stop(signal.SIGTERM)
    assert process.child is not None and process.child.returncode == 0


def test_a_rule_set_that_is_none_stops_the_start(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("rule: exact\nmax_trace_token: 5\n")
    with pytest.raises(ConfigError, match="max_trace_token: unknown field"):
        build_service(ReconstructorSettings(reconstructor_rules=str(rules)))


async def test_the_live_build_stays_one_rule_sets(bus: Bus, process: Process) -> None:
    """Started under other rules, the service ends and says what to do; under another name it works."""
    script = Script().started().call("c1", [1], [10, E]).ended()
    await script.publish(bus)
    process.start()
    await until_built(bus, [script])
    process.stop(signal.SIGTERM)
    process.start(POLAR_RECONSTRUCTOR_RULES="per_request")
    assert process.child is not None
    assert await asyncio.to_thread(process.child.wait, 30) != 0
    assert "live exists under other rules (exact, hash" in process.log.read_text()
    process.start(POLAR_RECONSTRUCTOR_RULES="exact")
    async with asyncio.timeout(30):
        while not process.ready.exists():
            await asyncio.sleep(0.05)
