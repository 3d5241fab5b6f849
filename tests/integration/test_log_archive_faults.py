"""Archives in trouble: two exports at once, power that fails before a drop, imports over something else."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from log_kit import command, lived
from test_log_cli import said

from polar_common.archive import check_archive, export, load_archive, read_archive
from polar_common.archive import segments as life
from polar_common.bus import Bus
from polar_common.errors import ConfigError, Conflict
from polar_common.nats_server import NatsServer
from polar_common.topology import Topology, apply

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]


# -- two at once


async def test_a_second_export_into_a_directory_is_refused_and_harms_nothing(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    for number in range(12):
        await lived(bus, number)
    archive = tmp_path / "s1"
    loop, texts = asyncio.get_running_loop(), list[Any]()

    def second(stream: str, count: int) -> None:
        if not texts:
            other = asyncio.run_coroutine_threadsafe(export(bus, archive, "s1"), loop)
            texts.append(other)

    first = await export(bus, archive, "s1", file_bytes=4_000, on_progress=second)
    with pytest.raises(ConfigError, match="another export"):
        await asyncio.wrap_future(texts[0])
    assert first.complete and check_archive(archive)[1] == [] and not list(archive.glob("*.part"))
    # Who was killed holds nothing.
    await command(nats_server, "log", "export", str(archive))


async def test_a_command_says_that_another_export_is_under_way(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    for number in range(4):
        await lived(bus, number)
    archive, told = tmp_path / "s1", list[str]()

    def second(stream: str, count: int) -> None:
        if not told:
            # Its own process, while ours stands still in the middle of a file.
            told.append(said(nats_server, "log", "export", str(archive), code=2))

    await export(bus, archive, "s1", file_bytes=4_000, on_progress=second)
    assert "another export" in " ".join(told[0].split())
    assert check_archive(archive)[1] == []


# -- power


async def test_an_archive_is_on_disk_with_its_directory_before_a_segment_is_dropped(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every name that the archive needs was flushed after it was made, by the export and once more by the drop: a copy
    of an archive may never have been flushed."""
    steps: list[tuple[str, str]] = []
    real_sync, real_rename = os.fsync, Path.rename

    def sync(number: int) -> None:
        steps.append(("sync", os.readlink(f"/proc/self/fd/{number}")))
        real_sync(number)

    def rename(path: Path, target: Path) -> Path:
        steps.append(("name", str(target)))
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    await lived(bus, 0)
    archive = (tmp_path / "backup" / "s1").resolve()
    manifest = await export(bus, archive, "s1")
    names = [i for i, (what, _) in enumerate(steps) if what == "name"]
    assert names and all(("sync", str(archive)) in steps[i:] for i in names)
    first = steps.index(("name", str(archive / "manifest.json")))
    assert ("sync", str(archive)) in steps[:first], "the manifest speaks of files whose names aren't on disk yet"
    assert ("sync", str(archive.parent)) in steps and ("sync", str(archive.parent.parent)) in steps
    await life.roll(bus, Topology())
    await life.seal(bus, "s1")
    deleted = bus.js.delete_stream

    async def delete(stream: str) -> bool:
        steps.append(("delete", stream))
        return await deleted(stream)

    monkeypatch.setattr(bus.js, "delete_stream", delete)
    steps.clear()
    await life.drop(bus, "s1", archive)
    before = [path for what, path in steps[: steps.index(("delete", "POLAR_EVENTS_s1"))] if what == "sync"]
    files = [archive / f.name for s in manifest.streams.values() for f in s.files]
    assert {str(p) for p in [*files, archive / "manifest.json", archive]} <= set(before)


# -- over something else


@pytest.mark.parametrize("kind", ["traces", "dlq"])
async def test_import_over_another_message_on_the_same_subject_names_it(
    bus: Bus, empty: Bus, tmp_path: Path, kind: str
) -> None:
    await lived(bus, 0)
    letter = "polar.dlq.evaluator.POLAR_EVENTS_s1.3"
    await bus.once_raw(letter, b'{"reason":"one"}', "h1")
    await export(bus, tmp_path, "s1")
    first = next(iter(read_archive(tmp_path, kind)))
    await apply(empty.js, Topology())
    await empty.once_raw(first.subject, b"other", "h2")
    with pytest.raises(Conflict, match=first.subject.replace(".", r"\.")):
        await load_archive(empty, tmp_path, Topology())


async def test_import_over_the_same_messages_changes_nothing(bus: Bus, empty: Bus, tmp_path: Path) -> None:
    await lived(bus, 0)
    await bus.once_raw("polar.dlq.evaluator.POLAR_EVENTS_s1.3", b'{"reason":"one"}', "h1")
    await export(bus, tmp_path, "s1")
    for _ in range(2):
        await load_archive(empty, tmp_path, Topology())
    there = {str(s.config.name): s.state.messages for s in await empty.js.streams_info()}
    here = {str(s.config.name): s.state.messages for s in await bus.js.streams_info()}
    assert there == here
