"""Forty kills with a fixed seed: nothing lost, nothing twice, nothing stuck. `bench.chaos` runs more of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.chaos import ChaosOptions, rest_of, run_chaos

pytestmark = [pytest.mark.nats, pytest.mark.chdb, pytest.mark.timeout(540)]


def test_a_house_under_kill_9_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    options = ChaosOptions(kills=40, sessions=60, seed=20, pause_s=1.0, settle_s=200, with_up=False)
    outcome = run_chaos(options, tmp_path)
    assert outcome.counted.lost == []
    assert outcome.counted.doubled == []
    assert outcome.counted.stuck == []
    assert outcome.verified.ok, outcome.verified.findings
    assert sum(outcome.kills.values()) == 40
    assert len(outcome.kills) >= 6
    # That it really ran: sessions with several calls each, and attempts that died with their gateway.
    facts = outcome.counted.facts
    assert facts["sessions"] == 60
    assert facts["captured"] >= 60
    assert outcome.verified.totals["attempts"] > 60


def test_a_run_in_parts_does_what_is_left_under_another_seed(tmp_path: Path) -> None:
    wanted, totals = ChaosOptions(kills=100, sessions=200, seed=5), tmp_path / "totals"
    assert rest_of(wanted, None) == (wanted, {}) == rest_of(wanted, totals)
    totals.write_text('{"kills": 30, "sessions": 100, "lost": 0}\n{"kills": 20, "sessions": 20, "lost": 1}\n')
    left, counted = rest_of(wanted, totals)
    assert (left.kills, left.sessions, left.seed) == (50, 100, 7)
    assert counted == {"kills": 50, "sessions": 120, "lost": 1}
    totals.write_text('{"kills": 100, "sessions": 200}\n')
    assert rest_of(wanted, totals)[0].kills == 0
