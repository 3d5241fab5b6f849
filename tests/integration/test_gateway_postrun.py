"""POSTRUN under a cancel and a drain: what takes long is cut short, and what is told of it is true."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import gateway_kit as kit
import pytest

from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.packing import BlobRef
from polar_gateway.handlers import Gateway
from polar_gateway.house import House
from polar_runtime.local import LocalRuntime

pytestmark = pytest.mark.nats


class EndlessDiff(LocalRuntime):
    """A working directory of which no patch can be made in time."""

    async def diff(self, base: str | None = None) -> bytes:
        await asyncio.sleep(300)
        return b""


def endless(house: House) -> None:
    house.make_runtime = EndlessDiff


async def body(bus: Bus, ref: BlobRef | None) -> bytes:
    return b"" if ref is None else await Blobs(bus, "s1").get(ref)


async def test_a_cancel_hurries_the_collecting_and_who_waits_for_it(bus: Bus, tmp_path: Path) -> None:
    made = kit.settings(tmp_path, gateway_slots=2, gateway_postrun_slots=1)
    async with kit.gateway(bus, made, adapt=endless) as gateway:
        one = await kit.release(bus, kit.script("echo said; exit 3", name="one"))
        await kit.phase(bus, one, "sealed")
        two = await kit.release(bus, kit.script("echo said; exit 3", name="two"))
        await kit.phase(bus, two, "sealed")
        began = time.monotonic()
        for session in (two, one):
            await kit.cancel(bus, session)
        for session in (two, one):
            state = await kit.over(bus, session, timeout=20)
            exited, artifacts = state.attempts[1].exited, state.attempts[1].artifacts
            assert exited is not None and artifacts is not None
            assert (exited.cancelled, exited.exit_code, exited.fault) == (True, 3, "harness")
            assert await body(bus, artifacts.log) == await body(bus, artifacts.answer) == b"said\n"
            assert artifacts.patch is None
        assert time.monotonic() - began < 16
        assert await kit.idle(gateway)
        assert os.listdir(made.root) == []
        assert gateway.house.pools.postrun.used == gateway.house.pools.running.used == 0


async def test_a_gateway_that_leaves_while_it_collects_gives_the_attempt_up(bus: Bus, tmp_path: Path) -> None:
    """And doesn't say that the agent's files were at fault."""
    async with kit.gateway(bus, kit.settings(tmp_path), adapt=endless) as gateway:
        session = await kit.release(bus, kit.script("true"))
        await kit.phase(bus, session, "sealed")
        gateway.live[f"{session}.1"].interrupt("drained")
        state = await kit.over(bus, session, timeout=12)
        assert await kit.idle(gateway)
    attempt = state.attempts[1]
    assert attempt.lost is not None and attempt.exited is None
    assert attempt.lost.detail == "its gateway was drained"
    assert attempt.sealed is not None and attempt.sealed.reason == "exited"


class SlowlyKilled(LocalRuntime):
    """Only the third time is there something to be ended."""

    asked = 0

    async def cancel(self) -> None:
        self.asked += 1
        if self.asked > 2:
            await super().cancel()


async def test_an_end_that_takes_long_is_brought_about_and_told(bus: Bus, tmp_path: Path) -> None:
    def adapt(house: House) -> None:
        house.make_runtime = SlowlyKilled

    async with kit.gateway(bus, kit.settings(tmp_path), adapt=adapt):
        session = await kit.release(bus, kit.script("echo said; sleep 300"))
        await kit.phase(bus, session, "running")
        await asyncio.sleep(0.5)
        await kit.cancel(bus, session)
        state = await kit.over(bus, session)
    exited, artifacts = state.attempts[1].exited, state.attempts[1].artifacts
    assert exited is not None and artifacts is not None
    assert (exited.cancelled, exited.exit_code, exited.fault, exited.cause) == (True, 137, "none", "")
    assert await body(bus, artifacts.answer) == b"said\n"


async def test_a_cancel_that_is_first_seen_at_the_seal_is_told_with_the_end(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gateway, "follow_cancels", lambda self: asyncio.sleep(300))
    async with kit.gateway(bus, kit.settings(tmp_path)):
        session = await kit.release(bus, kit.script("while ! test -e go; do sleep 0.05; done"))
        await kit.phase(bus, session, "running")
        await kit.cancel(bus, session)
        (tmp_path / "run" / "attempts" / f"{session}.1" / "work" / "go").touch()
        exited = (await kit.over(bus, session)).attempts[1].exited
    assert exited is not None and (exited.cancelled, exited.exit_code) == (True, 0)
