"""The HTTP edge over a real log: submitting, asking, cancelling, refusing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable

import pytest
from ingest_fakes import Edge, FakeHouse, Play, start_edge, task, until

from polar_common import subjects
from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.events import TaskAccepted
from polar_common.nats_server import NatsServer
from polar_common.topology import events_stream

pytestmark = pytest.mark.nats
STREAM = events_stream("s1")


@pytest.fixture
async def edge(nats_server: NatsServer, bus: Bus) -> AsyncIterator[Edge]:
    started = await start_edge(nats_server.url, ingest_retry_delay_s=0.05)
    yield started
    await started.kill()


async def stored(bus: Bus) -> int:
    return int((await bus.js.stream_info(STREAM)).state.messages)


async def settled(edge: Edge, run: str) -> dict[str, object]:
    async def finished() -> object:
        answer = await edge.client.get(f"/v1/runs/{run}")
        return answer.json() if answer.status_code == 200 and answer.json()["finished"] else None

    return dict(await until(finished))


async def test_a_task_is_taken_once_whatever_is_repeated(edge: Edge, bus: Bus) -> None:
    body = task("my/own id", samples=2, files={"a.txt": "x"})
    answers = await asyncio.gather(*(edge.client.post("/v1/tasks", json=body) for _ in range(5)))
    assert {a.status_code for a in answers} == {202}
    assert len({a.text for a in answers}) == 1
    [made] = answers[0].json()["tasks"]
    assert (made["id"], len(made["sessions"])) == ("my/own id", 2)
    assert len(await bus.read(STREAM, ["polar.events.s1.task.>", "polar.events.s1.session.*.0.accepted"])) == 3
    accepted = await bus.last(subjects.task(made["task"], "accepted"))
    assert accepted is not None
    assert isinstance(accepted.event, TaskAccepted)
    assert accepted.event.files is not None
    assert (await Blobs(bus, "s1").get(accepted.event.files))[:5] == b"a.txt"

    other = await edge.client.post("/v1/tasks", json={**body, "instruction": "other"})
    assert (other.status_code, other.json()["error"]["where"]) == (409, "id")
    assert (await edge.client.post("/v1/tasks?run=another", json=body)).json()["tasks"][0]["task"] != made["task"]


async def test_racing_bodies_under_one_id_have_one_winner(edge: Edge, bus: Bus) -> None:
    bodies = [task("same", instruction=f"do {i % 2}") for i in range(8)]
    answers = await asyncio.gather(*(edge.client.post("/v1/tasks", json=b) for b in bodies))
    assert sorted(a.status_code for a in answers) == [202] * 4 + [409] * 4
    assert len(await bus.read(STREAM, ["polar.events.s1.task.>"])) == 1


async def test_nothing_of_a_bad_request_is_taken(edge: Edge, bus: Bus) -> None:
    good = task("good")
    await edge.client.post("/v1/tasks?run=r", json=task("known"))
    await until(lambda: edge.scheduler.world.pending == edge.scheduler.world.buckets["queued"] == 1)
    before = await stored(bus)
    for bad, status, where in (
        (task("n", samples=0), 400, "tasks[1].samples"),
        (task("n", unknown=1), 400, "tasks[1].unknown"),
        ({"id": "n", "instruction": "x"}, 400, "tasks[1].harness"),
        (task("n", runtime={"kind": "moon"}), 400, "tasks[1].runtime.kind"),
        (task("good", samples=9), 409, "tasks[1].id"),
        (task("known", samples=9), 409, "tasks[1].id"),
    ):
        answer = await edge.client.post("/v1/tasks", json={"run": "r", "tasks": [good, bad]})
        assert (answer.status_code, answer.json()["error"]["where"]) == (status, where), answer.text
    assert await stored(bus) == before


async def test_a_200_mb_instruction_is_refused_as_it_comes(edge: Edge, bus: Bus) -> None:
    before, peak = await stored(bus), 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal peak
        yield b'{"id": "t", "harness": {"name": "command"}, "instruction": "'
        for _ in range(200):
            peak += 1
            yield b"x" * (1 << 20)
        yield b'"}'

    answer = await edge.client.post("/v1/tasks", content=body())
    assert (answer.status_code, answer.json()["error"]["where"]) == (413, "instruction")
    assert await stored(bus) == before


async def test_a_task_tells_its_sessions_live_and_afterwards(edge: Edge, bus: Bus) -> None:
    scripts = {0: Play(), 1: Play(outcome="failed", reward=0.25), 2: Play(fault="harness", cause="missing")}
    house = FakeHouse(bus, lambda session, _: scripts[int(session[-1])])
    [made] = (await edge.client.post("/v1/tasks?run=r", json=task("t", samples=3))).json()["tasks"]

    async def phases() -> list[str]:
        return [s["phase"] for s in (await edge.client.get("/v1/tasks/t?run=r")).json()["sessions"]]

    await until(lambda: _equal(phases(), ["queued"] * 3))
    async with house.open():
        await settled(edge, "r")
    after = (await edge.client.get(f"/v1/tasks/{made['task']}")).json()
    assert [(s["phase"], s["outcome"], s["reward"], s["cause"]) for s in after["sessions"]] == [
        ("completed", "passed", 1.0, ""),
        ("completed", "failed", 0.25, ""),
        ("failed", "harness_error", None, "missing"),
    ]
    assert after["closed"] == {"by": "complete", "expected": 3, "terminal": 3, "trainable": 2}
    assert after["spec"]["harness"]["name"] == "command"
    run = (await edge.client.get("/v1/runs/r")).json()
    assert (run["tasks"], run["outcomes"], run["phases"]) == (
        1,
        {"failed": 1, "harness_error": 1, "passed": 1},
        {},
    )
    assert run["mean_reward"] == pytest.approx(0.625)


async def _equal(found: Awaitable[object], expected: object) -> bool:
    return await found == expected


async def test_a_session_shows_every_attempt(edge: Edge, bus: Bus) -> None:
    plays = [Play(lost=True), Play(fault="infra", cause="daemon"), Play()]
    async with FakeHouse(bus, lambda _, attempt: plays[attempt - 1]).open():
        [made] = (await edge.client.post("/v1/tasks?run=r", json=task())).json()["tasks"]
        await settled(edge, "r")
    found = (await edge.client.get(f"/v1/sessions/{made['sessions'][0]}")).json()
    assert (found["phase"], found["outcome"], found["reward"]) == ("completed", "passed", 1.0)
    assert [(a["attempt"], a["phase"], a["lost"], a["fault"], a["cause"]) for a in found["attempts"]] == [
        (1, "lost", "node_lost", "", ""),
        (2, "artifacts", "", "infra", "daemon"),
        (3, "artifacts", "", "none", ""),
    ]
    times = found["attempts"][2]["times"]
    assert list(sorted(times, key=times.__getitem__)) == [
        "queued", "claimed", "running", "sealed", "exited", "artifacts",
    ]  # fmt: skip
    assert (found["evaluation"]["evaluator"], found["builds"][0]["traces"]) == ("fake", 1)


async def test_strangers_are_404(edge: Edge) -> None:
    for path in ("/v1/tasks/none", "/v1/sessions/s1-none-0", "/v1/sessions/x", "/v1/sessions/s9-a-0", "/v1/runs/none"):
        answer = await edge.client.get(path)
        assert (answer.status_code, bool(answer.json()["error"]["message"])) == (404, True), path
    for path in (
        "/v1/tasks/none/cancel",
        "/v1/sessions/s1-none-0/cancel",
        "/v1/sessions/*/cancel",
        "/v1/runs/x/cancel",
    ):
        assert (await edge.client.post(path)).status_code == 404, path
    assert (await edge.client.get("/nothing")).json()["error"]["where"] == "path"
    assert (await edge.client.delete("/v1/tasks")).status_code == 405


# -- cancelling


async def test_waiting_and_running_sessions_are_cancelled(edge: Edge, bus: Bus) -> None:
    house = FakeHouse(bus, lambda *_: Play(run_s=30), slots=2)
    async with house.open():
        [made] = (await edge.client.post("/v1/tasks?run=r", json=task(samples=4))).json()["tasks"]
        await until(lambda: len(house.claims) == 2)
        answer = await edge.client.post(f"/v1/tasks/{made['task']}/cancel", json={"reason": "enough"})
        assert answer.json() == {"requested": 4, "sessions": 4}
        again = await edge.client.post("/v1/tasks/t/cancel?run=r")
        assert again.json()["requested"] == 0
        run = await settled(edge, "r")
    assert run["outcomes"] == {"cancelled": 4}
    assert len(house.claims) == 2
    found = (await edge.client.get(f"/v1/sessions/{made['sessions'][0]}")).json()
    assert (found["phase"], found["detail"], found["cancel_requested"]) == ("cancelled", "enough", True)


async def test_one_session_and_a_whole_run_are_cancelled(edge: Edge, bus: Bus) -> None:
    tasks = [task(f"t{i}", samples=3) for i in range(3)]
    made = (await edge.client.post("/v1/tasks", json={"run": "r", "tasks": tasks})).json()["tasks"]
    one = made[0]["sessions"][0]
    assert (await edge.client.post(f"/v1/sessions/{one}/cancel")).json() == {"requested": 1, "sessions": 1}
    assert (await edge.client.post("/v1/runs/r/cancel")).json() == {"requested": 8, "sessions": 9}
    async with FakeHouse(bus).open():
        assert (await settled(edge, "r"))["outcomes"] == {"cancelled": 9}
    assert (await edge.client.post(f"/v1/sessions/{one}/cancel")).json() == {"requested": 0, "sessions": 1}
    bad = await edge.client.post("/v1/runs/r/cancel", json={"why": "x"})
    assert (bad.status_code, bad.json()["error"]["where"]) == (400, "why")


# -- bounds and access


async def test_a_full_queue_says_so_and_takes_more_when_it_drains(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url, ingest_queue_bound=10, ingest_retry_after_s=7)
    assert (await edge.client.post("/v1/tasks", json=task("a", samples=8))).status_code == 202
    refused = await edge.client.post("/v1/tasks", json=task("b", samples=3))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
    assert (await edge.client.post("/v1/tasks", json=task("a", samples=8))).status_code == 202, "known: not counted"
    assert (await edge.client.post("/v1/tasks", json=task("c", samples=2))).status_code == 202
    assert (await edge.client.post("/v1/tasks", json=task("d", samples=11))).status_code == 413
    async with FakeHouse(bus).open():
        await until(lambda: edge.scheduler.world.pending == 0)
        assert (await edge.client.post("/v1/tasks", json=task("b", samples=3))).status_code == 202
    await edge.kill()


async def test_racing_requests_dont_overfill_the_queue(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url, ingest_queue_bound=20)
    answers = await asyncio.gather(*(edge.client.post("/v1/tasks", json=task(f"t{i}", samples=3)) for i in range(20)))
    taken = sum(a.status_code == 202 for a in answers)
    assert (taken, {a.status_code for a in answers}) == (6, {202, 429})
    await edge.kill()


async def test_who_submits_is_answered_when_the_queue_counts_it(
    nats_server: NatsServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far the fold is behind: nobody gets its place meanwhile, and the run is known to who asks next."""
    edge = await start_edge(nats_server.url, ingest_queue_bound=2)
    fold, late = edge.scheduler._fold, []
    monkeypatch.setattr(edge.scheduler, "_fold", late.append)
    first = asyncio.ensure_future(edge.client.post("/v1/tasks?run=r", json=task("a", samples=2)))
    await until(lambda: len(late) == 3)
    assert (await edge.client.post("/v1/tasks?run=r", json=task("b"))).status_code == 429
    assert not first.done()
    monkeypatch.setattr(edge.scheduler, "_fold", fold)
    for message in late:
        fold(message)
    assert (await first).status_code == 202
    assert (await edge.client.get("/v1/runs/r")).json()["sessions"] == 2
    await edge.kill()


