"""The ingest process as it is started in a house: real sockets, signals, kills."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import orjson
import pytest
from ingest_fakes import FakeHouse, jitter, task, until

from polar_common.bus import Bus
from polar_common.nats_server import NatsServer
from polar_common.topology import events_stream

pytestmark = pytest.mark.nats
STREAM = events_stream("s1")


class Process:
    """One ingest process; `start` waits until it's ready."""

    def __init__(self, folder: Path, nats: str, **env: str) -> None:
        self.folder = folder
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("POLAR_")},
            "POLAR_NATS": nats,
            "POLAR_DATA": str(folder),
            "POLAR_READY_FILE": str(folder / "ingest.json"),
            "POLAR_INGEST_RETRY_DELAY_S": "0.05",
            **env,
        }
        self.popen: subprocess.Popen[bytes] | None = None
        self.url = ""

    def spawn(self) -> subprocess.Popen[bytes]:
        (self.folder / "ingest.json").unlink(missing_ok=True)
        with (self.folder / "ingest.log").open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", "from polar_ingest.app import run; run()"],
                env=self.env, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        return self.popen

    async def start(self) -> None:
        self.spawn()

        async def answers() -> bool:
            assert self.popen is not None
            assert self.popen.poll() is None, self.log
            ready = self.folder / "ingest.json"
            if not ready.exists():
                return False
            told = orjson.loads(ready.read_bytes())
            assert told["pid"] == self.popen.pid
            self.url = f"http://127.0.0.1:{told['port']}"
            async with httpx.AsyncClient() as client:
                return (await client.get(f"{self.url}/ready")).status_code == 200

        await until(answers, 60)

    def end(self, sign: int = signal.SIGKILL) -> int:
        assert self.popen is not None
        if self.popen.poll() is None:
            self.popen.send_signal(sign)
        return self.popen.wait(30)

    @property
    def log(self) -> str:
        return (self.folder / "ingest.log").read_text(errors="replace")[-3000:]


@pytest.fixture
def process(tmp_path: Path, nats_server: NatsServer, bus: Bus) -> Iterator[Process]:
    made = Process(tmp_path, nats_server.url)
    yield made
    if made.popen is not None:
        made.end()


async def test_it_serves_and_stops_cleanly(process: Process, bus: Bus) -> None:
    await process.start()
    async with httpx.AsyncClient(base_url=process.url) as client:
        assert (await client.post("/v1/tasks", json=task(samples=2))).status_code == 202
        assert (await client.get("/v1/tasks/t")).json()["spec"]["samples"] == 2
    assert process.end(signal.SIGTERM) == 0, process.log
    assert "background task failed" not in process.log


async def test_200_mb_over_a_real_socket_get_an_answer_and_cost_no_memory(process: Process, bus: Bus) -> None:
    await process.start()
    assert process.popen is not None
    before = _rss_mb(process.popen.pid)

    start = b'{"tasks": [{"id": "t", "harness": {"name": "command"}, "instruction": "'

    async def body() -> AsyncIterator[bytes]:
        yield start
        for _ in range(200):
            yield b"x" * (1 << 20)

    async with httpx.AsyncClient(base_url=process.url, timeout=60) as client:
        for headers in ({}, {"content-length": str(200 * (1 << 20) + len(start))}):
            answer = await client.post("/v1/tasks", content=body(), headers=headers)
            assert (answer.status_code, answer.json()["error"]["where"]) == (413, "tasks[0].instruction")
        assert (await client.get("/health")).status_code == 200
    assert _rss_mb(process.popen.pid) < before + 120
    assert int((await bus.js.stream_info(STREAM)).state.messages) == 0


def _rss_mb(pid: int) -> float:
    """Highest resident size so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_kill_9_in_mid_run_loses_and_doubles_nothing(process: Process, bus: Bus) -> None:
    await process.start()
    house = FakeHouse(bus, jitter(11), slots=3)
    async with httpx.AsyncClient() as client, house.open():
        body = {"run": "r", "tasks": [task(f"t{i}", samples=4) for i in range(25)]}
        taken = await client.post(f"{process.url}/v1/tasks", json=body, timeout=60)
        kills = 0
        for pause in (0.1, 0.4, 0.2, 0.6):
            await asyncio.sleep(pause)
            kills += len(await bus.read(STREAM, ["polar.events.s1.group.>"])) < 25
            process.end()
            await process.start()

        async def finished() -> bool:
            return bool((await client.get(f"{process.url}/v1/runs/r")).json()["finished"])

        await until(finished, 200)
        again = await client.post(f"{process.url}/v1/tasks", json=body, timeout=60)
        assert (again.status_code, again.json()) == (202, taken.json())
        run = (await client.get(f"{process.url}/v1/runs/r")).json()
    assert kills >= 2, "the kills came too late to mean anything"
    assert (run["tasks"], run["groups_closed"], sum(run["outcomes"].values())) == (25, 25, 100)
    ended: Counter[str] = Counter()
    for end in ("completed", "failed", "cancelled"):
        ended.update(s.subject.split(".")[4] for s in await bus.read(STREAM, [f"polar.events.s1.session.*.0.{end}"]))
    assert ended == Counter(s for t in taken.json()["tasks"] for s in t["sessions"])
    assert not house.doubled


def test_it_refuses_to_be_open_to_everybody(tmp_path: Path) -> None:
    process = Process(tmp_path, "nats://127.0.0.1:1", POLAR_HOST="0.0.0.0")
    process.spawn()
    assert process.popen is not None
    assert process.popen.wait(30) == 1
    assert "needs a token" in process.log


def test_a_taken_port_is_told_in_a_line(tmp_path: Path, nats_server: NatsServer) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = Process(tmp_path, nats_server.url, POLAR_PORT=str(port))
        process.spawn()
        assert process.popen is not None
        assert process.popen.wait(30) == 1
    assert process.log.splitlines()[-1] == f"ingest: port: {port} on 127.0.0.1: Address already in use"
    assert "Traceback" not in process.log
