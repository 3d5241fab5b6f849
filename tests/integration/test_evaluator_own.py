"""Evaluators of a user's own: whatever they raise or return, the session ends, says so, and is no reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import own_kit
import pytest
from test_evaluator import ended, evaluated, evaluator, task

from polar_common.bus import Bus
from polar_evaluator.domain import unusable
from polar_evaluator.evaluators.base import Verdict

pytestmark = pytest.mark.nats
OWN = "tests.integration.own_kit:Judge"


@pytest.mark.parametrize("args", [{"returns": 0}, {"returns": 2}, {"check": True}, {"ends": True}])
async def test_a_defect_is_told_and_is_no_reward(bus: Bus, tmp_path: Path, args: dict[str, Any]) -> None:
    async with evaluator(bus, tmp_path):
        found = await evaluated(bus, await ended(bus, task({"kind": OWN, "args": args}), answer=b"x"), timeout=60)
    assert (found.outcome, found.reward, found.details["cause"]) == ("infra_error", None, "evaluator")
    told = {
        "returns0": "a NoneType and not a Verdict",
        "returns2": "no finite number",
        "checkTrue": "boom",
        "endsTrue": "SystemExit",
    }
    assert told["".join(f"{k}{v}" for k, v in args.items())] in found.detail


@pytest.mark.parametrize("returned", own_kit.Judge.returned)
def test_what_cant_be_recorded_is_seen(returned: object) -> None:
    assert unusable(returned)


def test_a_good_verdict_is_left_alone() -> None:
    assert not unusable(Verdict(True, 1, 0, "fine", b"log", {"a": [1]}, {"c": 0.5}))
