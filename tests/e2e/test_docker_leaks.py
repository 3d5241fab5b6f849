"""Two hundred sessions in containers, one behind the other: what the house and its daemon hold is what they held."""

from __future__ import annotations

import os
from typing import Any

import pytest
from dock_kit import Dock, held, settled

pytestmark = [
    pytest.mark.docker, pytest.mark.slow, pytest.mark.nats, pytest.mark.chdb, pytest.mark.timeout(1800)
]  # fmt: skip

_PARTS = ("gateway", "evaluator", "proxy", "ingest", "reconstructor")
# Pools of threads and connections fill up to their sizes, which are a few dozen.
_POOLS = 24


def descriptors(dock: Dock) -> dict[str, int]:
    children = dock.live.children()
    return {name: len(os.listdir(f"/proc/{children[name]}/fd")) for name in _PARTS}


def test_two_hundred_sessions_leave_nothing(dock: Dock) -> None:
    def some(name: str, count: int) -> dict[str, Any]:
        script = "echo hi > hello.txt; mkdir -p ~/more /tmp/more; (setsid sleep 1000 >/dev/null 2>&1 &)\n"
        limits = {"queue_s": 1700, "attempts": 1}
        return dock.run(dock.task(name, script, samples=count, limits=limits), timeout=1700)[name]

    assert some("first", 10)["outcomes"] == {"passed": 10}
    before, open_before = held(dock), descriptors(dock)
    assert before["containers"] == 0 and before["attempts"] == []
    row = some("all", 200)
    assert row["outcomes"] == {"passed": 200}
    assert (row["completions"], row["traces"], row["exact_share"]) == (200, 200, 1.0)
    assert settled(dock, before) == before
    open_after = descriptors(dock)
    assert all(open_after[name] <= open_before[name] + _POOLS for name in _PARTS), (open_before, open_after)
    dock.works()
