"""Before the log is full: what its servers and its disk tell of the room that is left, and what ingest does then."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import nats.errors
import pytest
from ingest_fakes import Edge, FakeHouse, start_edge, task, until
from nats.js.errors import APIError
from test_ingest_process import Process
from test_log_disk import Disk, disks, fill
from tests.conftest import own_nats, start_nats

from polar_common.bus import Bus
from polar_common.connection import with_user
from polar_common.errors import Unavailable
from polar_common.nats_server import NatsCluster, NatsServer
from polar_common.permissions import ADMIN, USERS, authorization, users
from polar_common.room import Room, room
from polar_common.topology import TRACES, Topology, apply

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]
PASSWORDS = {user: f"pw-{user}" for user in USERS}
GUARDED = authorization(users(Topology()), PASSWORDS)
MB = 1 << 20


def url_of(server: NatsServer | NatsCluster, user: str) -> str:
    return with_user(server.url, user, PASSWORDS[user])


@asynccontextmanager
async def as_user(server: NatsServer | NatsCluster, user: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(url_of(server, user), f"test/{user}")
    yield bus
    await bus.close()


async def stuffed(bus: Bus, megabytes: int) -> None:
    """So much in the store that can be purged again."""
    for number in range(megabytes):
        await bus.once_raw(f"polar.traces.r.b.t.s.{number}", os.urandom(MB), f"h{number}")


async def submitted(edge: Edge, name: str, **fields: object) -> tuple[int, str]:
    answer = await edge.client.post("/v1/tasks?run=r", json=task(name, **fields))
    if answer.status_code == 503:
        assert answer.headers["retry-after"]
    return answer.status_code, answer.text


async def test_nothing_is_admitted_or_released_while_the_servers_store_is_nearly_full() -> None:
    """What runs goes on meanwhile; with room again, so does what waits."""
    with own_nats(authorization=GUARDED, max_store_bytes=24 * MB) as server:
        async with as_user(server, ADMIN) as admin:
            await apply(admin.js, Topology(dlq_bytes=-1))
            edge = await start_edge(url_of(server, "ingest"), ingest_headroom=8 * MB, ingest_release_ahead=1)
            assert (await submitted(edge, "before", samples=3))[0] == 202
            await stuffed(admin, 17)
            await until(lambda: edge.scheduler.headroom.short, 10)
            status, text = await submitted(edge, "later")
            assert status == 503 and "MB are left in the store of server test-" in text and "8.4 MB" in text
            assert (await submitted(edge, "before", samples=3))[0] == 202, "known already"
            health = (await edge.client.get("/health")).json()
            assert health["status"] == "full" and health["detail"] == edge.scheduler.headroom.short
            house = FakeHouse(admin)
            async with house.open():
                await until(lambda: len(house.claims) == 1)
                await asyncio.sleep(3)
                assert len(house.claims) == 1
                await admin.js.purge_stream(TRACES)
                await until(lambda: len(house.claims) == 3, 10)
            assert (await submitted(edge, "later"))[0] == 202
            assert (await edge.client.get("/health")).json() == {"status": "ok", "detail": ""}
            await edge.kill()


@pytest.fixture
def disk() -> Iterator[Disk]:
    with tempfile.TemporaryDirectory(prefix="polar-disk-") as name, disks([Path(name) / "disk"], 64) as made:
        yield made[0]


async def test_nothing_is_admitted_while_the_logs_disk_is_nearly_full(disk: Disk) -> None:
    """Somebody else fills it, which the server doesn't see: refused at once, long before a write fails."""
    server = start_nats(disk.path / "nats")
    try:
        async with streamed(server):
            edge = await start_edge(server.url, data=disk.path, ingest_headroom=16 * MB)
            assert (await submitted(edge, "before"))[0] == 202
            rest = fill(disk, 12 * MB)
            await until(lambda: edge.scheduler.headroom.short, 10)
            async with asyncio.timeout(1):
                status, text = await submitted(edge, "later")
            assert status == 503 and "MB are left on the log's disk" in text
            rest.unlink()
            await until(lambda: not edge.scheduler.headroom.short, 10)
            assert (await submitted(edge, "later"))[0] == 202
            assert "no space left" not in server.log.read_text()
            await edge.kill()
    finally:
        server.stop("kill")


