"""Rubbish on every subject of a running house: dead letters with reasons, no hot loop, and work goes on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from conftest import Live, running_house
from polar_common.bus import Bus
from polar_common.events import SessionReady, encode
from polar_common.house.layout import find_house
from polar_common.ids import new_id
from polar_common.ownership import OWNERS

pytestmark = [pytest.mark.nats, pytest.mark.chdb, pytest.mark.timeout(400)]

TASKS = """
tasks:
  - id: {name}
    instruction: say it
    samples: 2
    harness: {{name: command, args: {{script: "echo word"}}}}
    evaluator: {{kind: answer, args: {{expected: word}}}}
"""
STREAMS = ("POLAR_EVENTS_s1", "POLAR_TRACES")
RUBBISH = {
    "corrupt": b"\x00\xff\xfe not json",
    "truncated": b'{"kind": "session.queued", "schema_version": 1, "session": "s1-',
    "future": b'{"kind": "session.queued", "schema_version": 99}',
    "foreign": orjson.dumps({"hello": "world"}),
    "empty": b"",
    "a list": b"[1, 2]",
    "deep": b"[" * 5000,
    "misplaced": encode(SessionReady(session="s1-nobody-0", attempt=1)),
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    data = tmp_path_factory.mktemp("bad") / "house"
    with running_house(data, "--model", "tiny", "--setting", "POLAR_ENGINE_SCRIPT=echo", "--lease", "5") as live:
        yield live


def run_task(live: Live, tmp_path: Path) -> list[dict[str, object]]:
    file = tmp_path / "tasks.yaml"
    file.write_text(TASKS.format(name=f"t-{new_id()[:8]}"))
    return live.polar("run", str(file), "--timeout", "120")


async def publish_rubbish(live: Live) -> int:
    """Everything on every kind of subject; how many messages that were."""
    bus = await Bus.connect(find_house(live.data, "admin").nats, "test/rubbish")
    count = 0
    for kind, owned in OWNERS.items():
        for name, body in RUBBISH.items():
            subject = owned.pattern.replace("polar.events.*", "polar.events.s1").replace("*", f"x{count}")
            subject = subject.replace(f".queued.x{count}", ".queued.local")
            answer = orjson.loads((await bus.nc.request(subject, body, timeout=5)).data)
            assert "error" not in answer, (kind, name, answer)
            count += 1
    for subject in ("polar.traces.r.live.t.s.0", "polar.traces.r.live.t.s.manifest", "polar.traces.r.live.t.closed"):
        for number, body in enumerate(RUBBISH.values()):
            await bus.nc.request(subject.replace(".t.", f".t{number}."), body, timeout=5)
            count += 1
    await bus.close()
    return count


async def deliveries(live: Live) -> Counter[str]:
    """Messages delivered so far, by consumer."""
    bus = await Bus.connect(find_house(live.data, "admin").nats, "test/count")
    found = Counter(
        {
            c.name: c.delivered.consumer_seq
            for s in ("POLAR_EVENTS_s1", "POLAR_TRACES")
            for c in await bus.js.consumers_info(s)
        }
    )
    await bus.close()
    return found


def test_rubbish_is_buried_and_work_goes_on(house: Live, tmp_path: Path) -> None:
    assert run_task(house, tmp_path)
    before = house.children()
    count = asyncio.run(publish_rubbish(house))
    assert count > 200
    rows = run_task(house, tmp_path)
    assert rows and rows[0]["outcomes"] == {"passed": 2}, rows
    time.sleep(5)
    first = asyncio.run(deliveries(house))
    time.sleep(10)
    second = asyncio.run(deliveries(house))
    # What was parked may be looked at again now and then; a hot loop would be thousands.
    assert sum((second - first).values()) <= 40, second - first
    assert house.children() == before
    letters = house.polar("dlq", "list")
    reasons = Counter(str(x["reason"]).partition(":")[0] for x in letters)
    assert set(reasons) == {"Poison", "ValidationError"} and len(letters) > 100
    assert all(x["subject"] and x["consumer"] for x in letters)
    shown = house.polar("dlq", "show", str(letters[0]["number"]))
    assert shown[0]["subject"] == letters[0]["subject"]
    parked = [x for x in house.polar("dlq", "list", "--parked") if x["state"] == "parked"]
    assert len(parked) >= len(OWNERS)
    report = house.polar("verify", code=1)[0]
    # Only what can't be told from rubbish by reading it: an event that lies on a foreign subject.
    assert set(report["counts"]) <= {"misplaced"}, report["counts"]
    assert report["notes"]["unreadable"] > 100
    ledger = house.polar("ledger")
    assert {r["how"] for r in ledger} == {"none"} and len(ledger) == 4
