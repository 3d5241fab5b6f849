"""Damage in a session that lives: it ends, whichever of its facts can't be read, and nobody else's does. Blobs are told
from what was put in their place by their hash. (`tests/e2e/test_bad_messages.py`: rubbish about nobody.)"""

from __future__ import annotations

import hashlib

import orjson
import pytest
from ingest_fakes import FakeHouse, start_edge, task, until

from polar_common import subjects
from polar_common.blobs import PART, Blobs
from polar_common.bus import Bus, scan
from polar_common.errors import BlobError
from polar_common.nats_server import NatsServer
from polar_common.ownership import OWNERS
from polar_common.packing import BlobRef
from polar_common.topology import DLQ, events_stream

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]
STREAM = events_stream("s1")
ENDS = ("completed", "failed", "cancelled")
HARMS = {"corrupt": b"\x00\xff not json", "foreign": b'{"hello": "world"}', "truncated": b'{"kind": "session.'}


def about(kind: str, task: str, session: str) -> str:
    """The subject of this kind of fact about a session's first attempt, about the session, or about its group."""
    pattern = OWNERS[kind].pattern.replace("*", "s1", 1)
    family = pattern.split(".")[3]
    values = {
        "session": [session] if f".0.{kind.partition('.')[2]}" in pattern else [session, "1", "local"],
        "evaluation": [session, "1", "live"], "build": ["live", session], "group": [task],
    }[family]  # fmt: skip
    for value in values:
        pattern = pattern.replace("*", value, 1)
    return pattern


LIVE = [
    kind for kind, owned in OWNERS.items() if owned.pattern.split(".")[3] in ("session", "evaluation", "build", "group")
]


@pytest.mark.parametrize("harm", HARMS)
async def test_a_fact_that_cant_be_read_ends_its_session_and_nobody_elses(
    nats_server: NatsServer, bus: Bus, harm: str
) -> None:
    edge = await start_edge(nats_server.url, ingest_retry_delay_s=0.05)
    tasks = [task(kind.replace(".", "-")) for kind in LIVE] + [task("good")]
    answer = await edge.client.post("/v1/tasks", json={"run": "r", "tasks": tasks})
    made = answer.json()["tasks"]
    for kind, one in zip(LIVE, made, strict=False):
        told = await bus.nc.request(about(kind, one["task"], one["sessions"][0]), HARMS[harm])
        assert "error" not in orjson.loads(told.data)
    house = FakeHouse(bus)

    async def unended() -> list[str]:
        """Tasks whose session has no end that can be read."""
        stored = await bus.read(STREAM, [f"polar.events.s1.session.*.0.{end}" for end in ENDS])
        ended = {s.subject.split(".")[4] for s in stored if s.body != HARMS[harm]}
        return [m["id"] for m in made if m["sessions"][0] not in ended]

    async def over() -> bool:
        return not await unended() and len(await bus.read(STREAM, ["polar.events.s1.group.>"])) == len(made)

    async with house.open():
        try:
            await until(over, 60)
        except TimeoutError:
            pytest.fail(f"never ended: {await unended()}")
        # Nothing is decided again and again about those whose end or group can't be written.
        before = (await bus.js.stream_info(STREAM)).state.last_seq
    assert (await bus.js.stream_info(STREAM)).state.last_seq == before
    good = await bus.last(subjects.session(made[-1]["sessions"][0], 0, "completed"))
    assert good is not None
    buried = {orjson.loads(s.body)["subject"] async for s in scan(bus, DLQ, ["polar.dlq.>"])}
    assert len(buried) >= len(LIVE) - 4, sorted(buried)
    await edge.kill()


async def test_a_blob_is_told_from_what_was_put_in_its_place(bus: Bus) -> None:
    body = b"what was said"
    ref = BlobRef(sha256=hashlib.sha256(body).hexdigest(), size=len(body), media_type="text/plain")
    await bus.nc.request(subjects.blob("s1", ref.sha256), body.replace(b"said", b"sold"))
    with pytest.raises(BlobError, match="damaged"):
        await Blobs(bus, "s1").get(ref)
    large = bytes(range(256)) * (PART // 256 + 1000)
    ref = BlobRef(sha256=hashlib.sha256(large).hexdigest(), size=len(large), media_type="text/plain")
    await bus.nc.request(subjects.blob("s1", ref.sha256, 1), b"x" * (len(large) - PART), timeout=5)
    with pytest.raises(Exception, match="another body"):
        await Blobs(bus, "s1").put_as(ref, large)
    await bus.nc.request(subjects.blob("s1", ref.sha256), orjson.dumps({"polar_parts": 2, "size": len(large)}))
    with pytest.raises(BlobError, match="damaged"):
        await Blobs(bus, "s1").get(ref)
    for manifest in (b"", b"[]", b'{"polar_parts": "many"}'):
        other = ref.model_copy(update={"sha256": hashlib.sha256(manifest).hexdigest()})
        await bus.nc.request(subjects.blob("s1", other.sha256), manifest)
        with pytest.raises(BlobError, match="manifest"):
            await Blobs(bus, "s1").get(other)
