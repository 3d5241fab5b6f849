"""Analytics on the real NATS server and the embedded ClickHouse engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from polar_analytics.app import make_app
from polar_analytics.handlers import Projector
from polar_analytics.store import Store
from polar_common.bus import Bus
from polar_common.errors import RequestError
from polar_common.events import (
    EvaluationEvaluated,
    Outcome,
    PolicyPublished,
    SessionAccepted,
    SessionClaimed,
    SessionCompleted,
    SessionExited,
    SessionQueued,
    now,
)
from polar_common.subjects import EVENTS
from polar_common.task_spec import HarnessSpec, TaskSpec

pytestmark = [pytest.mark.nats, pytest.mark.chdb]
STREAM = "POLAR_EVENTS_s1"
SID = "s1-aaaaaaaaaaaaaaaaaaaa"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = Store(tmp_path / "chdb", max_rows=100)
    await opened.open()
    yield opened
    await opened.close()


async def session(bus: Bus, number: int, reward: float | None, exit_code: int = 0) -> None:
    about = {"session": f"{SID}-{number}", "task": SID, "run": "r"}
    spec = TaskSpec(id="t", instruction="do", harness=HarnessSpec(name="pi"))
    at = (await bus.once(SessionAccepted(**about, attempt=0, index=number, work_class="local"))).sequence
    for event in (
        SessionQueued(**about, attempt=1, work_class="local", spec=spec),
        SessionClaimed(**about, attempt=1, gateway="g", attempt_deadline=now(), session_deadline=now()),
        SessionExited(**about, attempt=1, exit_code=exit_code, run_s=2.0),
    ):
        at = (await bus.transition(event, at)).sequence
    outcome: Outcome = "infra_error" if reward is None else "passed" if reward > 0 else "failed"
    judged = {"outcome": outcome, "reward": reward, "details": {"cause": "config"} if reward is None else {}}
    await bus.once(EvaluationEvaluated(**about, attempt=1, evaluator="command", **judged))
    done = SessionCompleted(**about, attempt=0, last_attempt=1, outcome=outcome, reward=reward, evaluation="live")
    await bus.transition(done, at)


async def project(bus: Bus, store: Store) -> Projector:
    projector = Projector(bus, store, STREAM, EVENTS, batch=50, linger_s=0.05)
    stop = asyncio.Event()
    running = asyncio.ensure_future(projector.run(stop))
    await asyncio.wait_for(projector.caught_up.wait(), 30)
    stop.set()
    await running
    return projector


async def test_sessions_outcomes_and_rewards_are_as_the_log_says(bus: Bus, store: Store) -> None:
    for number, reward in enumerate((0.0, 1.0, 1.0)):
        await session(bus, number, reward)
    await project(bus, store)
    answer = await store.query("SELECT state, outcome, harness, reward FROM sessions ORDER BY session")
    assert answer.rows == [
        ["completed", "failed", "pi", 0.0],
        ["completed", "passed", "pi", 1.0],
        ["completed", "passed", "pi", 1.0],
    ]
    spread = await store.query("SELECT sessions, mean_reward, pass_share FROM reward_distribution")
    assert spread.rows[0] == pytest.approx([3, 2 / 3, 2 / 3])
    assert (await store.query("SELECT count(), max(run_s) FROM session_length")).rows == [[3, 2.0]]


async def test_what_has_no_reward_isnt_a_reward_of_zero_and_penalties_stay_negative(bus: Bus, store: Store) -> None:
    await session(bus, 0, -0.5, exit_code=-9)
    await session(bus, 1, None)
    await bus.once(SessionAccepted(session=f"{SID}-2", task=SID, run="r", attempt=0, index=2, work_class="local"))
    await project(bus, store)
    found = await store.query("SELECT outcome, reward, exit_code, cause FROM sessions ORDER BY session")
    assert found.rows == [["failed", -0.5, -9, ""], ["infra_error", None, 0, "evaluation"], ["", None, None, ""]]
    assert (await store.query("SELECT avg(reward) FROM sessions")).rows == [[-0.5]]
    spread = await store.query("SELECT sessions, rewarded, mean_reward, rewards FROM reward_distribution")
    assert spread.rows == [[2, 1, -0.5, [-0.5]]]
    assert (await store.query("SELECT reward FROM evaluations ORDER BY session")).rows == [[-0.5], [None]]


async def test_projecting_again_changes_nothing_and_rebuilding_gives_the_same(bus: Bus, store: Store) -> None:
    await session(bus, 0, 1.0)
    await project(bus, store)
    await project(bus, store)
    sql = "SELECT * FROM sessions"
    before = await store.query(sql)
    assert (await store.query("SELECT count() FROM events")).rows == [[6]]
    await store.reset()
    assert (await store.query(sql)).rows == []
    await project(bus, store)
    assert await store.query(sql) == before


async def test_poison_is_shown_and_buried_and_the_rest_goes_on(bus: Bus, store: Store) -> None:
    await bus.nc.request("polar.events.s1.session.s1-bad-0.1.ready", b"\xff{")
    await session(bus, 0, 1.0)
    await project(bus, store)
    rows = (await store.query("SELECT kind, count() FROM events GROUP BY kind ORDER BY kind")).rows
    assert ["poison", 1] in rows
    assert (await store.query("SELECT count() FROM sessions WHERE outcome = 'passed'")).rows == [[1]]
    assert await bus.last("polar.dlq.analytics.>", "POLAR_DLQ") is not None


async def test_policy_age_counts_published_versions(bus: Bus, store: Store) -> None:
    for number in (1, 2):
        event = PolicyPublished(segment="s1", version=f"v{number}", policy_seq=number, model="m", weights="/w")
        await bus.once(event)
    await project(bus, store)
    assert (await store.query("SELECT count(), max(policy_seq) FROM policies FINAL")).rows == [[2, 2]]
    assert (await store.query("SELECT count() FROM policy_age")).rows == [[0]]


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE events",
        "INSERT INTO events VALUES (1)",
        "SELECT 1; DROP TABLE events",
        "SELECT * FROM file('/etc/passwd', 'LineAsString')",
        "SELECT * FROM url('http://127.0.0.1:1/', 'LineAsString')",
        "SELECT 1 INTO OUTFILE '/tmp/stolen'",
        "SELECT 1 SETTINGS readonly = 0",
        "SELECT * FROM nowhere",
        "SELECT number FROM numbers(1000)",
    ],
)
async def test_queries_can_only_read_tables_within_limits(store: Store, sql: str) -> None:
    with pytest.raises(RequestError):
        await store.query(sql)
    assert (await store.query("SELECT count() FROM events")).rows == [[0]]


async def test_http_needs_the_token_and_answers_sql(store: Store) -> None:
    transport = httpx.ASGITransport(app=make_app(store, [], "secret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.post("/v1/query", json={"sql": "SELECT 1 AS one"})).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        good = await client.post("/v1/query", json={"sql": "SELECT 1 AS one"}, headers=headers)
        assert good.json() == {"columns": ["one"], "rows": [[1]]}
        bad = await client.post("/v1/query", content=b"[]", headers=headers)
        assert (bad.status_code, bad.json()["error"]["where"]) == (400, "sql")
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/..%2fapp.py", headers=headers)).status_code == 404
