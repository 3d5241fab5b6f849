"""`polar dlq` and `polar log` as a user types them, against servers without a house: what they print, for people and as
JSON, how they end, and that what was interrupted goes on."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from log_kit import Lived, command, lived
from tests.conftest import own_nats

from polar_common.archive import read_archive, read_manifest
from polar_common.bus import Bus, Lease, Worker, scan
from polar_common.errors import Poison
from polar_common.nats_server import NatsServer
from polar_common.topology import DLQ, Topology, consumers
from polar_common.verify import LiveSource, Options, audit

pytestmark = [pytest.mark.nats, pytest.mark.timeout(240)]
EVALUATOR = next(c for c in consumers(Topology()) if c.durable == "evaluator")
GATEWAY = next(c for c in consumers(Topology()) if c.durable == "gateway-local")


@pytest.fixture
def other() -> Iterator[NatsServer]:
    """A server that has never seen a stream."""
    with own_nats() as server:
        yield server


def said(server: NatsServer, *arguments: str, code: int = 0) -> str:
    """A command as for people: both streams."""
    argv = [sys.executable, "-m", "polar_common.cli", *arguments]
    env = os.environ | {"POLAR_NATS": server.url, "COLUMNS": "200"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


# -- dead letters


async def handled(bus: Bus, spec: Any, broken: set[str], count: int) -> list[str]:
    """Let a consumer handle so many messages; sessions in `broken` are poison."""
    seen: list[str] = []
    stop = asyncio.Event()

    async def handle(lease: Lease) -> None:
        session = lease.stored.subject.split(".")[4]
        seen.append(session)
        if len(seen) >= count:
            stop.set()
        if session in broken:
            raise Poison(f"a hole in {session}")

    await asyncio.wait_for(Worker(bus, spec, handle).run(stop), 20)
    return seen


async def dead(bus: Bus) -> list[Lived]:
    """Two tasks; the evaluator has buried one session of each, the gateway one queued attempt."""
    tasks = [await lived(bus, n) for n in range(2)]
    await handled(bus, EVALUATOR, {t.sessions[0] for t in tasks}, 4)
    await handled(bus, GATEWAY, {tasks[0].sessions[1]}, 4)
    return tasks


async def test_dead_letters_are_listed_shown_and_offered_again(bus: Bus, nats_server: NatsServer) -> None:
    tasks = await dead(bus)
    rows = await command(nats_server, "dlq", "list")
    assert [(r["consumer"], r["state"], r["tries"]) for r in rows] == [
        ("evaluator", "dead", 1), ("evaluator", "dead", 1), ("gateway-local", "dead", 1),
    ]  # fmt: skip
    assert [r["subject"].split(".")[4] for r in rows[:2]] == [t.sessions[0] for t in tasks]
    assert all(r["reason"].startswith("Poison: a hole in ") for r in rows)
    assert await command(nats_server, "dlq", "list", "--consumer", "gateway-local") == rows[2:]
    (shown,) = await command(nats_server, "dlq", "show", str(rows[0]["number"]))
    assert shown.items() >= rows[0].items() and "session.artifacts" in base64.b64decode(shown["body"]).decode()
    assert await command(nats_server, "dlq", "retry", str(rows[0]["number"])) == [{"retried": [rows[0]["number"]]}]
    # From the letter's message on: it, and what comes after it.
    assert await handled(bus, EVALUATOR, set(), 4) == [s for t in tasks for s in t.sessions]
    states = [r["state"] for r in await command(nats_server, "dlq", "list")]
    assert states == ["retried", "dead", "dead"]
    (again,) = await command(nats_server, "dlq", "retry", "--consumer", "evaluator")
    assert again["retried"] == [r["number"] for r in rows[:2]]


async def test_what_cant_be_offered_again_is_said(bus: Bus, nats_server: NatsServer) -> None:
    await dead(bus)
    rows = await command(nats_server, "dlq", "list")
    for arguments, why in (
        (("retry", str(rows[2]["number"])), "submit its task again"),
        (("retry", "999"), "no such dead letters"),
        (("retry",), "no such dead letters"),
        (("show", "999"), "no dead letter 999"),
        (("retry", "--consumer", "nobody"), "no such dead letters"),
    ):
        text = await asyncio.to_thread(said, nats_server, "dlq", *arguments, code=2)
        assert why in " ".join(text.split()), text
    assert {r["state"] for r in await command(nats_server, "dlq", "list")} == {"dead"}


async def test_dead_letters_for_people(bus: Bus, nats_server: NatsServer) -> None:
    assert "no dead letters" in await asyncio.to_thread(said, nats_server, "dlq", "list")
    await dead(bus)
    text = await asyncio.to_thread(said, nats_server, "dlq", "list")
    assert "evaluator" in text and "a hole in" in text
    number = (await command(nats_server, "dlq", "list"))[0]["number"]
    text = await asyncio.to_thread(said, nats_server, "dlq", "show", str(number))
    assert "a hole in" in text and '"kind":"session.artifacts"' in text.replace("\n", "")
    assert "1 offered again" in await asyncio.to_thread(said, nats_server, "dlq", "retry", str(number))


async def test_parked_messages_are_listed_also_after_a_segment_was_dropped(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    await lived(bus, 0)
    archive = str(tmp_path / "s1")
    await command(nats_server, "log", "roll")
    newer = orjson.dumps({"kind": "session.running", "schema_version": 99})
    await bus.nc.request("polar.events.s2.session.s2-x-0.1.running", newer)
    await command(nats_server, "log", "seal", "s1")
    (before,) = [r for r in await command(nats_server, "log", "segments") if r["segment"] == "s1"]
    await command(nats_server, "log", "export", archive)
    (after,) = [r for r in await command(nats_server, "log", "segments") if r["segment"] == "s1"]
    assert (before["state"], before["archived"]) == ("sealed", 0)
    assert (after["state"], after["archived"]) == ("sealed", after["last"])
    await command(nats_server, "log", "drop", "s1", "--archive", archive)
    (row,) = await command(nats_server, "dlq", "list", "--parked")
    assert (row["state"], row["subject"]) == ("parked", "polar.events.s2.session.s2-x-0.1.running")
    assert "version 99" in row["reason"]


# -- archives


async def test_an_archive_goes_to_another_server_whole(
    bus: Bus, nats_server: NatsServer, other: NatsServer, tmp_path: Path
) -> None:
    for number in range(3):
        await lived(bus, number, attempts=1 + number % 2)
    archive = str(tmp_path / "s1")
    (exported,) = await command(nats_server, "log", "export", archive)
    assert exported["complete"] and exported["segment"] == "s1" and exported["wrong"] == []
    by_stream = {s["stream"]: s for s in exported["streams"]}
    state = (await bus.js.stream_info("POLAR_EVENTS_s1")).state
    assert (by_stream["POLAR_EVENTS_s1"]["messages"], by_stream["POLAR_EVENTS_s1"]["last"]) == (
        state.messages, state.last_seq,
    )  # fmt: skip
    (imported,) = await command(other, "log", "import", archive)
    assert imported["streams"] == exported["streams"]
    assert (await command(other, "verify", "--settled"))[0]["ok"]
    assert (await command(other, "log", "import", archive))[0]["streams"] == exported["streams"]
    assert await command(other, "ledger") == await command(nats_server, "ledger")
    back = str(tmp_path / "back")
    await command(other, "log", "export", back)
    first, second = ([(s.subject, s.sequence, s.time, s.body) for s in read_archive(Path(d))] for d in (archive, back))
    assert first == second
    text = await asyncio.to_thread(said, nats_server, "log", "export", archive)
    assert "POLAR_EVENTS_s1" in text and "segment s1" in text


async def test_an_import_into_a_log_that_holds_something_else_is_refused(
    bus: Bus, nats_server: NatsServer, other: NatsServer, tmp_path: Path
) -> None:
    await lived(bus, 0)
    archive = str(tmp_path / "s1")
    await command(nats_server, "log", "export", archive)
    await command(other, "log", "import", archive)
    bus_there = await Bus.connect(other.url, "test/other")
    await bus_there.nc.request("polar.events.s1.task.s1-other.accepted", b"{}")
    before = (await bus_there.js.stream_info("POLAR_EVENTS_s1")).state.last_seq
    text = await asyncio.to_thread(said, other, "log", "import", archive, code=1)
    assert "other messages" in " ".join(text.split())
    assert (await bus_there.js.stream_info("POLAR_EVENTS_s1")).state.last_seq == before
    await bus_there.close()
    text = await asyncio.to_thread(said, other, "log", "import", str(tmp_path / "nowhere"), code=2)
    assert "holds no archive" in " ".join(text.split())


def killed(server: NatsServer, *arguments: str, when: Any) -> bool:
    """Start a command and kill it with SIGKILL as soon as `when()` is true; False if it had ended before."""
    argv = [sys.executable, "-m", "polar_common.cli", *arguments, "--json"]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, env=os.environ | {"POLAR_NATS": server.url})
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if when():
            process.kill()
            process.wait()
            return True
        time.sleep(0.002)
    process.kill()
    process.wait()
    return False


async def many(bus: Bus, count: int) -> None:
    """A log that takes a while to copy."""
    await lived(bus, 0)
    for number in range(count):
        subject = f"polar.events.s1.completion.s1-x{number // 50}-0.1.{number}.captured"
        await bus.nc.publish(subject, b'{"kind": "x", "pad": "' + b"x" * 400 + b'"}')
    await bus.nc.flush(timeout=30)
    async with asyncio.timeout(30):
        while (await bus.js.stream_info("POLAR_EVENTS_s1")).state.messages < count:
            await asyncio.sleep(0.1)


async def test_killed_exports_and_imports_go_on(
    bus: Bus, nats_server: NatsServer, other: NatsServer, tmp_path: Path
) -> None:
    await many(bus, 30_000)
    archive = tmp_path / "s1"
    part_seen = lambda: any(p.stat().st_size > 0 for p in archive.glob("POLAR_EVENTS_s1*.part"))  # noqa: E731
    assert await asyncio.to_thread(killed, nats_server, "log", "export", str(archive), when=part_seen)
    assert list(archive.glob("*.part"))
    (exported,) = await command(nats_server, "log", "export", str(archive))
    assert exported["complete"] and not list(archive.glob("*.part"))
    assert (await command(nats_server, "log", "check", str(archive)))[0]["wrong"] == []
    there = await Bus.connect(other.url, "test/other")
    wanted = read_manifest(archive).streams["POLAR_EVENTS_s1"]

    async def held() -> int:
        with_stream = [s for s in await there.js.streams_info() if s.config.name == "POLAR_EVENTS_s1"]
        return with_stream[0].state.messages if with_stream else 0

    loop = asyncio.get_running_loop()
    under_way = lambda: asyncio.run_coroutine_threadsafe(held(), loop).result(10) > 1000  # noqa: E731
    assert await asyncio.to_thread(killed, other, "log", "import", str(archive), when=under_way)
    assert 1000 < await held() < wanted.messages
    await command(other, "log", "import", str(archive))
    copied = [(s.subject, s.sequence, s.body) async for s in scan(there, "POLAR_EVENTS_s1", [">"])]
    assert copied == [(s.subject, s.sequence, s.body) async for s in scan(bus, "POLAR_EVENTS_s1", [">"])]
    await there.close()


async def test_a_damaged_archive_is_named_and_not_imported(
    bus: Bus, nats_server: NatsServer, other: NatsServer, tmp_path: Path
) -> None:
    await lived(bus, 0)
    archive = tmp_path / "s1"
    await command(nats_server, "log", "export", str(archive))
    file = archive / read_manifest(archive).streams["POLAR_BLOBS_s1"].files[0].name
    body = bytearray(file.read_bytes())
    body[len(body) // 2] ^= 1
    file.write_bytes(body)
    (report,) = await command(nats_server, "log", "check", str(archive), code=1)
    assert len(report["wrong"]) == 1 and file.name in report["wrong"][0]
    text = await asyncio.to_thread(said, other, "log", "import", str(archive), code=1)
    assert file.name in "".join(text.split())
    (row,) = await command(nats_server, "log", "segments")
    assert (row["segment"], row["state"]) == ("s1", "open")


async def test_the_dead_letters_of_a_segment_travel_with_it(
    bus: Bus, nats_server: NatsServer, other: NatsServer, tmp_path: Path
) -> None:
    await dead(bus)
    archive = str(tmp_path / "s1")
    await command(nats_server, "log", "export", archive)
    await command(other, "log", "import", archive)
    here, there = await command(nats_server, "dlq", "list"), await command(other, "dlq", "list")
    assert [r["reason"] for r in here] == [r["reason"] for r in there] and len(there) == 3
    bus_there = await Bus.connect(other.url, "test/other")
    report = await audit(LiveSource(bus_there), Options(settled=True))
    assert report.totals == (await audit(LiveSource(bus), Options(settled=True))).totals
    assert len([s async for s in scan(bus_there, DLQ, [">"])]) == 3
    await bus_there.close()


async def test_a_segment_is_rolled_when_it_is_due(bus: Bus, nats_server: NatsServer) -> None:
    await lived(bus, 0)
    assert await command(nats_server, "log", "roll", "--if-due", code=1) == [{"opened": "", "due": ""}]
    (rolled,) = await command(nats_server, "log", "roll", "--if-due", "--messages", "10")
    assert rolled["opened"] == "s2" and rolled["due"].endswith(" messages")
    states = [(r["segment"], r["state"], r["due"]) for r in await command(nats_server, "log", "segments")]
    assert states == [("s1", "rolled", ""), ("s2", "open", "")]
