"""What servers do to us: full disks, stalls, cut connections, slow readers, and when they call a write safe."""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
from tests.conftest import start_nats

from polar_common.bus import Bus, Lease, Worker, follow, scan
from polar_common.errors import ConfigError, Unavailable
from polar_common.events import SessionAccepted, SessionQueued
from polar_common.house.up import UpOptions
from polar_common.nats_server import NatsConfig, NatsServer, free_port, server_config
from polar_common.task_spec import HarnessSpec, TaskSpec
from polar_common.topology import Topology, apply, events_stream, work_consumer

pytestmark = pytest.mark.nats
STREAM = events_stream("s1")
ROOT = Path(__file__).parents[2]


def accepted(name: str, size: int = 8) -> SessionAccepted:
    return SessionAccepted(session=f"s1-{name}-0", attempt=0, index=0, work_class="x" * size)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="polar-nats-") as name:
        yield Path(name)


@asynccontextmanager
async def connected(server: NatsServer, url: str = "") -> AsyncIterator[Bus]:
    bus = await Bus.connect(url or server.url, "test/bus")
    await apply(bus.js, Topology(dlq_bytes=-1))
    yield bus
    await bus.close()


async def subjects(bus: Bus) -> dict[str, int]:
    return {s.subject: s.sequence async for s in scan(bus, STREAM, [">"])}


# -- what an acknowledgement means


def test_an_acknowledgement_means_on_disk_by_default(directory: Path) -> None:
    """The server's own view of its configuration, not the text we gave it."""
    port = free_port()
    server = start_nats(directory, monitor_port=port)
    told = httpx.get(f"http://127.0.0.1:{port}/jsz?config=true").json()["config"]
    server.stop("kill")
    assert told["sync_always"] is True
    relaxed = server_config(NatsConfig(data=directory, port=1, sync="2m"))
    assert "sync_interval: 2m" in relaxed


def test_every_configuration_syncs_always() -> None:
    assert NatsConfig(data=Path("x"), port=1).sync == "always"
    assert UpOptions(data=Path("x")).sync == "always"
    files = [f for f in (ROOT / "compose").rglob("*.conf") if "jetstream {" in f.read_text()]
    assert files and all("sync_interval: always" in f.read_text() for f in files), files


# -- a full disk


async def test_a_store_full_by_max_store_refuses_clearly_and_keeps_what_it_acknowledged(directory: Path) -> None:
    server = start_nats(directory, max_store_bytes=2 << 20)
    acknowledged: dict[str, int] = {}
    async with connected(server) as bus:

        async def fill() -> None:
            for number in range(5000):
                event = accepted(f"f{number}", 2000)
                acknowledged[event.subject()] = (await bus.once(event)).sequence

        with pytest.raises(Unavailable, match="full or out of resources"):
            await fill()
        with pytest.raises(Unavailable):
            await bus.batch([accepted("later", 2000)])
        assert await subjects(bus) == acknowledged
    server.stop("kill")
    roomier = NatsServer(NatsConfig(data=directory / "js", port=free_port(), name="roomier"))
    roomier.start()
    async with connected(roomier) as bus:
        assert await subjects(bus) == acknowledged
        assert (await bus.once(accepted("after"))).sequence == len(acknowledged) + 1
    roomier.stop("kill")


# -- stalls and cuts


