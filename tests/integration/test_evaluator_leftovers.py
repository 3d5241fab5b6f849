"""Clean copies that an evaluator which died left behind: the log says who still needs one."""

from __future__ import annotations

import os
from pathlib import Path

import gateway_kit as kit
import pytest
from test_evaluator import advance, ended, started, task

from polar_common.bus import Bus
from polar_common.events import EvaluationEvaluated, SessionCancelled, SessionLost
from polar_evaluator.app import is_live
from polar_evaluator.handlers import Evaluations
from polar_evaluator.settings import EvaluatorSettings
from polar_runtime import reap

pytestmark = pytest.mark.nats
CHECK = {"command": "true", "prewarm": True}


async def test_copies_that_nobody_needs_are_removed_and_no_others(bus: Bus, tmp_path: Path) -> None:
    evaluations = Evaluations(bus, EvaluatorSettings(data=tmp_path))
    runs = await started(bus, task(CHECK, name="runs"))
    judged = await ended(bus, task(CHECK, name="judged"), answer=b"x")
    kept = {f"{runs}.1.aa", f"{judged}.1.aa", "s1-nowhere-0.1.aa", "a label", "x.1.aa", f"{runs}.one.aa"}

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
    kept |= {f"{replaced}.2.aa", f"{lost}.1.bb"}
    evaluations.copies.live.add(f"{lost}.1.bb")

    root = tmp_path / "run" / "evaluations"
    for label in kept | gone:
        (root / label).mkdir(parents=True)
    assert set(await reap(root, lambda label: is_live(bus, evaluations, label))) == gone
    assert set(os.listdir(root)) == kept
