"""Small and full disks: a tmpfs under the server's store, where the tests may mount one (root).

A server takes three quarters of the disk that it finds for its bound, and refuses what goes beyond by name. Where
somebody else fills the disk the write itself fails (ENOSPC): then it answers no publish on that stream until it is
started again. `test_log_server.py` fills a store that its configuration bounds, which runs everywhere.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from ingest_fakes import start_edge, task
from tests.conftest import start_nats

from polar_common.bus import Bus, scan
from polar_common.errors import BusError, Unavailable
from polar_common.events import SessionAccepted
from polar_common.nats_server import NatsConfig, NatsServer, free_port
from polar_common.topology import Topology, apply, events_stream

pytestmark = [pytest.mark.nats, pytest.mark.timeout(180)]
STREAM = events_stream("s1")


class Disk:
    """A tmpfs of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self, megabytes: int) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._do("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(self.path))

    def grow(self, megabytes: int) -> None:
        self._do("mount", "-o", f"remount,size={megabytes}m", str(self.path))

    def unmount(self) -> None:
        self._do("umount", str(self.path))

    @staticmethod
    def _do(*argv: str) -> None:
        subprocess.run(argv, check=True, capture_output=True)


@contextmanager
def disks(places: Sequence[Path], megabytes: int) -> Iterator[list[Disk]]:
    """A disk at each place for the block; the test is skipped where it may not mount one."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts a tmpfs")
    with ExitStack() as mounted:
        made = [Disk(place) for place in places]
        for disk in made:
            try:
                disk.mount(megabytes)
            except (OSError, subprocess.CalledProcessError):
                pytest.skip("this sandbox lets nobody mount a tmpfs")
            mounted.callback(disk.unmount)
        yield made


@pytest.fixture
def disk() -> Iterator[Disk]:
    with tempfile.TemporaryDirectory(prefix="polar-disk-") as name, disks([Path(name) / "disk"], 12) as made:
        yield made[0]


def accepted(number: int) -> SessionAccepted:
    return SessionAccepted(session=f"s1-f{number}-0", attempt=0, index=0, work_class="x" * 20_000)


async def filled(bus: Bus) -> dict[str, int]:
    """What was acknowledged until the store was full."""
    acknowledged: dict[str, int] = {}
    try:
        for number in range(2_000):
            event = accepted(number)
            acknowledged[event.subject()] = (await bus.once(event)).sequence
    except Unavailable:
        assert len(acknowledged) > 50
        return acknowledged
    pytest.fail("the store never was full")


async def held(bus: Bus) -> dict[str, int]:
    return {s.subject: s.sequence async for s in scan(bus, STREAM, [">"])}


async def _goes_on(disk: Disk, acknowledged: dict[str, int]) -> None:
    """Another server on what is there: nothing is lost, and it takes more."""
    roomier = NatsServer(NatsConfig(data=disk.path / "js", port=free_port(), name="roomier"))
    roomier.start()
    try:
        bus = await Bus.connect(roomier.url, "test/bus")
        there = await held(bus)
        assert acknowledged.items() <= there.items()
        # What was refused may be stored or not, but once.
        assert (await bus.once(accepted(5_000))).sequence == max(there.values()) + 1
        edge = await start_edge(roomier.url)
        assert (await edge.client.post("/v1/tasks?run=r", json=task("later"))).status_code == 202
        await edge.kill()
        with suppress(BusError):
            await bus.close()
    finally:
        roomier.stop("kill")


async def test_a_store_bounded_by_a_small_disk_refuses_stops_admission_and_keeps_what_it_acknowledged(
    disk: Disk,
) -> None:
    server = start_nats(disk.path)
    try:
        bus = await Bus.connect(server.url, "test/bus")
        await apply(bus.js, Topology(dlq_bytes=-1))
        edge = await start_edge(server.url)
        assert (await edge.client.post("/v1/tasks?run=r", json=task("before"))).status_code == 202
        acknowledged = await filled(bus)
        answer = await edge.client.post("/v1/tasks?run=r", json=task("later", instruction="x" * 60_000))
        assert answer.status_code == 503 and answer.json()["error"], answer.text
        await edge.kill()
        await bus.close()
    finally:
        server.stop("kill")
    disk.grow(64)
    await _goes_on(disk, acknowledged)


def fill(disk: Disk, leave: int) -> Path:
    """A file of somebody else's that takes all but `leave` bytes."""
    state = os.statvfs(disk.path)
    rest = disk.path / "rest"
    with rest.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_frsize - leave)
    return rest


async def test_a_disk_without_space_refuses_stops_admission_and_keeps_what_it_acknowledged(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC, far below the store's bound."""
    monkeypatch.setattr("polar_common.bus.client._TIMEOUT_S", 0.5)
    disk.grow(64)
    server = start_nats(disk.path)
    try:
        bus = await Bus.connect(server.url, "test/bus")
        await apply(bus.js, Topology(dlq_bytes=-1))
        edge = await start_edge(server.url)
        assert (await edge.client.post("/v1/tasks?run=r", json=task("before"))).status_code == 202
        rest = fill(disk, 4 << 20)
        acknowledged = await filled(bus)
        assert "no space left on device" in server.log.read_text()
        with pytest.raises(Unavailable, match="disk may be full"):
            await bus.once(accepted(4_000))
        # What was acknowledged can be read meanwhile.
        assert acknowledged.items() <= (await held(bus)).items()
        answer = await edge.client.post("/v1/tasks?run=r", json=task("later"))
        assert answer.status_code == 503 and answer.json()["error"], answer.text
        await edge.kill()
        await bus.close()
    finally:
        server.stop("kill")
    rest.unlink()
    await _goes_on(disk, acknowledged)