async def test_a_token_is_asked_for_where_one_is_set(nats_server: NatsServer, bus: Bus) -> None:
    edge = await start_edge(nats_server.url, token="s3cret")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}):
        answer = await edge.client.get("/v1/runs/r", headers=headers)
        assert (answer.status_code, answer.json()["error"]["where"]) == (401, "authorization")
    fine = {"authorization": "Bearer s3cret"}
    assert (await edge.client.post("/v1/tasks", json=task(), headers=fine)).status_code == 202
    assert (await edge.client.get("/metrics")).status_code == 401
    assert (await edge.client.get("/health")).status_code == 200
    assert (await edge.client.get("/ready")).json() == {"ready": True, "connected": True, "folded": True}
    await edge.kill()


async def test_foreign_pages_cant_use_the_users_browser(edge: Edge, bus: Bus) -> None:
    before = await stored(bus)
    for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}, {"origin": "null"}):
        answer = await edge.client.post("/v1/tasks", json=task(), headers=headers)
        assert answer.status_code == 403, headers
    assert await stored(bus) == before


async def test_metrics_and_the_document_are_served(edge: Edge) -> None:
    await edge.client.post("/v1/tasks", json=task())
    text = (await edge.client.get("/metrics")).text
    assert 'polar_ingest_requests_total{route="/v1/tasks",status="202"}' in text
    assert "polar_scheduler_sessions" in text
    assert (await edge.client.get("/openapi.json")).json()["openapi"] == "3.1.0"


async def test_without_a_log_there_is_a_clear_503(nats_server: NatsServer, edge: Edge) -> None:
    nats_server.stop("kill")
    await until(lambda: not edge.bus.nc.is_connected)
    started = time.monotonic()
    answer = await edge.client.post("/v1/tasks", json=task())
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    assert time.monotonic() - started < 5
    assert (await edge.client.get("/ready")).status_code == 503
    assert (await edge.client.get("/health")).status_code == 200
    nats_server.start()
    await until(lambda: edge.bus.nc.is_connected and edge.scheduler.ready)
    assert (await edge.client.post("/v1/tasks", json=task())).status_code == 202
