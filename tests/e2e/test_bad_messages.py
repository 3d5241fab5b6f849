"""Rubbish on every family of subjects of a running house: dead letters with reasons from everybody whose message it
was, newer versions parked, no hot loop, and work goes on.

Families are made from the topology and the ownership of events, so that a new stream or kind is tried by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
import pytest
from house_kit import Live, running_house

from polar_common import subjects
from polar_common.bus import Bus, scan
from polar_common.events import PolicyPublished, SessionReady, encode
from polar_common.house.layout import House, find_house
from polar_common.ids import new_id
from polar_common.letters import is_letter
from polar_common.ownership import OWNERS
from polar_common.topology import BLOBS, CATALOGUE, DLQ, TRACES, Topology, consumers, events_stream, streams
from polar_train.stream import TraceStream

pytestmark = [pytest.mark.nats, pytest.mark.chdb, pytest.mark.timeout(400)]

TASKS = """
tasks:
  - id: {name}
    instruction: say it
    samples: 2
    dir: ask
    harness: {{name: command, args: {{argv: [python3, ask.py]}}}}
    evaluator: {{kind: answer, args: {{expected: it, mode: contains}}}}
"""
ASK = """
import json, os, urllib.request as u
body = {"model": os.environ["POLAR_MODEL"], "messages": [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]}
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), head)
print(json.load(u.urlopen(request))["choices"][0]["message"]["content"])
"""
FUTURE = "future"
HARMS = {
    "corrupt": b"\x00\xff\xfe not json",
    "truncated": b'{"kind": "session.queued", "schema_version": 1, "session": "s1-',
    "empty": b"",
    "a list": b"[1, 2]",
    "deep": b"[" * 5000,
    "foreign": orjson.dumps({"hello": "world"}),
    "misplaced": encode(SessionReady(session="s1-nobody-0", attempt=1)),
    FUTURE: b'{"kind": "KIND", "schema_version": 99}',
}
# What isn't an event: stream → patterns. Blobs have no form of their own; a wrong one is found by its hash.
OTHERS = {
    TRACES: ("polar.traces.r.live.*.s1-t-0.0", "polar.traces.r.live.*.s1-t-0.manifest", "polar.traces.r.live.*.closed"),
    BLOBS: ("polar.blobs.s1.*", "polar.blobs.s1.*.0"),
    DLQ: ("polar.dlq.evaluator.POLAR_EVENTS_s1.*", "polar.dlq.evaluator.POLAR_EVENTS_s1.*.retried.x"),
    CATALOGUE: ("polar.catalogue.task.*",),
}


def families() -> list[tuple[str, str]]:
    """(kind, subject pattern) of everything that may lie on a log."""
    events = [(kind, owned.pattern.replace(".*.", ".s1.", 1)) for kind, owned in OWNERS.items()]
    return events + [(stream, pattern) for stream, patterns in OTHERS.items() for pattern in patterns]


def filled(pattern: str, number: int) -> str:
    """A subject that nobody else uses, with ids as they are, of a task that nobody knows."""
    task, kind = f"s1-x{number}", pattern.split(".")[3]
    values = {
        "session": [f"{task}-0", *([] if ".0." in pattern else ["1"]), "local"],
        "completion": [f"{task}-0", "1", "c"], "evaluation": [f"{task}-0", "1", "live"],
        "build": ["live", f"{task}-0"], "policy": [f"x{number}", "r"], "trainer": ["t", "0", str(number)],
    }.get(kind, [task])  # fmt: skip
    for value in values:
        pattern = pattern.replace("*", value, 1)
    return pattern


def matches(pattern: str, subject: str) -> bool:
    """As NATS does; a wildcard of `subject` counts as a token."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(tokens) >= len(wanted) and matches(".".join(wanted[:-1]), ".".join(tokens[: len(wanted) - 1]))
    return len(wanted) == len(tokens) and all(w in ("*", t) or t == "*" for w, t in zip(wanted, tokens, strict=True))