@asynccontextmanager
async def streamed(server: NatsServer) -> AsyncIterator[Bus]:
    bus = await Bus.connect(server.url, "test/bus")
    await apply(bus.js, Topology(dlq_bytes=-1))
    yield bus
    await bus.close()


async def test_a_streams_own_bound_counts(nats_server: NatsServer) -> None:
    bus = await Bus.connect(nats_server.url, "test/bus")
    await apply(bus.js, Topology(events_bytes=2 * MB))
    assert await room(bus, "s1") == Room(2 * MB, "below the bound of POLAR_EVENTS_s1")
    edge = await start_edge(nats_server.url, ingest_headroom=MB)
    for number in range(7):  # each is there twice, accepted and queued
        assert (await submitted(edge, f"t{number}", instruction="x" * 90_000))[0] == 202
    await until(lambda: edge.scheduler.headroom.short, 10)
    status, text = await submitted(edge, "later")
    assert status == 503 and "left below the bound of POLAR_EVENTS_s1" in text
    await edge.kill()
    await bus.close()


async def test_a_log_without_any_bound_that_is_told_admits(nats_server: NatsServer, bus: Bus) -> None:
    assert await room(bus, "s1") is None
    edge = await start_edge(nats_server.url, ingest_headroom=1 << 60)
    assert (await submitted(edge, "t"))[0] == 202
    await edge.kill()


async def test_of_three_servers_what_two_of_them_have_counts(tmp_path: Path) -> None:
    """The log goes on with those. One that is away doesn't hide the others."""
    cluster = NatsCluster(tmp_path, sync="2m")
    for number, server in enumerate(cluster.servers):
        server.config = replace(
            server.config, authorization=GUARDED, max_store_bytes=(number + 1) * 40 * MB, name=f"n{number}"
        )
    cluster.start()
    try:
        async with as_user(cluster, ADMIN) as admin:
            await until(lambda: ready(admin), 60)
            async with as_user(cluster, "ingest") as bus:
                await until(lambda: at_server(bus, "n1"), 30)
                left = await room(bus, "s1")
                assert left is not None and 79 * MB < left.bytes <= 80 * MB
                cluster.servers[2].stop("kill")
                await until(lambda: at_server(bus, "n0"), 30)
                cluster.servers[2].start()
                await until(lambda: at_server(bus, "n1"), 30)
    finally:
        cluster.stop("kill")


async def ready(admin: Bus) -> bool:
    try:
        await apply(admin.js, Topology(replicas=3, dlq_bytes=-1))
    except (APIError, TimeoutError, nats.errors.Error):  # no leader yet
        return False
    return True


async def at_server(bus: Bus, name: str) -> bool:
    try:
        left = await room(bus, "s1")
    except Unavailable:  # the stream's leader was the one that went
        return False
    return left is not None and left.where.endswith(f" {name}")


async def test_status_and_doctor_say_that_nothing_is_admitted(
    tmp_path: Path, nats_server: NatsServer, bus: Bus
) -> None:
    (tmp_path / "nats").mkdir()
    process = Process(tmp_path, nats_server.url, POLAR_INGEST_HEADROOM=str(1 << 60))
    await process.start()
    env = {k: v for k, v in os.environ.items() if not k.startswith("POLAR_")} | {"POLAR_URL": process.url}

    def polar(*arguments: str) -> tuple[int, list[dict[str, object]]]:
        argv = [sys.executable, "-m", "polar_common.cli", *arguments, "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60, check=False)
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    try:
        code, told = await asyncio.to_thread(polar, "status")
        parts = {p["name"]: p["state"] for p in told[0]["parts"]}  # type: ignore[attr-defined]
        assert code == 1 and "are left on the log's disk" in parts["ingest"], told
        code, told = await asyncio.to_thread(polar, "doctor")
        [line] = [t for t in told if t["check"] == "ingest"]
        assert code == 1 and line["verdict"] == "fail" and "nothing is admitted" in str(line["text"])
    finally:
        process.end()
