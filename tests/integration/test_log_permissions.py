"""Each service's user against a real server: what it owns is accepted, everything else is refused by the server."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from tests.conftest import own_nats, start_nats

from polar_common.blobs import Blobs
from polar_common.bus import Bus, Lease, Worker, follow, scan
from polar_common.bus.poison import bury
from polar_common.bus.read import Stored
from polar_common.connection import with_user
from polar_common.errors import ConfigError, Poison, Unavailable
from polar_common.events import SessionAccepted, SessionQueued
from polar_common.nats_server import NatsServer, TlsFiles
from polar_common.ownership import OWNERS
from polar_common.permissions import ADMIN, SERVICES, STORES, SYSTEM, TOOLS, USERS, authorization, users
from polar_common.task_spec import HarnessSpec, TaskSpec
from polar_common.topology import Topology, apply, consumers, events_stream, work_consumer

pytestmark = pytest.mark.nats
PASSWORDS = {user: f"pw-{user}" for user in USERS}
STREAM = events_stream("s1")


@pytest.fixture(scope="module")
def guarded() -> Iterator[NatsServer]:
    with own_nats(authorization=authorization(users(Topology()), PASSWORDS)) as server:
        asyncio.run(_apply(server))
        yield server


async def _apply(server: NatsServer) -> None:
    bus = await connect(server, ADMIN)
    await apply(bus.js, Topology())
    await bus.close()


async def connect(server: NatsServer, user: str) -> Bus:
    return await Bus.connect(with_user(server.url, user, PASSWORDS[user]), f"test/{user}")


class Watched:
    """A plain connection that remembers what the server refused."""

    def __init__(self, nc: Client, refused: list[str]) -> None:
        self.nc = nc
        self._refused = refused

    async def refused(self, subject: str) -> bool:
        """Publish something there; whether the server says no."""
        before = len(self._refused)
        await self.nc.publish(subject, b"x")
        await self.nc.flush()
        await asyncio.sleep(0.01)
        return len(self._refused) > before


@pytest.fixture
async def watched(guarded: NatsServer, request: pytest.FixtureRequest) -> AsyncIterator[Watched]:
    refused: list[str] = []

    async def on_error(error: Exception) -> None:
        refused.append(str(error))

    user = request.param
    nc = await nats.connect(guarded.url, user=user, password=PASSWORDS[user], error_cb=on_error)
    yield Watched(nc, refused)
    await nc.close()


@pytest.mark.parametrize("watched", SERVICES, indirect=True)
async def test_a_service_is_refused_outside_its_subjects(watched: Watched, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["watched"]
    for number, (kind, one) in enumerate(OWNERS.items()):
        subject = one.pattern.replace("*", f"x{number}")
        assert await watched.refused(subject) == (one.owner != name), kind
    for subject in (
        "polar.events.s1.other",
        "polar.dlq.somebody.OTHER.1",
        f"$JS.API.STREAM.DELETE.{STREAM}",
        f"$JS.API.STREAM.PURGE.{STREAM}",
        f"$JS.API.STREAM.UPDATE.{STREAM}",
        "$JS.API.STREAM.CREATE.OTHER",
        f"$JS.API.STREAM.MSG.DELETE.{STREAM}",
        f"$JS.API.CONSUMER.DELETE.{STREAM}.evaluator",
        f"$JS.API.CONSUMER.DURABLE.CREATE.{STREAM}.gateway-local",
        "$SYS.REQ.SERVER.PING",
        "anything.else",
    ):
        assert await watched.refused(subject), subject
    for spec in consumers(Topology()):
        if spec.owner != name:
            assert await watched.refused(f"$JS.API.CONSUMER.MSG.NEXT.{spec.stream}.{spec.durable}")
            assert await watched.refused(f"$JS.ACK.{spec.stream}.{spec.durable}.1.1.1.1.1")
    assert await watched.refused("polar.traces.r.b.t.s.0") == (name != "reconstructor")
    assert await watched.refused(STORES) == (name != "ingest")


@pytest.mark.parametrize("watched", SERVICES, indirect=True)
async def test_a_service_cannot_listen_to_others(watched: Watched) -> None:
    for subject in ("polar.events.>", "_INBOX.>", "_INBOX_gateway_not.>", "$JS.>", ">"):
        before = len(watched._refused)
        await watched.nc.subscribe(subject)
        await watched.nc.flush()
        await asyncio.sleep(0.05)
        assert len(watched._refused) > before, subject


async def test_services_do_their_work_as_their_users(guarded: NatsServer) -> None:
    ingest, gateway = await connect(guarded, "ingest"), await connect(guarded, "gateway")
    session = "s1-permitted-0"
    accepted = SessionAccepted(session=session, attempt=0, index=0, work_class="local")
    base = (await ingest.batch([accepted])).sequence
    spec = TaskSpec(id="t", instruction="do", harness=HarnessSpec(name="command"))
    await ingest.transition(SessionQueued(session=session, attempt=1, work_class="local", spec=spec), base)
    seen: list[str] = []
    stop = asyncio.Event()

    async def handle(lease: Lease) -> None:
        seen.append(lease.stored.subject)
        state = await gateway.read_session(session)
        assert len(state) == 2
        assert await gateway.last(lease.stored.subject) is not None
        await Blobs(gateway, "s1").put(b"kept")
        stop.set()

    await asyncio.wait_for(Worker(gateway, work_consumer("local"), handle).run(stop), 20)
    assert seen
    info = await gateway.js.consumer_info(STREAM, "gateway-local")
    assert info.num_ack_pending == 0
    async with asyncio.timeout(10):
        async for stored in follow(gateway, STREAM, ["polar.events.>"]):
            if stored.subject == seen[0]:
                break
    await ingest.close()
    await gateway.close()


async def test_whoever_buries_a_message_may_bury_it_again_after_a_retry(guarded: NatsServer) -> None:
    """The second burial finds the first one on its subject, which its user must be able to see."""
    admin = await connect(guarded, ADMIN)
    for spec in consumers(Topology()):
        user = await connect(guarded, spec.owner)
        stored = Stored("polar.events.s1.x", 7, datetime.now(UTC), b"body", "")
        async with asyncio.timeout(4):
            for reason in ("one", "two"):
                await bury(user, spec.durable, spec.stream, stored, Poison(reason))
        assert await admin.last(f"polar.dlq.{spec.durable}.{spec.stream}.7") is not None
        await user.close()
    await admin.close()


async def test_tools_read_everything_and_change_nothing(guarded: NatsServer) -> None:
    bus = await connect(guarded, TOOLS)
    assert {str(s.config.name) for s in await bus.js.streams_info()} >= {STREAM, "POLAR_TRACES", "POLAR_DLQ"}
    assert all([s.subject.startswith("polar.dlq.") async for s in scan(bus, "POLAR_DLQ", [">"])])
    event = SessionAccepted(session="s1-notools-0", attempt=0, index=0, work_class="local")
    with pytest.raises((nats.errors.Error, TimeoutError, Unavailable)):
        async with asyncio.timeout(3):
            await bus.once(event)
    await bus.close()


async def test_a_wrong_password_or_no_user_is_refused_by_name(guarded: NatsServer) -> None:
    for url in (guarded.url, with_user(guarded.url, "ingest", "guess"), with_user(guarded.url, SYSTEM, "guess")):
        with pytest.raises(ConfigError) as caught:
            await Bus.connect(url, "test", wait_s=1)
        assert "guess" not in str(caught.value)


def certificates(directory: Path) -> dict[str, Path]:
    """An authority of our own and certificates by it for a server on loopback and for a client."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca")
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
            "-out", f"{name}.pem", "-extfile", "names",
        )  # fmt: skip
    return {n: directory / n for n in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")}


async def test_tls_with_certificates_of_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = certificates(tmp_path)
    tls = TlsFiles(cert=made["server.pem"], key=made["server.key"], ca=made["ca.pem"])
    server = start_nats(tmp_path, sync="2m", tls=tls, authorization=authorization(users(Topology()), PASSWORDS))
    url = with_user(server.url.replace("nats://", "tls://"), "ingest", PASSWORDS["ingest"])
    with pytest.raises(Unavailable):
        await Bus.connect(url, "test", wait_s=2)
    monkeypatch.setenv("POLAR_NATS_TLS_CA", str(made["ca.pem"]))
    with pytest.raises((Unavailable, ConfigError)):
        await Bus.connect(url, "test", wait_s=2)
    monkeypatch.setenv("POLAR_NATS_TLS_CERT", str(made["client.pem"]))
    monkeypatch.setenv("POLAR_NATS_TLS_KEY", str(made["client.key"]))
    bus = await Bus.connect(url, "test", wait_s=5)
    await bus.nc.flush()
    assert bus.nc._transport is not None
    await bus.close()
    monkeypatch.setenv("POLAR_NATS_TLS_CERT", str(tmp_path / "nowhere.pem"))
    with pytest.raises(ConfigError, match="certificate"):
        await Bus.connect(url, "test", wait_s=1)
    server.stop("kill")
