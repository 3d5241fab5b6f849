"""Replays from an archive onto a server that never held the log: the ids are those of a replay of the log itself."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import typer
from log_kit import Lived, lived
from tests.conftest import own_nats
from tests.scripted_sessions import Script
from typer.testing import CliRunner

from polar_common.archive import export, read_manifest
from polar_common.archive.segments import roll
from polar_common.blobs import Blobs
from polar_common.bus import Bus, scan
from polar_common.errors import ConfigError
from polar_common.events import ImageRef
from polar_common.ids import FIRST_SEGMENT
from polar_common.nats_server import NatsServer
from polar_common.packing import BlobRef
from polar_common.subjects import ANY_SESSION, manifests_filter
from polar_common.topology import TRACES, Topology, apply, events_stream
from polar_common.traces import GroupTraces, TraceManifest
from polar_reconstructor import cli
from polar_reconstructor.builds import summaries
from polar_reconstructor.origins import Archived, Log
from polar_reconstructor.replay import Choice, Replay
from polar_reconstructor.rules import BUILT_IN
from polar_reconstructor.traces import build_traces

pytestmark = [pytest.mark.nats, pytest.mark.timeout(180)]


@pytest.fixture
async def tasks(bus: Bus, tmp_path: Path) -> list[Lived]:
    """Three tasks that ran their course, columns large enough for blobs among them, archived in several files."""
    made = [await lived(bus, number, attempts=1 + number % 2) for number in range(3)]
    await export(bus, tmp_path / "archive", FIRST_SEGMENT, traces=False, file_bytes=20_000)
    streams = read_manifest(tmp_path / "archive").streams
    assert len(streams["POLAR_BLOBS_s1"].files) > 2 and len(streams["POLAR_EVENTS_s1"].files) > 1
    return made


@pytest.fixture
async def other(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Bus, NatsServer]]:
    """A house's empty streams on another server, which commands find."""
    with own_nats() as server:
        monkeypatch.setenv("POLAR_NATS", server.url)
        connected = await Bus.connect(server.url, "test/other")
        await apply(connected.js, Topology())
        yield connected, server
        await connected.close()


