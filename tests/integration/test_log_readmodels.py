"""What isn't the log can be made again from it, and from an archive where the log's own server is gone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from log_kit import lived
from tests.conftest import own_nats

from polar_analytics.handlers import Projector
from polar_analytics.schema import TABLES
from polar_analytics.store import Store
from polar_common.archive import export, load_archive
from polar_common.archive import segments as life
from polar_common.bus import Bus
from polar_common.events import BuildReconstructed
from polar_common.ids import FIRST_SEGMENT
from polar_common.nats_server import NatsServer
from polar_common.subjects import EVENTS, build_filter, trace_filter
from polar_common.topology import TRACES, Topology, events_stream
from polar_reconstructor.origins import Log
from polar_reconstructor.replay import Replay
from polar_reconstructor.rules import BUILT_IN

pytestmark = [pytest.mark.nats, pytest.mark.chdb, pytest.mark.timeout(180)]
STREAM = events_stream("s1")
WRITTEN = {"events", "traces", "completions"}


async def tables(bus: Bus, path: Path) -> dict[str, list[Any]]:
    """Every table's rows after projecting the whole log into an empty database."""
    store = Store(path, max_rows=100_000)
    await store.open()
    for stream, subject in ((STREAM, EVENTS), (TRACES, trace_filter())):
        projector = Projector(bus, store, stream, subject, batch=50, linger_s=0.02)
        stop = asyncio.Event()
        running = asyncio.ensure_future(projector.run(stop))
        await asyncio.wait_for(projector.caught_up.wait(), 60)
        stop.set()
        await running
    found = {}
    for table in TABLES:
        rows = (await store.query(f"SELECT * FROM {table.name} FINAL")).rows
        found[table.name] = sorted(rows, key=repr)
    await store.close()
    return found


@pytest.fixture
async def elsewhere(bus: Bus, tmp_path: Path) -> AsyncIterator[Bus]:
    """Another server, onto which the log was brought by way of an archive."""
    for number in range(6):
        await lived(bus, number, attempts=1 + number % 2)
    await export(bus, tmp_path / "archive", "s1", file_bytes=60_000)
    with own_nats() as server:
        other = await Bus.connect(server.url, "test/elsewhere")
        await load_archive(other, tmp_path / "archive", Topology())
        yield other
        await other.close()


async def test_analytics_from_an_archive_equal_those_of_the_log(elsewhere: Bus, bus: Bus, tmp_path: Path) -> None:
    original = await tables(bus, tmp_path / "a")
    assert len(original["events"]) > 100 and {t for t, rows in original.items() if rows} >= WRITTEN
    again = await tables(bus, tmp_path / "b")
    assert again == original
    brought = await tables(elsewhere, tmp_path / "c")
    assert brought == original


def served(server: NatsServer, path: Path, *, but: str = "") -> dict[str, list[str]]:
    """Every table's rows as the service has them once it has caught up with all streams but one."""
    argv = [sys.executable, "-m", "polar_common.cli", "run-service", "analytics", "--json"]
    env = os.environ | {"POLAR_NATS": server.url, "POLAR_ANALYTICS_CHDB": str(path), "POLAR_DATA": str(path)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE) as service:
        try:
            assert service.stdout is not None
            url = f"http://127.0.0.1:{orjson.loads(service.stdout.readline())['port']}"
            until = time.monotonic() + 60
            while not all(
                p["caught_up"] or p["stream"] == but for p in httpx.get(f"{url}/health").json()["projections"]
            ):
                assert time.monotonic() < until and service.poll() is None
                time.sleep(0.1)
            found = {}
            for table in TABLES:
                answer = httpx.post(f"{url}/v1/query", json={"sql": f"SELECT * FROM {table.name} FINAL"}, timeout=60)
                found[table.name] = sorted(map(str, answer.json()["rows"]))
            return found
        finally:
            service.terminate()


async def test_tables_have_a_dropped_segment_from_its_archive(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    for number in range(3):
        await lived(bus, number, attempts=1 + number % 2)
    await life.roll(bus, Topology())
    await lived(bus, 7, segment="s2")
    before = await asyncio.to_thread(served, nats_server, tmp_path / "before")
    assert any(STREAM in row for row in before["events"]) and len(before["evaluations"]) == 8
    await export(bus, tmp_path / "archive", "s1", file_bytes=60_000)
    await life.seal(bus, "s1")
    await life.drop(bus, "s1", tmp_path / "archive")
    assert await asyncio.to_thread(served, nats_server, tmp_path / "after") == before
    (tmp_path / "archive").rename(tmp_path / "elsewhere")
    assert await asyncio.to_thread(served, nats_server, tmp_path / "after") == before, "it is in the tables already"
    lacking = await asyncio.to_thread(served, nats_server, tmp_path / "anew", but=STREAM)
    assert lacking["events"] == [row for row in before["events"] if STREAM not in row] != []


async def test_a_replay_from_an_archive_gives_the_same_traces(elsewhere: Bus, bus: Bus) -> None:
    replay = Replay(elsewhere, "again", BUILT_IN["exact"], Log(elsewhere, FIRST_SEGMENT))
    await replay.run()
    made = {s.event.session: s.event for s in await elsewhere.read(STREAM, [build_filter("s1", "again")]) if _is(s)}
    live = {s.event.session: s.event for s in await bus.read(STREAM, [build_filter("s1", "live")]) if _is(s)}
    assert len(made) == len(live) == 12
    for session, event in live.items():
        assert (made[session].excluded, made[session].sampled_tokens) == (event.excluded, event.sampled_tokens)
    assert await ids(elsewhere, "again") == await ids(bus, "live")


def _is(stored: Any) -> bool:
    return isinstance(stored.event, BuildReconstructed)


async def ids(bus: Bus, build: str) -> dict[str, str]:
    found = await bus.read(TRACES, [f"polar.traces.*.{build}.*.*.*"])
    return {m.subject.replace(f".{build}.", "."): m.body_hash for m in found if m.subject.rpartition(".")[2].isdigit()}
