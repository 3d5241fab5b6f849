"""The gateway's small parts: redaction, output, pools, waiting, the log's clock."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_common.bus import Bus
from polar_common.errors import RuntimeUnavailable
from polar_common.events import SessionQueued
from polar_common.tasks import cancel_and_wait, spawn
from polar_gateway import preparing
from polar_gateway.clock import LogClock
from polar_gateway.house import make_house
from polar_gateway.output import OutputLog, redact
from polar_gateway.patience import Patience
from polar_gateway.pools import Place, Pool
from polar_gateway.settings import GatewaySettings
from polar_gateway.waiting import Interrupted, Interrupts
from polar_runtime import RuntimeSpec
from polar_runtime.local import LocalRuntime

KEY = "k1.eyJzIjoiczEtYWJjLTAifQ.c2VjcmV0LW1hYy1vZi10aGUta2V5"


@given(st.binary(), st.binary())
def test_the_key_is_removed_and_lengths_stay(before: bytes, after: bytes) -> None:
    text = before + KEY.encode() + after
    found = redact(text, KEY)
    assert KEY.encode() not in found
    assert KEY.rpartition(".")[2].encode() not in found
    assert len(found) == len(text)


def test_the_part_of_a_key_that_authenticates_is_removed_too() -> None:
    assert b"c2VjcmV0" not in redact(b"mac: " + KEY.rpartition(".")[2].encode(), KEY)
    assert redact(b"plain", KEY) == b"plain"


@given(st.lists(st.binary(max_size=40)), st.integers(min_value=0, max_value=200))
def test_output_is_kept_up_to_its_limit_and_counted_beyond(pieces: list[bytes], limit: int) -> None:
    whole = b"".join(pieces)
    with OutputLog(limit) as log:
        for piece in pieces:
            log.write("stdout", piece)
        kept = log.read()
    assert kept.startswith(whole[:limit])
    assert (b"bytes more" in kept[limit:]) == (len(whole) > limit)


async def test_large_output_doesnt_stay_in_memory() -> None:
    with OutputLog(8 << 20) as log:
        for _ in range(80):
            log.write("stdout", b"x" * 65536)
        assert log._file._rolled is True  # type: ignore[attr-defined]
        assert len(log.read()) == 80 * 65536


async def test_a_full_stage_pushes_back() -> None:
    first, second = Pool("init", 1), Pool("ready", 1)
    with Place() as ahead:
        await ahead.move(first)
        await ahead.move(second)
        assert (first.free, second.free) == (1, 0)
        with Place() as behind:
            await behind.move(first)
            moving = spawn(behind.move(second), name="moving")
            await asyncio.sleep(0.01)
            assert not moving.done() and (first.used, second.waiting) == (1, 1)
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)
            assert (first.used, second.waiting) == (1, 0)
    assert (first.free, second.free) == (1, 1)


async def test_a_place_that_was_given_up_is_told_and_is_first_his_who_waits() -> None:
    pool, told = Pool("init", 1), list[int]()
    pool.on_free = lambda: told.append(pool.free)
    with Place() as ahead, Place() as behind:
        await ahead.move(pool)
        waiting = spawn(behind.move(pool), name="waiting")
        await asyncio.sleep(0.01)
        pool.leave()
        assert told == [0]
        await waiting
        ahead._pool = None
    assert told == [0, 1]


async def test_who_waits_for_a_place_gets_it_in_turn() -> None:
    pool, order = Pool("running", 1), list[int]()

    async def one(number: int) -> None:
        with Place() as place:
            await place.move(pool)
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(one(i) for i in range(5)))
    assert order == [0, 1, 2, 3, 4]
    assert pool.free == 1


async def test_work_is_interrupted_by_what_comes_first() -> None:
    ended = asyncio.Event()

    async def work(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
            return "done"
        finally:
            ended.set()

    interrupts = Interrupts()
    soon = time.monotonic() + 30
    assert await interrupts.within(work(0), soon, "w") == "done"
    ended.clear()
    with pytest.raises(Interrupted, match="timeout"):
        await interrupts.within(work(30), time.monotonic() + 0.02, "w")
    assert ended.is_set()
    interrupts.set("cancelled")
    interrupts.set("drained")
    with pytest.raises(Interrupted, match="cancelled"):
        await interrupts.within(work(30), soon, "w")


async def test_what_comes_from_outside_leaves_a_grace_and_time_that_is_up_none() -> None:
    interrupts, begun = Interrupts(), asyncio.Event()

    async def work(seconds: float) -> str:
        begun.set()
        await asyncio.sleep(seconds)
        return "done"

    began = time.monotonic()
    with pytest.raises(Interrupted, match="timeout"):
        await interrupts.within(work(30), began + 0.02, "w", grace=20)
    interrupts.set("cancelled")
    assert await interrupts.within(work(0.05), began + 30, "w", grace=20) == "done"
    with pytest.raises(Interrupted, match="cancelled"):
        await interrupts.within(work(30), began + 30, "w", grace=0.02)
    begun.clear()
    with pytest.raises(Interrupted, match="cancelled"):
        await interrupts.within(work(30), began + 30, "w")
    assert not begun.is_set()
    assert time.monotonic() - began < 5


async def test_the_works_own_error_is_passed_on() -> None:
    async def work() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await Interrupts().within(work(), time.monotonic() + 30, "w")


def test_the_logs_clock_goes_on_by_the_monotonic_one() -> None:
    clock = LogClock()
    clock._at, clock._mono = datetime(2030, 1, 1, tzinfo=UTC), time.monotonic() - 5
    assert abs((clock.now() - datetime(2030, 1, 1, 0, 0, 5, tzinfo=UTC)).total_seconds()) < 1
    later = clock.now() + timedelta(seconds=10)
    assert 9 < clock.monotonic(later) - time.monotonic() < 11


def test_a_daemon_that_was_never_there_is_waited_for_only_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    never, was_there = Patience(30, was_there=False), Patience(30, was_there=True)
    now = 1010.0
    assert (never.until(), was_there.until()) == (1030, 1040)
    now = 1100.0
    assert (never.until(), was_there.until()) == (1030, 1130)
    never.heard()
    assert never.until() == 1130


async def test_attempts_without_a_daemon_end_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would hold the places of those that need none."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    house = make_house(GatewaySettings(data=tmp_path), cast(Bus, None), "g")
    house.patience._began -= 31
    preparation = preparing.Preparation(house, cast(SessionQueued, None), "s.1", "KEY")
    began = time.monotonic()
    with pytest.raises(RuntimeUnavailable, match="doesn't answer"):
        await preparation._started(RuntimeSpec("docker", "s.1", tmp_path, image="x"))
    assert time.monotonic() - began < 10


async def test_only_a_daemon_is_waited_for(tmp_path: Path) -> None:
    class Unable(LocalRuntime):
        async def start(self) -> None:
            raise RuntimeUnavailable("no bubblewrap")

    house = make_house(GatewaySettings(data=tmp_path), cast(Bus, None), "g")
    house.make_runtime = Unable
    preparation = preparing.Preparation(house, cast(SessionQueued, None), "s.1", "KEY")
    began = time.monotonic()
    with pytest.raises(RuntimeUnavailable, match="no bubblewrap"):
        await preparation._started(RuntimeSpec("local", "s.1", tmp_path))
    assert time.monotonic() - began < 5


class Thorough(LocalRuntime):
    """Of a user's own: its start goes on to its end, whoever waits for it."""

    done: ClassVar[list[str]] = []

    async def start(self) -> None:
        await asyncio.sleep(0.3)
        self.done.append("started")

    async def stop(self) -> None:
        self.done.append("stopped")