async def polar(*arguments: str) -> list[dict[str, Any]]:
    """Run a command with --json; the objects it printed."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("replay")(cli.replay)
    app.add_typer(cli.build, name="build")
    result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--json"])
    if result.exception is not None:
        raise result.exception
    return [orjson.loads(line) for line in result.stdout.splitlines()]


async def manifests(bus: Bus, build: str) -> dict[str, TraceManifest]:
    found = await bus.read(TRACES, [manifests_filter(build=build)])
    made = [TraceManifest.model_validate_json(m.body) for m in found]
    return {m.session: m for m in made}


async def ids(bus: Bus, build: str) -> dict[str, tuple[str, ...]]:
    return {session: m.traces for session, m in (await manifests(bus, build)).items()}


async def from_log(bus: Bus, rules: str) -> dict[str, tuple[str, ...]]:
    await Replay(bus, f"log-{rules}", BUILT_IN[rules], Log(bus, FIRST_SEGMENT)).run()
    return await ids(bus, f"log-{rules}")


@pytest.mark.parametrize("rules", BUILT_IN)
async def test_an_archive_gives_the_traces_of_the_log(
    tasks: list[Lived], bus: Bus, other: tuple[Bus, NatsServer], nats_server: NatsServer, tmp_path: Path, rules: str
) -> None:
    expected = await from_log(bus, rules)
    assert len(expected) == 6 and all(expected.values())
    accounts = {s: m.excluded for s, m in (await manifests(bus, f"log-{rules}")).items()}
    await bus.close()
    nats_server.stop("kill")
    new, _ = other
    (told,) = await polar("replay", "--build", "b", "--rules", rules, "--from", str(tmp_path / "archive"))
    assert (told["reconstructed"], told["failed"], told["open"], told["groups"]) == (6, 0, 0, 3)
    assert await ids(new, "b") == expected
    assert {s: m.excluded for s, m in (await manifests(new, "b")).items()} == accounts
    # Nothing but the build came along, and its traces' columns can be read where they now are.
    assert [s async for s in scan(new, events_stream(FIRST_SEGMENT), [ANY_SESSION])] == []
    reads = [read async for read in build_traces(new, "b")]
    assert sum(len(r.prompt) + len(r.response) for r in reads) > 9_000


async def test_several_processes_read_the_archive_and_an_interrupted_replay_goes_on(
    tasks: list[Lived], bus: Bus, other: tuple[Bus, NatsServer], tmp_path: Path
) -> None:
    expected = await from_log(bus, "exact")
    new, _ = other
    archive = str(tmp_path / "archive")
    (first,) = await polar("replay", "--build", "b", "--from", archive, "--session", tasks[1].sessions[0])
    assert first["reconstructed"] == 1
    (rest,) = await polar("replay", "--build", "b", "--from", archive, "--processes", "2")
    assert (rest["there"], rest["reconstructed"], rest["groups"]) == (1, 5, 3)
    assert await ids(new, "b") == expected
    groups = [GroupTraces.model_validate_json(m.body) for m in await new.read(TRACES, ["polar.traces.*.b.*.closed"])]
    assert sorted(len(g.manifests) for g in groups) == [2, 2, 2]


async def test_runs_sessions_and_times_are_chosen_in_an_archive_as_in_the_log(
    tasks: list[Lived], bus: Bus, other: tuple[Bus, NatsServer], tmp_path: Path
) -> None:
    new, _ = other
    accepted = [s.time for s in await bus.read(events_stream(FIRST_SEGMENT), ["polar.events.*.session.*.0.accepted"])]
    middle = sorted(accepted)[2].isoformat()
    archive = ["--from", str(tmp_path / "archive")]
    for name, choice, count in (
        ("run", ["--run", "run"], 6), ("none", ["--run", "else"], 0), ("since", ["--since", middle], 4),
        ("until", ["--until", middle], 2), ("one", ["--session", tasks[0].sessions[1]], 1),
    ):  # fmt: skip
        (told,) = await polar("replay", "--build", name, *choice, *archive)
        assert told["reconstructed"] == count, name
    chosen = Choice(since=datetime.fromisoformat(middle).astimezone(UTC))
    await Replay(bus, "since", BUILT_IN["exact"], Log(bus, FIRST_SEGMENT), chosen).run()
    assert await ids(new, "since") == await ids(bus, "since")
    assert list(await ids(new, "one")) == [tasks[0].sessions[1]]


async def test_builds_from_archives_are_listed_shown_and_compared(
    tasks: list[Lived], bus: Bus, other: tuple[Bus, NatsServer], tmp_path: Path
) -> None:
    archive = ["--from", str(tmp_path / "archive")]
    await polar("replay", "--build", "exact", *archive)
    await polar("replay", "--build", "apart", "--rules", "per_request", *archive)
    live = (await summaries(bus, "live"))[0]
    listed = {b["build"]: b for b in await polar("build", "list")}
    assert listed.keys() == {"exact", "apart"}
    assert (listed["exact"]["traces"], listed["exact"]["tokens"]) == (live.traces, live.tokens)
    (shown,) = await polar("build", "show", "exact")
    assert shown["excluded"] == dict(live.excluded) and shown["excluded"]["late"] > 0
    (compared,) = await polar("build", "diff", "exact", "apart")
    assert compared["common"] == 6 and compared["after"]["traces"] > compared["before"]["traces"]


async def test_what_is_wrong_with_an_archive_stops_the_replay_and_fails_no_session(
    tasks: list[Lived], bus: Bus, other: tuple[Bus, NatsServer], tmp_path: Path
) -> None:
    new, _ = other
    archive = tmp_path / "archive"
    with pytest.raises(ConfigError, match="no archive"):
        await polar("replay", "--build", "b", "--from", str(tmp_path))
    manifest = (archive / "manifest.json").read_text()
    (archive / "manifest.json").write_text(manifest.replace('"complete": true', '"complete": false'))
    with pytest.raises(ConfigError, match="wasn't finished"):
        await polar("replay", "--build", "b", "--from", str(archive))
    (archive / "manifest.json").write_text(manifest)
    blobs = sorted(archive.glob("POLAR_BLOBS*"))[1]
    damaged = bytearray(blobs.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    blobs.write_bytes(damaged)
    with pytest.raises(ConfigError, match="hash differs"):
        await polar("replay", "--build", "b", "--from", str(archive))
    assert await summaries(new) == []


async def test_a_segment_without_a_place_for_the_build_is_refused(tasks: list[Lived], bus: Bus, tmp_path: Path) -> None:
    stream = events_stream(FIRST_SEGMENT)
    config = (await bus.js.stream_info(stream)).config
    config.sealed = True
    await bus.js.update_stream(config)
    with pytest.raises(ConfigError, match="sealed"):
        await from_log(bus, "exact")
    with own_nats() as server:
        bare = await Bus.connect(server.url, "test/bare")
        with pytest.raises(ConfigError, match="no segment s1"):
            await Replay(bare, "b", BUILT_IN["exact"], Archived(tmp_path / "archive")).run()
        await bare.close()


async def test_a_blob_that_an_archive_lacks_fails_its_session_alone(
    bus: Bus, other: tuple[Bus, NatsServer], tmp_path: Path
) -> None:
    noise = np.random.default_rng(0).integers(0, 1 << 30, 20_000).tolist()
    broken = Script(index=0).started().call("big", noise, [1, 99]).ended()
    broken.refs.clear()
    for script in (broken, Script(index=1).started().call("c1", [1], [2, 99]).ended()):
        await script.publish(bus)
    await export(bus, tmp_path / "archive", FIRST_SEGMENT)
    # As a process: what it logs about the failure isn't mixed into what it prints for scripts.
    command = [sys.executable, "-m", "polar_common.cli", "replay", "--build", "b", "--json"]
    child = await asyncio.create_subprocess_exec(
        *command, "--from", str(tmp_path / "archive"), stdout=PIPE, stderr=PIPE, env=os.environ
    )
    printed, logged = await asyncio.wait_for(child.communicate(), 60)
    told = orjson.loads(printed)
    assert (told["reconstructed"], told["failed"], child.returncode) == (1, 1, 0)
    assert b"session not built" in logged
    (shown,) = await polar("build", "show", "b")
    assert list(shown["reasons"]) == [r for r in shown["reasons"] if "completion big, prompt" in r and "missing" in r]


async def test_pictures_that_traces_name_come_along(bus: Bus, other: tuple[Bus, NatsServer], tmp_path: Path) -> None:
    new, _ = other
    body = b"\x89PNG" + bytes(7_000_000)
    ref = BlobRef(sha256=hashlib.sha256(body).hexdigest(), size=len(body), media_type="image/png")
    script = Script().started().call("c1", [1, 7, 7], [10, 99], images=(ImageRef(message=0, part=0, blob=ref),)).ended()
    script.refs.append((ref, body))
    await script.publish(bus)
    await export(bus, tmp_path / "archive", FIRST_SEGMENT)
    for build in ("one", "two"):
        (told,) = await polar("replay", "--build", build, "--from", str(tmp_path / "archive"))
        assert (told["reconstructed"], told["failed"]) == (1, 0)
    (read,) = [read async for read in build_traces(new, "two")]
    assert read.trace.images[0].blob == ref
    assert await Blobs(new, FIRST_SEGMENT).get(ref) == body


async def test_a_build_spans_the_segments_that_are_kept(
    tasks: list[Lived], bus: Bus, other: tuple[Bus, NatsServer], tmp_path: Path
) -> None:
    """The house's log has gone on to its second segment; the first one's archive is built onto it all the same."""
    new, _ = other
    await roll(new, Topology())
    await lived(new, 7, segment="s2")
    (told,) = await polar("replay", "--build", "live", "--from", str(tmp_path / "archive"))
    assert told["reconstructed"] == 6
    (listed,) = await polar("build", "list")
    assert (listed["build"], listed["sessions"]) == ("live", 8)
    (shown,) = await polar("build", "show", "live")
    assert shown["traces"] == listed["traces"] == 8
    (compared,) = await polar("build", "diff", "live", "live")
    assert (compared["common"], compared["changes"]) == (8, [])