class Wire:
    """A TCP relay in front of a server that can be cut."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._pairs: set[asyncio.StreamWriter] = set()
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def up(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def down(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._pairs):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._pairs |= {writer, back}
        with suppress(OSError, asyncio.IncompleteReadError):
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        self._pairs -= {writer, back}

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def traffic(bus: Bus) -> AsyncIterator[None]:
    """Three who write forty facts each and one who reads, under way within; in the end each was read once, in order."""
    seen: list[int] = []

    async def read() -> None:
        async for stored in follow(bus, STREAM, [">"]):
            seen.append(stored.sequence)

    async def write(name: str) -> None:
        for number in range(40):
            event = accepted(f"{name}{number}")
            while True:
                try:
                    await bus.once(event)
                    break
                except Unavailable:
                    await asyncio.sleep(0.2)
            await asyncio.sleep(random.uniform(0, 0.04))

    reading = asyncio.ensure_future(read())
    writing = [asyncio.ensure_future(write(name)) for name in "abc"]
    await asyncio.sleep(0.3)
    yield
    await asyncio.gather(*writing)
    async with asyncio.timeout(40):
        while len(seen) < 120:
            await asyncio.sleep(0.1)
    reading.cancel()
    assert seen == list(range(1, 121))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("cut_s", [7, pytest.param(30, marks=pytest.mark.slow)])
async def test_a_cut_connection_loses_and_doubles_nothing(nats_server: NatsServer, cut_s: float) -> None:
    """Cut for longer than a publish waits for its answer, and for half a minute."""
    wire = Wire(nats_server.config.port)
    await wire.up()
    async with connected(nats_server, wire.url) as bus, traffic(bus):
        await wire.down()
        await asyncio.sleep(cut_s)
        await wire.up()
    await wire.down()


@pytest.mark.timeout(120)
async def test_a_stalled_server_is_waited_for_and_answers_are_resolved(nats_server: NatsServer) -> None:
    """A disk that hangs for longer than a publish waits: the answer is looked up, nothing is stored twice."""
    async with connected(nats_server) as bus:
        await bus.once(accepted("before"))
        assert nats_server.process is not None
        nats_server.process.send_signal(signal.SIGSTOP)
        work = [asyncio.ensure_future(bus.once(accepted(f"stalled{n}"))) for n in range(20)]
        await asyncio.sleep(6)
        nats_server.process.send_signal(signal.SIGCONT)
        done = await asyncio.gather(*work)
        assert len({p.sequence for p in done}) == 20
        info = await bus.js.stream_info(STREAM)
        assert info.state.messages == 21


@pytest.mark.timeout(120)
async def test_a_worker_cut_off_gives_its_work_up_before_another_gets_it(nats_server: NatsServer) -> None:
    """The lease: lost at two thirds of the ack wait, redelivered at its end, and never two at work."""
    wire = Wire(nats_server.config.port)
    await wire.up()
    spec = work_consumer("local", lease_s=3.0)
    task = TaskSpec(id="t", instruction="do", harness=HarnessSpec(name="command"))
    running: set[str] = set()
    overlaps: list[set[str]] = []
    ended: dict[str, str] = {}

    def handler(name: str, stop: asyncio.Event):  # type: ignore[no-untyped-def]
        async def handle(lease: Lease) -> None:
            running.add(name)
            overlaps.append(set(running))
            try:
                await asyncio.sleep(60 if name == "far" else 0.1)
                ended[name] = "done"
                stop.set()
            except asyncio.CancelledError:
                ended[name] = "given up"
                raise
            finally:
                running.discard(name)

        return handle

    async with connected(nats_server) as near:
        far = await Bus.connect(wire.url, "test/far")
        await near.js.delete_consumer(STREAM, spec.durable)
        await near.js.add_consumer(STREAM, spec.config())
        base = (await near.once(accepted("work"))).sequence
        queued = SessionQueued(session="s1-work-0", attempt=1, work_class="local", spec=task)
        await near.transition(queued, base)
        stop = asyncio.Event()
        first = asyncio.ensure_future(Worker(far, spec, handler("far", stop)).run(stop))
        async with asyncio.timeout(10):
            while not running:
                await asyncio.sleep(0.05)
        await wire.down()
        await asyncio.wait_for(Worker(near, spec, handler("near", stop)).run(stop), 30)
        assert ended == {"far": "given up", "near": "done"}
        assert all(len(o) == 1 for o in overlaps)
        await wire.up()
        await asyncio.wait_for(first, 30)
        await far.close()
    await wire.down()


# -- slow readers


@pytest.mark.timeout(120)
async def test_a_slow_reader_holds_nobody_up_and_misses_nothing(nats_server: NatsServer) -> None:
    """It asks for pages, so what it hasn't read waits on the server's disk and not in anybody's memory."""
    async with connected(nats_server) as bus, connected(nats_server) as other:
        seen: list[int] = []

        async def slowly() -> None:
            async for stored in follow(other, STREAM, [">"]):
                seen.append(stored.sequence)
                if len(seen) < 200:
                    await asyncio.sleep(0.01)

        first = other.nc.stats["in_msgs"]
        reading = asyncio.ensure_future(slowly())
        began = asyncio.get_running_loop().time()
        for start in range(0, 3000, 100):
            await bus.batch([accepted(f"n{n}", 3000) for n in range(start, start + 100)])
        wrote_s = asyncio.get_running_loop().time() - began
        assert len(seen) < 3000
        # It only follows: what it was sent and hasn't read is in its memory.
        assert other.nc.stats["in_msgs"] - first - len(seen) <= 1024
        async with asyncio.timeout(60):
            while len(seen) < 3000:
                await asyncio.sleep(0.1)
        reading.cancel()
        assert seen == list(range(1, 3001))
        assert wrote_s < 30


async def test_no_server_is_said_in_time() -> None:
    with pytest.raises(Unavailable, match="no NATS server"):
        await Bus.connect(f"nats://127.0.0.1:{free_port()}", "test", wait_s=1)
    with pytest.raises(ConfigError):
        await Bus.connect("", "test", wait_s=1)


@pytest.mark.timeout(60)
async def test_an_idle_worker_takes_work_again_after_the_server_was_killed(nats_server: NatsServer) -> None:
    """Its standing requests died with the server; nothing tells it, so it must notice."""
    async with connected(nats_server) as bus:
        taken: list[str] = []

        async def handle(lease: Lease) -> None:
            taken.append(lease.stored.subject)

        stop = asyncio.Event()
        working = asyncio.ensure_future(Worker(bus, work_consumer("local"), handle, slots=4).run(stop))
        await asyncio.sleep(1.0)
        nats_server.stop("kill")
        await asyncio.sleep(0.5)
        nats_server.start()
        task = TaskSpec(id="t", instruction="do", harness=HarnessSpec(name="command"))
        for number in range(6):
            base = (await bus.once(accepted(f"idle{number}"))).sequence
            queued = SessionQueued(session=f"s1-idle{number}-0", attempt=1, work_class="local", spec=task)
            await bus.transition(queued, base)
        async with asyncio.timeout(8):
            while len(taken) < 6:
                await asyncio.sleep(0.05)
        stop.set()
        await asyncio.wait_for(working, 10)
