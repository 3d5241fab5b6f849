"""Merged against per-request training: the same sessions, the same sampled tokens, one update each.

`python -m bench.ablation --json`. Sessions of several turns are built under the rules `exact` and `per_request`, and a
small real model makes one policy-gradient update on each: forward, backward and optimizer step, at learning rate 0.
`step_time_ratio` is seconds per request over seconds merged, to be set against `token_ratio`, the ratio of the tokens
that go through the model (a request's sequence repeats all before it). `grad_rel_diff` is the norm of the two
gradients' difference over the norm of one: merging must not change what is learnt. Ids are random, so only speed and
gradients mean anything here. The original reports 5.39 times for whole training steps on its own workload.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from bench.load import Result, arguments, median, report, resident_mb
from bench.session import LongSession, long_session
from polar_engine.models import ensure_model
from polar_reconstructor.build import BuiltTrace, build_session, prepare
from polar_reconstructor.domain import select
from polar_reconstructor.rules import BUILT_IN
from polar_train import TrainTrace, collate, microbatches

RULES = ("exact", "per_request")
BUDGET = 2048
"""Padded tokens of one forward pass."""


@dataclass(frozen=True, slots=True)
class Step:
    """One update."""

    seconds: float
    tokens: int
    units: int
    gradient: torch.Tensor
    memory_mb: float
    """Resident memory's peak beyond what stood before."""


def built(session: LongSession, rules: str, vocabulary: int) -> list[TrainTrace]:
    selection = select(session.session, session.stored())
    if selection is None:
        raise RuntimeError("the session isn't over")
    made = build_session(prepare(selection), session.bodies(), BUILT_IN[rules])
    return [_train_trace(session.session, n, trace, vocabulary) for n, trace in enumerate(made.traces)]


def _train_trace(session: str, number: int, made: BuiltTrace, vocabulary: int) -> TrainTrace:
    draft = made.draft
    return TrainTrace(
        trace_id=made.trace_id, session=session, number=number, prompt_ids=draft.prompt % vocabulary,
        response_ids=draft.response % vocabulary, loss_mask=draft.mask, logprobs=draft.logprobs, spans=(),
        status=made.status, agent_role=draft.role, action_tokens=draft.action_tokens, policy_seq_min=0,
        policy_seq_max=0, reward=0.0,
    )  # fmt: skip


def update(model: Any, optimizer: torch.optim.Optimizer, traces: Sequence[TrainTrace]) -> Step:
    """All traces as one update, in passes of at most `BUDGET` padded tokens."""
    total = sum(t.action_tokens for t in traces)
    # Half of the sessions did well, half badly.
    gains = {t.trace_id: 1.0 if int(t.session.rpartition("-")[2]) % 2 else -1.0 for t in traces}
    optimizer.zero_grad()
    tokens = 0
    with _Peak() as peak:
        begun = time.perf_counter()
        for some in microbatches(traces, BUDGET):
            batch = collate(some, gains, weights=[1 / total] * len(some))
            ids, gain, weight = (torch.from_numpy(x) for x in (batch.input_ids, batch.advantages, batch.weights))
            hidden = model(input_ids=ids, attention_mask=torch.from_numpy(batch.attention_mask)).logits[:, :-1]
            said = hidden.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            (-(weight[:, 1:] * gain[:, 1:] * said).sum()).backward()
            tokens += ids.numel()
        optimizer.step()
        seconds = time.perf_counter() - begun
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()
    return Step(seconds, tokens, len(traces), gradient, peak.mb)


class _Peak:
    """Watches this process's resident memory."""

    mb = 0.0

    def __enter__(self) -> _Peak:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        before = resident_mb(os.getpid())
        while not self._over.wait(0.05):
            self.mb = max(self.mb, resident_mb(os.getpid()) - before)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def measure(name: str, sessions: int, turns: int, tokens: int, times: int) -> list[Result]:
    model = AutoModelForCausalLM.from_pretrained(ensure_model(name).path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    made = [long_session(turns, tokens, index=n) for n in range(sessions)]
    traces = {r: [t for s in made for t in built(s, r, model.config.vocab_size)] for r in RULES}
    actions = {r: sum(t.action_tokens for t in found) for r, found in traces.items()}
    if len(set(actions.values())) != 1:
        raise RuntimeError(f"not the same sampled tokens: {actions}")
    update(model, optimizer, [min(traces["exact"], key=lambda t: t.length)])
    steps = {r: [update(model, optimizer, found) for _ in range(times)] for r, found in traces.items()}
    merged, each = (steps[r][-1] for r in RULES)
    seconds = {r: median([s.seconds for s in found]) for r, found in steps.items()}
    tokens_ratio = each.tokens / merged.tokens
    ratio = seconds["per_request"] / seconds["exact"]
    apart = float((each.gradient - merged.gradient).norm() / each.gradient.norm())
    note = (
        f"{each.units} units against {merged.units}, one update each of {actions['exact']:,} sampled tokens; "
        f"{each.memory_mb:.0f} MB beyond the model against {merged.memory_mb:.0f}; bar 0.8 of token_ratio; "
        "the original's own: 5.39"
    )
    return [
        Result("step_time_ratio", ratio, "ratio", tokens_ratio, ratio / tokens_ratio, note),
        Result("step_s", seconds["exact"], "s", seconds["per_request"], seconds["exact"] / seconds["per_request"]),
        Result("token_ratio", tokens_ratio, "ratio", note=f"{each.tokens:,} against {merged.tokens:,} padded tokens"),
        Result("grad_rel_diff", apart, "share of the norm", 1e-4, apart / 1e-4, "bar 1e-4, float32"),
    ]


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__ or "", argv, sessions=2, turns=8, tokens=512, times=2)
    disable_progress_bar()
    sessions, turns, times = (2, 4, 1) if options.short else (options.sessions, options.turns, options.times)
    report(measure("smollm2-135m", sessions, turns, options.tokens, times), options.json)


if __name__ == "__main__":
    main()