def test_no_family_is_forgotten() -> None:
    """Every stream, every consumer's filter and every pattern that anybody follows is tried."""
    tried = [pattern for _, pattern in families()]
    followed = [value for name, value in vars(subjects).items() if name.startswith("ANY_")]
    wanted = [s for stream in streams(Topology()) for s in stream.subjects or ()]
    wanted += [f for spec in consumers(Topology()) for f in spec.filters] + followed + list(subjects.LIFECYCLE)
    assert len(followed) > 10
    assert not [w for w in wanted if not any(matches(w, t) for t in tried)]


@dataclass(frozen=True, slots=True)
class Sent:
    """One piece of rubbish on the log."""

    kind: str
    harm: str
    subject: str
    stream: str
    sequence: int


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    data = tmp_path_factory.mktemp("bad") / "house"
    with running_house(data, "--model", "tiny", "--setting", "POLAR_ENGINE_SCRIPT=echo", "--lease", "5") as live:
        yield live


@asynccontextmanager
async def admin(live: Live) -> AsyncIterator[Bus]:
    bus = await Bus.connect(find_house(live.data, "admin").nats, "test/admin")
    yield bus
    await bus.close()


def run_task(live: Live, directory: Path) -> dict[str, object]:
    (directory / "ask").mkdir(exist_ok=True)
    (directory / "ask/ask.py").write_text(ASK)
    file = directory / "tasks.yaml"
    file.write_text(TASKS.format(name=f"t-{new_id()[:8]}"))
    (row,) = live.polar("run", str(file), "--timeout", "120")
    return row


@pytest.fixture(scope="module")
def sent(house: Live, tmp_path_factory: pytest.TempPathFactory) -> list[Sent]:
    """Every harm on every family, between two good tasks."""

    async def publish() -> list[Sent]:
        made = []
        async with admin(house) as bus:
            for kind, pattern in families():
                for harm, body in HARMS.items():
                    if harm == FUTURE and kind not in OWNERS and kind != TRACES:
                        continue
                    subject = filled(pattern, len(made))
                    answer = orjson.loads(
                        (await bus.nc.request(subject, body.replace(b"KIND", kind.encode()), timeout=5)).data
                    )
                    assert "error" not in answer, (kind, harm, answer)
                    made.append(Sent(kind, harm, subject, answer["stream"], answer["seq"]))
        return made

    directory = tmp_path_factory.mktemp("tasks")
    assert run_task(house, directory)["outcomes"] == {"passed": 2}
    before = house.children()
    made = asyncio.run(publish())
    row = run_task(house, directory)
    assert row["outcomes"] == {"passed": 2} and row["traces"] == 2, row
    assert house.children() == before, "a service died of it"
    return made


def owed(sent: Sent) -> set[str]:
    """The consumers that have to bury it: durable ones, and those that fold what they follow."""
    if sent.harm == FUTURE or sent.stream in (f"{BLOBS}_s1", DLQ, CATALOGUE):
        return set()
    found = {c.durable for c in consumers(Topology()) if any(matches(f, sent.subject) for f in c.filters)}
    found.add("analytics")
    if sent.kind.startswith("policy."):
        found.add("proxy")
    return found


async def letters(bus: Bus) -> dict[tuple[str, int], dict[str, str]]:
    """Reasons by consumer, by what they are about."""
    found: dict[tuple[str, int], dict[str, str]] = defaultdict(dict)
    async for stored in scan(bus, DLQ, ["polar.dlq.>"]):
        if is_letter(stored.subject) and b'"reason"' in stored.body:
            told = orjson.loads(stored.body)
            found[told["stream"], told["sequence"]][told["consumer"]] = told["reason"]
    return found


async def test_everybody_whose_message_it_was_buries_it_with_a_reason(house: Live, sent: list[Sent]) -> None:
    assert len(sent) > 200
    async with admin(house) as bus:
        deadline = time.monotonic() + 60
        while True:
            found = await letters(bus)
            missing = [
                (s.kind, s.harm, consumer)
                for s in sent
                for consumer in owed(s) - set(found[s.stream, s.sequence])
            ]  # fmt: skip
            if not missing or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
    assert not missing, (len(missing), missing[:20])
    parked = [s for s in sent if s.harm == FUTURE and found[s.stream, s.sequence]]
    assert not parked, "newer versions are parked, not buried"
    for s in sent:
        for consumer, reason in found[s.stream, s.sequence].items():
            assert reason.startswith(("Poison: ", "Misplaced: ")) and len(reason) > 12, (s, consumer, reason)


