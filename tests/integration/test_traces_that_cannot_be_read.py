"""Traces and manifests that are damaged, or of a newer version: told as that wherever they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from log_kit import lived
from tests.scripted_sessions import Script

from polar_analytics.tracing import session_tokens
from polar_common import subjects
from polar_common.bus import Bus
from polar_common.errors import FromTheFuture, Poison, PolarError, TraceError
from polar_common.events import GroupClosed, GroupMember
from polar_common.ids import FIRST_SEGMENT, new_id, task_id
from polar_common.topology import TRACES
from polar_reconstructor.export import write
from polar_reconstructor.handlers import Reconstructor
from polar_reconstructor.rules import BUILT_IN
from polar_reconstructor.traces import build_traces, find_traces
from polar_train import TraceStream
from polar_train.fidelity.source import choose, windows

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]
E = 99
Spoil = Callable[[bytes], bytes]


def cut(body: bytes) -> bytes:
    return body[: len(body) // 2]


def other(body: bytes) -> bytes:
    return orjson.dumps({k: v for k, v in orjson.loads(body).items() if k != "rules"})


def newer(body: bytes) -> bytes:
    return orjson.dumps(orjson.loads(body) | {"schema_version": 99, "new_field": 1})


async def copied(bus: Bus, last: str, spoil: Spoil | None) -> tuple[str, str]:
    """Two built and closed groups as a build `b`, of which one message (by its subject's last token) is another;
    `None`: it is missing. Returns the spoiled session and its task."""
    sound, spoiled = await lived(bus, 0), await lived(bus, 1)
    for message in await bus.read(TRACES, ["polar.traces.run.live.>"]):
        tokens = message.subject.split(".")
        body = message.body.replace(b'"build":"live"', b'"build":"b"')
        if tokens[5] == spoiled.sessions[0] and tokens[-1] == last:
            if spoil is None:
                continue
            body = spoil(body)
        elif tokens[-1] == "closed":
            body = await _with_manifests(bus, body)
        await bus.once_raw(message.subject.replace(".live.", ".b."), body, f"copy of {message.subject}")
    assert sound.task != spoiled.task
    return spoiled.sessions[0], spoiled.task


async def _with_manifests(bus: Bus, body: bytes) -> bytes:
    """A closing that names the copied manifests by their own hashes."""
    from polar_common.traces import TraceManifest

    value = orjson.loads(body)
    for session in value["manifests"]:
        stored = await bus.last(subjects.trace_manifest("run", "live", value["task"], session))
        assert stored is not None
        value["manifests"][session] = (
            TraceManifest.model_validate_json(stored.body).model_copy(update={"build": "b"}).hash()
        )
    return orjson.dumps(value)


@pytest.mark.parametrize("last", ["0", "manifest"])
@pytest.mark.parametrize("spoil", [cut, other])
async def test_a_trainer_drops_a_damaged_group_and_goes_on(bus: Bus, last: str, spoil: Spoil) -> None:
    await copied(bus, last, spoil)
    stream = TraceStream(bus, trainer="t", run="run", build="b")
    try:
        group = await stream.next(5.0)
        assert group is not None and len(group.traces) == 2
        assert await stream.next(1.0) is None and stream.dropped == {"damaged": 1}
    finally:
        await stream.close()


@pytest.mark.parametrize("last", ["0", "manifest"])
async def test_a_trainer_leaves_a_newer_versions_group_to_an_upgraded_one(bus: Bus, last: str) -> None:
    await copied(bus, last, newer)
    stream = TraceStream(bus, trainer="t", run="run", build="b")
    try:
        group = await stream.next(5.0)
        assert group is not None
        assert await stream.next(1.0) is None and not stream.dropped
        stream.used([group], step=1)
        closings = [m.sequence for m in await bus.read(TRACES, ["polar.traces.run.b.*.closed"])]
        assert stream.state_dict()["floor"] < max(s for s in closings if s != group.sequence)
    finally:
        await stream.close()


@pytest.mark.parametrize(
    ("last", "spoil", "told"),
    [
        ("0", cut, "damaged"),
        ("0", other, "damaged"),
        ("0", newer, "newer"),
        ("0", None, "missing"),
        ("manifest", cut, "damaged"),
        ("manifest", other, "damaged"),
        ("manifest", newer, "newer"),
    ],
)
async def test_fidelity_counts_them_by_what_they_are(bus: Bus, last: str, spoil: Spoil | None, told: str) -> None:
    await copied(bus, last, spoil)
    chosen = await choose(bus, "b")
    loaded = [one async for window in windows(bus, chosen) for one in window]
    assert dict(chosen.unreadable) == {told: 1} and len(loaded) == 3
    assert len(chosen.details) == 1


@pytest.mark.parametrize(
    ("last", "spoil", "kind"),
    [
        ("0", cut, Poison),
        ("0", other, Poison),
        ("0", newer, FromTheFuture),
        ("0", None, TraceError),
        ("manifest", cut, Poison),
        ("manifest", newer, FromTheFuture),
    ],
)
async def test_an_export_that_meets_one_names_it_and_writes_no_file(
    bus: Bus, tmp_path: Path, last: str, spoil: Spoil | None, kind: type[PolarError]
) -> None:
    session, _ = await copied(bus, last, spoil)
    path = tmp_path / "traces.jsonl"
    with pytest.raises(kind, match=session) as caught:
        await write(path, build_traces(bus, "b"))
    assert type(caught.value) is kind
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("spoil", "kind"), [(cut, Poison), (other, Poison), (newer, FromTheFuture)])
async def test_looking_at_one_names_it(bus: Bus, spoil: Spoil, kind: type[PolarError]) -> None:
    session, _ = await copied(bus, "0", spoil)
    for reading in (find_traces(bus, session, "b"), session_tokens(bus, session, "b", lambda _: [], "")):
        with pytest.raises(kind, match=rf"polar\.traces\.run\.b\..*{session}\.0: ") as caught:
            await reading
        assert type(caught.value) is kind


async def test_a_closing_over_a_damaged_manifest_is_buried_and_over_a_newer_one_parked(bus: Bus) -> None:
    """What `on_group_closed` raises decides which (`bus.poison`)."""
    for number, (spoil, kind) in enumerate(((cut, Poison), (newer, FromTheFuture))):
        script = Script(task=task_id(FIRST_SEGMENT, "run", f"t{number}")).started().call("c1", [1], [10, E]).ended()
        await script.publish(bus)
        end = await bus.last(subjects.session(script.session, 1, "artifacts"))
        assert end is not None
        service = Reconstructor(bus, f"b{number}", BUILT_IN["exact"])
        sound = Reconstructor(bus, "sound", BUILT_IN["exact"])
        await sound.on_ended(end)
        manifest = await bus.last(subjects.trace_manifest("run", "sound", script.task, script.session))
        fact = await bus.last(subjects.build("sound", script.session, "reconstructed"))
        assert manifest is not None and fact is not None
        subject = subjects.trace_manifest("run", f"b{number}", script.task, script.session)
        await bus.once_raw(subject, spoil(manifest.body), "spoiled")
        await bus.once(fact.event.model_copy(update={"build": f"b{number}", "event_id": new_id()}))
        member = GroupMember(session=script.session, outcome="passed", reward=1.0, trainable=True)
        closed = GroupClosed(
            run="run", task=script.task, expected=1, terminal=1, trainable=1, by="complete", members=(member,)
        )
        await bus.once(closed)
        stored = await bus.last(closed.subject())
        assert stored is not None
        with pytest.raises(kind, match=subject.replace(".", r"\.")) as caught:
            await service.on_group_closed(stored)
        assert type(caught.value) is kind
