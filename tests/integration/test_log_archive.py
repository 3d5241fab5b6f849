"""Archives: what is exported is what was there; interrupted exports and imports go on; damage is found; segments are
dropped only when nothing can be lost by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from log_kit import accepted, lived

from polar_common.archive import ArchiveSource, check_archive, export, load_archive, read_archive, read_manifest
from polar_common.archive import segments as life
from polar_common.bus import Bus, scan
from polar_common.bus.read import Stored
from polar_common.catalogue import Catalogue, Fact
from polar_common.errors import BlobError, ConfigError, Conflict, Unavailable
from polar_common.topology import Topology, apply, events_stream
from polar_common.verify import LiveSource, Options, audit

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]
STREAMS = {"events": "POLAR_EVENTS_s1", "blobs": "POLAR_BLOBS_s1", "traces": "POLAR_TRACES"}


def told(stored: Stored) -> tuple[str, int, object, bytes, str]:
    return stored.subject, stored.sequence, stored.time, stored.body, stored.body_hash


async def test_an_archive_is_the_log(bus: Bus, tmp_path: Path) -> None:
    await lived(bus, 0)
    await lived(bus, 1, attempts=2)
    manifest = await export(bus, tmp_path, "s1", file_bytes=20_000)
    assert manifest.complete and len(manifest.streams["POLAR_EVENTS_s1"].files) > 2
    assert check_archive(tmp_path)[1] == []
    for kind, stream in STREAMS.items():
        live = [told(s) async for s in scan(bus, stream, [">"])]
        assert [told(s) for s in read_archive(tmp_path, kind)] == live and live
    middle = read_manifest(tmp_path).streams["POLAR_EVENTS_s1"].last // 2
    assert next(read_archive(tmp_path, after=middle)).sequence == middle + 1


async def test_an_archive_is_audited_without_a_server(bus: Bus, tmp_path: Path) -> None:
    await lived(bus, 0, attempts=2)
    await export(bus, tmp_path, "s1", file_bytes=20_000)
    live = await audit(LiveSource(bus), Options(settled=True))
    stored = await audit(ArchiveSource(tmp_path), Options(settled=True))
    assert stored.ok, stored.findings
    assert (stored.totals, stored.excluded) == (live.totals, live.excluded)


async def test_an_export_that_was_broken_off_goes_on(bus: Bus, tmp_path: Path) -> None:
    await lived(bus, 0)

    class BrokenOff(Exception):
        pass

    seen: list[int] = []

    def stop_after(count: int) -> Callable[[str, int], None]:
        def progress(stream: str, messages: int) -> None:
            seen.append(messages)
            if len(seen) == count:
                raise BrokenOff

        return progress

    first = await export(bus, tmp_path, "s1", file_bytes=5_000)
    done = {f.name: f.sha256 for s in first.streams.values() for f in s.files}
    for number in range(1, 25):
        await lived(bus, number)
    with pytest.raises(BrokenOff):
        await export(bus, tmp_path, "s1", file_bytes=5_000, on_progress=stop_after(5))
    assert not read_manifest(tmp_path).complete
    (tmp_path / "POLAR_EVENTS_s1.000099.zst.part").write_bytes(b"half a file")
    last = await export(bus, tmp_path, "s1", file_bytes=5_000)
    assert check_archive(tmp_path)[1] == [] and not list(tmp_path.glob("*.part"))
    assert done.items() <= {f.name: f.sha256 for s in last.streams.values() for f in s.files}.items()
    assert [told(s) for s in read_archive(tmp_path)] == [told(s) async for s in scan(bus, "POLAR_EVENTS_s1", [">"])]


async def test_import_gives_the_same_log_and_goes_on_after_an_interruption(
    bus: Bus, empty: Bus, tmp_path: Path
) -> None:
    for number in range(8):
        await lived(bus, number)
    await export(bus, tmp_path, "s1")

    class BrokenOff(Exception):
        pass

    def stop(stream: str, count: int) -> None:
        raise BrokenOff

    with pytest.raises(BrokenOff):
        await load_archive(empty, tmp_path, Topology(), stop)
    await load_archive(empty, tmp_path, Topology())
    await load_archive(empty, tmp_path, Topology())
    for kind, stream in STREAMS.items():
        there = [told(s) async for s in scan(empty, stream, [">"])]
        wanted = [told(s) for s in read_archive(tmp_path, kind)]
        if kind == "traces":
            there, wanted = [(s, 0, t, b, h) for s, _, t, b, h in there], [(s, 0, t, b, h) for s, _, t, b, h in wanted]
        assert there == wanted
    report = await audit(LiveSource(empty), Options(settled=True))
    assert report.ok, report.findings
    stored = await empty.last("polar.events.s1.>")
    assert stored is not None and stored.time == [s.time for s in read_archive(tmp_path)][-1]


async def test_import_refuses_a_log_that_holds_something_else(bus: Bus, empty: Bus, tmp_path: Path) -> None:
    await lived(bus, 0)
    await export(bus, tmp_path, "s1")
    await apply(empty.js, Topology())
    await empty.batch(accepted(77))
    with pytest.raises(Conflict, match="other messages"):
        await load_archive(empty, tmp_path, Topology())


@pytest.mark.parametrize("harm", ["flip", "cut", "gone", "swap"])
async def test_a_damaged_archive_is_found_before_it_is_believed(bus: Bus, tmp_path: Path, harm: str) -> None:
    await lived(bus, 0)
    manifest = await export(bus, tmp_path, "s1", file_bytes=4_000)
    first, second = (tmp_path / f.name for f in manifest.streams["POLAR_EVENTS_s1"].files[:2])
    body = bytearray(first.read_bytes())
    match harm:
        case "flip":
            body[len(body) // 2] ^= 1
            first.write_bytes(body)
        case "cut":
            first.write_bytes(body[:-20])
        case "gone":
            first.unlink()
        case "swap":
            first.write_bytes(second.read_bytes())
    assert len(check_archive(tmp_path)[1]) == 1
    with pytest.raises(BlobError):
        list(read_archive(tmp_path))


def test_a_folder_without_an_archive_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no archive"):
        list(read_archive(tmp_path))
    (tmp_path / "manifest.json").write_text('{"format": 9, "segment": "s1"}')
    with pytest.raises(ConfigError, match="format 9"):
        read_manifest(tmp_path)


async def test_a_segment_is_rolled_sealed_archived_and_dropped(bus: Bus, tmp_path: Path) -> None:
    task = await lived(bus, 0)
    topology = Topology()
    with pytest.raises(ConfigError, match="open segment"):
        await life.seal(bus, "s1")
    assert await life.roll(bus, topology) == "s2"
    with pytest.raises(ConfigError, match="s2"):
        await life.roll(bus, topology)
    assert await life.active(bus) == ("s2", ["s1", "s2"])
    await lived(bus, 0, segment="s2")
    with pytest.raises(ConfigError, match="isn't sealed"):
        await life.drop(bus, "s1", tmp_path)
    assert (await life.seal(bus, "s1")).state == "sealed"
    with pytest.raises(Exception, match="sealed"):
        await bus.batch(accepted(5))
    with pytest.raises(ConfigError, match="holds no archive"):
        await life.drop(bus, "s1", tmp_path)
    await export(bus, tmp_path, "s1")
    assert not any(s.subject.split(".")[4].startswith("s2-") for s in read_archive(tmp_path, "traces"))
    dropped = await life.drop(bus, "s1", tmp_path)
    assert (dropped.state, dropped.messages) == ("dropped", 0)
    catalogue = Catalogue(bus)
    assert await catalogue.segments() == ["s1", "s2"]
    again = "s2-" + task.task.partition("-")[2]
    assert await catalogue.earlier(again, ["s1", "s2"]) == "s1"
    assert await catalogue.earlier("s2-aaaaaaaaaaaaaaaaaaaa", ["s1", "s2"]) == ""
    assert await life.active(bus) == ("s2", ["s2"])
    report = await audit(LiveSource(bus), Options(settled=True))
    assert report.ok, report.findings
    assert report.totals["sessions"] == 2


async def test_an_open_segment_is_due_by_messages_bytes_or_age_and_a_rolled_one_never(bus: Bus) -> None:
    await lived(bus, 0)
    assert (await life.survey(bus, "s1")).due == ""
    held = await life.survey(bus, "s1")
    for bounds, why in (
        (life.Bounds(messages=held.messages), f"{held.messages} messages"),
        (life.Bounds(bytes=held.bytes), "bytes"),
        (life.Bounds(days=1e-9), "0 days"),
        (life.Bounds(messages=held.messages + 1, days=1.0), ""),
    ):
        due = (await life.survey(bus, "s1", bounds)).due
        assert due.endswith(why) and bool(due) == bool(why), (bounds, due)
    # Blobs count: they are archived and dropped with their events.
    blobs = (await bus.js.stream_info("POLAR_BLOBS_s1")).state.bytes
    assert blobs and (await life.survey(bus, "s1", life.Bounds(bytes=held.bytes + blobs))).due
    assert not (await life.survey(bus, "s1", life.Bounds(bytes=held.bytes + blobs + 1))).due
    await life.roll(bus, Topology())
    assert (await life.survey(bus, "s1", life.Bounds(messages=1))).due == ""


@pytest.mark.parametrize("done", ["streams", "rolled"])
async def test_a_roll_that_was_broken_off_is_due_until_it_is_done(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, done: str
) -> None:
    """Between the new streams and either of the two facts."""
    real = Catalogue.record

    async def record(self: Catalogue, segment: str, fact: Fact, **details: Any) -> None:
        if done == "streams" or fact == "opened":
            raise Unavailable("gone")
        await real(self, segment, fact, **details)

    monkeypatch.setattr(Catalogue, "record", record)
    with pytest.raises(Unavailable):
        await life.roll(bus, Topology())
    monkeypatch.undo()
    reason = await life.due(bus, "s1")
    assert reason == (await life.survey(bus, "s1")).due
    # Until there is a "rolled", the segment is open as before.
    assert bool(reason) == (done == "rolled") and "broken off" in (reason or "broken off")
    assert await life.roll(bus, Topology()) == "s2"
    assert [await life.due(bus, s) for s in ("s1", "s2")] == ["", ""]
    assert await Catalogue(bus).segments() == ["s1", "s2"]


async def test_a_segment_with_something_left_to_happen_is_kept_and_served(bus: Bus) -> None:
    await lived(bus, 0)
    await bus.batch(accepted(1))
    await life.roll(bus, Topology())
    assert await life.active(bus) == ("s1", ["s1", "s2"])
    with pytest.raises(ConfigError, match="2 sessions and 1 groups"):
        await life.seal(bus, "s1")
    found = await life.survey(bus, "s1")
    assert (found.state, found.tasks, found.sessions, found.live, found.open_groups) == ("rolled", 2, 4, 2, 1)


@pytest.mark.parametrize("lack", ["events", "damage"])
async def test_a_segment_is_not_dropped_for_an_archive_that_lacks_anything(bus: Bus, tmp_path: Path, lack: str) -> None:
    await lived(bus, 0)
    await export(bus, tmp_path, "s1")
    if lack == "events":
        await lived(bus, 1)
    else:
        file = tmp_path / read_manifest(tmp_path).streams["POLAR_BLOBS_s1"].files[0].name
        file.write_bytes(file.read_bytes() + b"x")
    await life.roll(bus, Topology())
    await life.seal(bus, "s1")
    with pytest.raises(ConfigError, match=r"archived|hash differs"):
        await life.drop(bus, "s1", tmp_path)
    assert (await bus.js.stream_info(events_stream("s1"))).state.messages > 0