async def test_what_is_being_started_is_stopped_when_it_is_there(tmp_path: Path) -> None:
    house = make_house(GatewaySettings(data=tmp_path), cast(Bus, None), "g")
    house.make_runtime = Thorough
    preparation = preparing.Preparation(house, cast(SessionQueued, None), "s.1", "KEY")
    Thorough.done.clear()
    starting = spawn(preparation._started(RuntimeSpec("local", "s.1", tmp_path)), name="starting")
    await asyncio.sleep(0.05)
    await cancel_and_wait(starting)
    await preparation.stop()
    assert Thorough.done == ["started", "stopped"]


@pytest.mark.parametrize("kind", ["docker", "local"])
async def test_a_daemon_that_was_heard_once_is_waited_for_from_then_on(tmp_path: Path, kind: str) -> None:
    house = make_house(GatewaySettings(data=tmp_path), cast(Bus, None), "g")
    house.patience = Patience(30, was_there=False)
    house.patience._began -= 100
    house.make_runtime = Thorough
    preparation = preparing.Preparation(house, cast(SessionQueued, None), "s.1", "KEY")
    await preparation._started(RuntimeSpec(kind, "s.1", tmp_path))
    assert (house.patience.until() > time.monotonic()) == (kind == "docker")


class Dying(LocalRuntime):
    """Its daemon dies when it has made the first container, and is back at the third try to remove that."""

    done: ClassVar[list[str]] = []

    async def start(self) -> None:
        self.done.append("start")
        if len(self.done) == 1:
            raise RuntimeUnavailable("died")

    async def stop(self) -> None:
        self.done.append("stop")
        if len(self.done) < 4:
            raise RuntimeUnavailable("still away")


@pytest.mark.parametrize("wait_s", [30.0, 0.0])
async def test_a_daemon_that_dies_after_it_made_a_container_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    monkeypatch.setattr(preparing, "_DAEMON_PAUSE_S", 0.0)
    Dying.done.clear()
    settings = GatewaySettings(data=tmp_path, gateway_daemon_wait_s=wait_s)
    house = make_house(settings, cast(Bus, None), "g")
    house.make_runtime = Dying
    preparation = preparing.Preparation(house, cast(SessionQueued, None), "s.1", "KEY")
    starting = preparation._started(RuntimeSpec("docker", "s.1", tmp_path))
    if wait_s:
        assert await starting is preparation.runtime
        assert Dying.done == ["start", "stop", "stop", "stop", "start"]
    else:
        with pytest.raises(RuntimeUnavailable, match="died"):
            await starting
