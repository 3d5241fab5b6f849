"""Clean copies that nobody uses: of an evaluator that died, of an attempt without a verdict, or never finished."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import gateway_kit as kit
import pytest
from test_evaluator import advance, ended, evaluated, evaluator, started, task

from polar_common.bus import Bus
from polar_common.events import EvaluationEvaluated, SessionCancelled, SessionLost
from polar_common.tasks import cancel_and_wait, spawn
from polar_evaluator.app import is_live
from polar_evaluator.handlers import Evaluations
from polar_evaluator.settings import EvaluatorSettings
from polar_runtime import reap
from polar_runtime.ledger import Ledger

pytestmark = pytest.mark.nats
CHECK = {"command": "true", "prewarm": True}


async def test_copies_that_nobody_needs_are_removed_and_no_others(bus: Bus, tmp_path: Path) -> None:
    evaluations = Evaluations(bus, EvaluatorSettings(data=tmp_path))
    runs = await started(bus, task(CHECK, name="runs"))
    judged = await ended(bus, task(CHECK, name="judged"), answer=b"x")
    kept = {f"{runs}.1.aa", f"{judged}.1.aa", "s1-another-0.1.aa", "a label", "x.1.aa", f"{runs}.one.aa"}

    told = await ended(bus, task(CHECK, name="told"), answer=b"x")
    await bus.once(
        EvaluationEvaluated(session=told, attempt=1, evaluation="live", evaluator="command", outcome="passed", reward=1)
    )
    lost = await started(bus, task(CHECK, name="lost"))
    await advance(bus, lost, SessionLost(session=lost, attempt=1))
    replaced = await started(bus, task(CHECK, name="replaced"))
    await kit.release(bus, task(CHECK, name="replaced"), attempt=2)
    cancelled = await started(bus, task(CHECK, name="cancelled"))
    await advance(bus, cancelled, SessionCancelled(session=cancelled, attempt=0, last_attempt=1))
    broken = await ended(bus, task(CHECK, name="broken"), fault="harness", cause="crashed")
    gone = {f"{session}.1.aa" for session in (told, lost, replaced, cancelled, broken)}
    gone |= {"s1-nobodys-0.1.aa", "s7-dropped-0.1.aa"}
    kept |= {f"{replaced}.2.aa", f"{lost}.1.bb"}
    evaluations.copies.live.add(f"{lost}.1.bb")

    root = tmp_path / "run" / "evaluations"
    for label in kept | gone:
        (root / label).mkdir(parents=True)
    Ledger(root / "s1-another-0.1.aa").write("s1-another-0.1.aa", "local")
    assert set(await reap(root, lambda label: is_live(bus, evaluations, root / label))) == gone
    assert set(os.listdir(root)) == kept


@pytest.mark.parametrize("where", ["runtime", "evaluator"])
async def test_a_copy_that_cant_be_prepared_is_removed(bus: Bus, tmp_path: Path, where: str) -> None:
    steps = {"prepare": [{"exec": "echo here > here; exit 3"}]}
    broken = task(CHECK | (steps if where == "evaluator" else {}), runtime=steps if where == "runtime" else {})
    async with evaluator(bus, tmp_path) as evaluations:
        found = await evaluated(bus, await ended(bus, broken, answer=b"x"))
        assert evaluations.copies.live == set()
    assert found.outcome == "infra_error" and "a prepare step failed in the clean copy" in found.detail
    assert os.listdir(tmp_path / "run" / "evaluations") == []


async def test_a_copy_whose_preparing_is_broken_off_is_removed(bus: Bus, tmp_path: Path) -> None:
    evaluations = Evaluations(bus, EvaluatorSettings(data=tmp_path))
    session = await started(bus, task(CHECK | {"prepare": [{"exec": "echo here > here; sleep 300"}]}))
    queued = (await kit.load(bus, session)).attempts[1].queued
    assert queued is not None
    preparing = spawn(evaluations.copies.prepared(queued), name="preparing")
    root = tmp_path / "run" / "evaluations"
    async with asyncio.timeout(10):
        while not list(root.glob("*/*/here")):
            await asyncio.sleep(0.02)
    await cancel_and_wait(preparing)
    assert (os.listdir(root), evaluations.copies.live) == ([], set())
