"""The small real model on the local engine: sampling, capture, exact traces, the trainer's view, replay."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from house_kit import running_house

from polar_common.house.layout import find_house
from polar_train.stream import TraceStream

pytestmark = [pytest.mark.nats, pytest.mark.chdb, pytest.mark.model, pytest.mark.timeout(600)]
EXAMPLES = Path(__file__).parents[2] / "examples/quickstart"


async def test_a_real_model_gives_exact_traces_a_trainer_can_read_and_replay_repeats(tmp_path: Path) -> None:
    file = tmp_path / "tasks.yaml"
    file.write_text(
        f"""
tasks:
  - id: guess
    samples: 3
    instruction: "I think of a number from 1 to 100. Guess it. Answer with one number only."
    dir: {EXAMPLES / "guess"}
    harness: {{name: command, args: {{argv: [python3, guess.py]}}}}
    evaluator: {{kind: command, command: python3 score.py, dir: {EXAMPLES / "guess_hidden"}, reward_file: reward.json}}
    limits: {{attempt_s: 240, session_s: 300, max_tokens_per_call: 24}}
"""
    )
    with running_house(tmp_path / "house", "--model", "smollm2-135m", timeout_s=300) as live:
        row = live.polar("run", str(file), "--run", "r", "--timeout", "280")[0]
        assert sum(row["outcomes"].values()) == 3
        assert set(row["outcomes"]) <= {"passed", "failed", "budget_exhausted"}
        assert row["completions"] >= 3
        # A guessing session is one conversation, however often it asked: one trace, and nothing drifted.
        assert (row["traces"], row["exact_share"]) == (3, 1.0)
        await read_group(find_house(live.data, "trainer").nats, row)
        live.polar("replay", "--build", "again", timeout=120)
        ids = {
            build: [
                r["trace"]
                for r in live.sql(f"SELECT trace FROM traces FINAL WHERE build = '{build}' ORDER BY session, number")
            ]
            for build in ("live", "again")
        }
        for _ in range(50):
            if len(ids["again"]) == 3:
                break
            rows = live.sql("SELECT trace FROM traces FINAL WHERE build = 'again' ORDER BY session, number")
            ids["again"] = [r["trace"] for r in rows]
        assert ids["live"] == ids["again"]
        assert len(ids["live"]) == 3


async def read_group(url: str, row: dict[str, object]) -> None:
    """What a trainer gets: the closed group with rewards, and traces whose columns fit together."""
    stream = await TraceStream.connect(url, run="r", build="live", trainer="t")
    try:
        group = await asyncio.wait_for(anext(aiter(stream)), 30)
    finally:
        await stream.close()
    assert group.task == row["task"]
    assert sorted(m.reward for m in group.members if m.reward is not None) == sorted(row["rewards"])  # type: ignore[call-overload]
    for trace in group.traces:
        assert len(trace.response_ids) == len(trace.loss_mask) == len(trace.logprobs)
        assert trace.loss_mask.sum() > 0
        assert (trace.logprobs[trace.loss_mask == 0] == 0).all()
        assert (trace.logprobs[trace.loss_mask == 1] <= 0).all()