async def test_nothing_is_delivered_again_and_again(house: Live, sent: list[Sent]) -> None:
    """Each consumer has had each message once, parked ones once a minute, and nothing more while we watch."""
    async with admin(house) as bus:

        async def delivered() -> dict[str, tuple[int, int]]:
            found = {}
            for stream in (events_stream("s1"), TRACES):
                for info in await bus.js.consumers_info(stream):
                    if info.config.durable_name:
                        had = (info.delivered.consumer_seq, info.num_pending or 0)
                        found[info.name] = (*had,)
            return found

        first = await delivered()
        assert set(first) >= {c.durable for c in consumers(Topology())}
        counts: Counter[str] = Counter()
        for spec in consumers(Topology()):
            for pattern in spec.filters:
                counts[spec.durable] += len(await bus.read(spec.stream, [pattern]))
        await asyncio.sleep(6)
        second = await delivered()
    parked = sum(s.harm == FUTURE for s in sent)
    for name, count in counts.items():
        again, pending = second[name][0] - first[name][0], second[name][1]
        assert pending == 0, (name, "goes on", second[name])
        assert second[name][0] <= count + 4 * parked, (name, "deliveries", second[name], count)
        assert again <= parked, (name, "while nothing happened", again)


async def test_a_parked_policy_doesnt_keep_newer_ones_from_the_engine(house: Live, sent: list[Sent]) -> None:
    assert any(s.kind == "policy.published" and s.harm == FUTURE for s in sent)
    told = House(house.data).read()
    assert told is not None
    card = (await asyncio.to_thread(httpx.get, f"{told.engine}/v1/models")).json()["data"][0]
    async with admin(house) as bus:
        await bus.once(PolicyPublished(segment="s1", version="v7", policy_seq=7, model="policy", weights=card["root"]))
        async with asyncio.timeout(40):
            while await bus.last("polar.events.s1.policy.v7.*.activated") is None:
                await asyncio.sleep(0.2)


async def test_a_trainer_gets_the_good_groups_and_buries_the_rest(house: Live, sent: list[Sent]) -> None:
    stream = await TraceStream.connect(find_house(house.data, "trainer").nats, trainer="t", build="live")
    groups = [await stream.next(timeout=10) for _ in range(2)]
    assert all(g is not None and len(g.traces) == 2 for g in groups)
    closings = [s for s in sent if s.subject.startswith("polar.traces.") and s.subject.endswith(".closed")]
    assert await stream.next(timeout=1) is None
    assert stream.dropped == {"unreadable": sum(s.harm != FUTURE for s in closings)}
    future = next(s.sequence for s in closings if s.harm == FUTURE)
    assert stream.state_dict()["floor"] < future, "whoever is upgraded gets it"
    async with admin(house) as bus:
        found = await letters(bus)
    assert all(("trainer-t" in found[s.stream, s.sequence]) == (s.harm != FUTURE) for s in closings)
    await stream.close()


def test_commands_tell_what_they_cant_read(house: Live, sent: list[Sent]) -> None:
    rows = house.polar("dlq", "list", "--parked")
    states = Counter(str(r["state"]) for r in rows)
    assert states["dead"] > 100 and states["unreadable"] == sum(s.stream == DLQ for s in sent)
    assert states["parked"] == sum(s.harm == FUTURE and s.kind in OWNERS for s in sent)
    dead = next(r for r in rows if r["state"] == "dead")
    assert house.polar("dlq", "show", str(dead["number"]))[0]["subject"] == dead["subject"]
    report = house.polar("verify", code=1)[0]
    # A blob that isn't its hash, a letter that isn't one, an event that lies on another's subject.
    assert set(report["counts"]) <= {"misplaced", "blob", "unreadable"}, report["counts"]
    assert report["notes"]["unreadable"] > 100
    ledger = house.polar("ledger")
    assert {r["how"] for r in ledger} == {"none"} and len(ledger) == 4
    assert house.polar("log", "segments")[0]["state"] == "open"
