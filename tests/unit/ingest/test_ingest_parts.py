"""Small parts: timers, dead letters, the OpenAPI document, settings, views."""

from __future__ import annotations

import asyncio
import json
import math
from datetime import timedelta

import jsonschema
import orjson
import pytest
from ingest_log import START, MemoryLog

from polar_common.errors import FromTheFuture, Poison
from polar_common.events import Event
from polar_ingest.clock import LogClock
from polar_ingest.dead_letters import verdict
from polar_ingest.endpoints import ENDPOINTS
from polar_ingest.openapi import openapi
from polar_ingest.timers import Timers
from polar_ingest.views import run_view


def test_a_timer_rings_once_at_its_earliest_instant() -> None:
    timers = Timers()
    for instant in (9.0, 5.0, 7.0, math.inf):
        timers.at(instant, "a")
    timers.at(6.0, "b")
    assert timers.next_at == 5.0
    assert timers.due(4.9) == []
    assert timers.due(6.0) == ["a", "b"]
    assert timers.due(100.0) == []
    timers.at(8.0, "a")
    assert timers.due(8.0) == ["a"]


async def test_the_past_is_as_old_as_the_servers_clock_says_and_the_present_is_now() -> None:
    clock = LogClock()
    now = asyncio.get_running_loop().time()
    clock.calibrate(START)
    assert clock.at(START - timedelta(seconds=100)) == pytest.approx(now - 100, abs=1)
    assert clock.at(START + timedelta(hours=1)) == pytest.approx(now, abs=1)
    clock.caught_up()
    assert clock.at(START - timedelta(hours=1)) == pytest.approx(now, abs=1), "a clock that jumped back"


def letter(consumer: str, subject: str) -> bytes:
    return orjson.dumps({"consumer": consumer, "subject": subject, "reason": "Poison: bad"})


SUBJECT = "polar.events.s1.session.s1-t-0.2.artifacts"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (letter("evaluator", SUBJECT), ("s1-t-0", False, 2)),
        (letter("gateway-local", "polar.events.s1.session.s1-t-0.1.queued.local"), ("s1-t-0", False, 1)),
        (letter("reconstructor-live", SUBJECT), ("s1-t-0", True, None)),
        (letter("reconstructor-closed", "polar.events.s1.group.s1-t.closed"), None),
        (letter("reconstructor-replay", SUBJECT), None),
        (letter("callbacks", SUBJECT), None),
        (letter("scheduler", SUBJECT), None),
        (b"garbage", None),
        (b"[]", None),
        (b"{}", None),
    ],
)
def test_what_a_dead_letter_means(body: bytes, expected: tuple[str, bool, int | None] | None) -> None:
    found = verdict(body, "live")
    assert (None if found is None else (found.session, found.build, found.attempt)) == expected


class Broken:
    """A message whose body can't be read."""

    def __init__(self, subject: str, sequence: int, error: Exception) -> None:
        self.subject, self.sequence, self.time, self._error = subject, sequence, START, error

    @property
    def event(self) -> Event:
        raise self._error


def test_an_unreadable_fact_of_a_session_poisons_it_and_moves_its_fence() -> None:
    log = MemoryLog()
    session = log.session(log.accept())
    log.start(session)
    with pytest.raises(Poison):
        log.world.apply(Broken(f"polar.events.s1.session.{session.id}.1.exited", 77, Poison("no")), log.now)
    assert (session.poison, session.seq) == ("no", 77)


def test_a_group_whose_subject_holds_garbage_isnt_closed_again_and_again() -> None:
    log = MemoryLog()
    task = log.accept()
    log.cancel(log.session(task))
    log.end(log.session(task))
    log.build(log.session(task), traces=0)
    with pytest.raises(Poison):
        log.world.apply(Broken(f"polar.events.s1.group.{task.id}.closed", 77, Poison("no")), log.now)
    assert not log.world.tasks


def test_a_fact_of_a_newer_version_freezes_the_session() -> None:
    log = MemoryLog()
    session = log.session(log.accept())
    log.start(session)
    subject = f"polar.events.s1.session.{session.id}.1.exited"
    with pytest.raises(FromTheFuture):
        log.world.apply(Broken(subject, 77, FromTheFuture("v9")), log.now)
    log.now += 1e9
    assert log.decide(session) == math.inf


@pytest.mark.parametrize(
    "subject",
    [
        "polar.events.s1.session.s1-nobody-0.1.claimed",
        "polar.events.s1.session.s1-nobody-0.0.completed",
        "polar.events.s1.task.s1-x.callback_delivered",
        "polar.events.s1.evaluation.s1-nobody-0.1.live.evaluated",
        "polar.events.s1.build.live.s1-nobody-0.reconstructed",
        "polar.events.s1.build.replay.s1-nobody-0.reconstructed",
        "polar.events.s1.what",
    ],
)
def test_facts_about_strangers_arent_even_decoded(subject: str) -> None:
    log = MemoryLog()
    log.world.apply(Broken(subject, 5, AssertionError("decoded")), log.now)
    assert not log.world.dirty


def test_a_run_is_counted_before_and_after_its_tasks_are_forgotten() -> None:
    log = MemoryLog()
    task = log.accept(samples=2)
    first, second = log.session(task), log.session(task, 1)
    log.start(first)
    log.exit(first)
    log.evaluate(first, reward=0.5)
    log.end(first)
    log.build(first, traces=3)
    counts = log.world.runs["r"]
    view = run_view(counts, log.world.live_sessions("r"), [task])
    assert (view.phases, view.outcomes, view.finished, view.mean_reward) == (
        {"accepted": 1},
        {"passed": 1},
        False,
        0.5,
    )
    log.cancel(second)
    log.end(second)
    log.build(second, traces=0)
    log.close(task)
    view = run_view(counts, log.world.live_sessions("r"), [])
    assert (view.sessions, view.outcomes, view.phases) == (2, {"passed": 1, "cancelled": 1}, {})
    assert (view.traces, view.trainable, view.groups_closed, view.finished) == (3, 1, 1, True)
    assert not +log.world.buckets
    assert log.world.pending == 0


# -- the OpenAPI document


def test_every_route_is_described_with_models_that_resolve() -> None:
    document = openapi()
    described = {(m.upper(), path) for path, found in document["paths"].items() for m in found}
    assert described == {(e.method, e.path) for e in ENDPOINTS}
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in schemas, name
    task = {"$ref": "#/components/schemas/TaskSpec", "components": document["components"]}
    good = {"id": "t", "instruction": "do", "harness": {"name": "command"}}
    jsonschema.validate(good, task)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**good, "n": 1}, task)
