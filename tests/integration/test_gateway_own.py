"""Adapters of a user's own: what they lack or break is told as theirs, once, by name."""

from __future__ import annotations

from pathlib import Path

import gateway_kit as kit
import pytest

from polar_common.bus import Bus
from polar_common.task_spec import HarnessSpec, TaskSpec
from polar_gateway.house import House
from polar_runtime import Runtime, RuntimeSpec

pytestmark = pytest.mark.nats
OWN = "tests.integration.own_kit"


@pytest.mark.parametrize("name", ["Short", "Silent", "Leaving"])
async def test_an_adapter_without_a_version_or_a_word_runs(bus: Bus, tmp_path: Path, name: str) -> None:
    spec = TaskSpec(id="t", instruction="do", harness=HarnessSpec(name=f"{OWN}:{name}"))
    async with kit.gateway(bus, kit.settings(tmp_path)):
        state = await kit.over(bus, await kit.release(bus, spec))
    exited, begun = state.attempts[1].exited, state.attempts[1].initialized
    assert exited is not None and (exited.fault, exited.exit_code) == ("none", 0), exited
    assert begun is not None and (begun.harness_version, state.attempts[1].lost) == ("", None)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (f"{OWN}:Nameless", "has no `name`"),
        (f"{OWN}:Unversioned", "no `version`"),
        (f"{OWN}:Unmade", "told"),
        (f"{OWN}:Nothing", "a NoneType and not a Launch"),
        (f"{OWN}:Ending", "no licence"),
        (f"{OWN}:Numbers", "argv"),
        (f"{OWN}:Mixed", "env"),
        ("own_unreadable:X", "SyntaxError"),
    ],
)
async def test_what_an_adapter_lacks_is_told_by_name(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    (tmp_path / "own_unreadable.py").write_text("def broken(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = TaskSpec(id="t", instruction="do", harness=HarnessSpec(name=name))
    async with kit.gateway(bus, kit.settings(tmp_path)):
        state = await kit.over(bus, await kit.release(bus, spec))
    assert state.attempts[1].lost is None
    exited = state.attempts[1].exited
    assert exited is not None and (exited.fault, exited.cause) == ("harness", "config"), exited
    assert told in exited.detail and name in exited.detail


async def test_what_nobody_foresaw_loses_the_attempt_with_its_reason(bus: Bus, tmp_path: Path) -> None:
    def broken(spec: RuntimeSpec) -> Runtime:
        raise LookupError("no such thing")

    def adapt(house: House) -> None:
        house.make_runtime = broken

    async with kit.gateway(bus, kit.settings(tmp_path), adapt=adapt):
        session = await kit.release(bus, kit.script("true"))
        state = await kit.over(bus, session)
    lost = state.attempts[1].lost
    assert lost is not None and "LookupError('no such thing')" in lost.detail
