"""Sampling against a plain, slow oracle: what is kept, what is drawn, and which log-probability is reported."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_engine.sampling import Sampler, SamplingParams

VOCAB = 700  # more than two blocks of the draw, and not a multiple of one


def logits(seed: int, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=VOCAB) * spread).astype(np.float32)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def oracle(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution drawn from, by sorting everything."""
    p = softmax(row.astype(np.float64) / params.temperature)
    if params.min_p:
        p = np.where(p >= params.min_p * p.max(), p, 0.0)
    if params.top_k:
        p = np.where(p >= np.sort(p)[-params.top_k], p, 0.0)
    p /= p.sum()
    if params.top_p < 1:
        order = np.argsort(-p, kind="stable")
        mass = 0.0
        kept = []
        for token in order:
            kept.append(token)
            mass += p[token]
            if mass >= params.top_p:
                break
        p = np.where(np.isin(np.arange(VOCAB), kept), p, 0.0)
    return p / p.sum()


def draw_all(row: np.ndarray, params: SamplingParams, count: int) -> list:
    sampler = Sampler(params, 0, (1,), frozenset())
    return [sampler.sample(row) for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.1, 3.0),
    top_k=st.sampled_from([0, 1, 3, 50, VOCAB, VOCAB + 9]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
def test_reported_logprob_is_that_of_the_renormalised_distribution(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, logprobs=3)
    row = logits(seed)
    expected = oracle(row, SamplingParams(temperature=temperature, top_k=min(top_k, VOCAB), top_p=top_p, min_p=min_p))
    for sampled in draw_all(row, params, 4):
        assert expected[sampled.token] > 0
        assert sampled.logprob == pytest.approx(math.log(expected[sampled.token]), abs=1e-9)
        assert sampled.rank == int((expected >= expected[sampled.token] * (1 - 1e-12)).sum())
        assert sampled.top[0].token == sampled.token
        best = [t.token for t in sampled.top if t.rank == 1]
        assert best == [int(expected.argmax())]


def test_draws_follow_the_distribution() -> None:
    row = np.full(VOCAB, -50.0, dtype=np.float32)
    wanted = {3: 0.5, 255: 0.2, 256: 0.2, 699: 0.1}
    for token, p in wanted.items():
        row[token] = math.log(p)
    tokens = [s.token for s in draw_all(row, SamplingParams(seed=5), 4000)]
    assert set(tokens) == set(wanted)
    for token, p in wanted.items():
        # Four standard deviations of a binomial share.
        assert tokens.count(token) / 4000 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 4000))


def test_a_seed_gives_the_same_draws_and_choices_differ() -> None:
    row = logits(1)
    params = SamplingParams(seed=11)
    first = [s.token for s in draw_all(row, params, 20)]
    assert first == [s.token for s in draw_all(row, params, 20)]
    other = Sampler(params, 1, (1,), frozenset())
    assert first != [other.sample(row).token for _ in range(20)]
    assert first != [s.token for s in draw_all(row, SamplingParams(), 20)]


def test_greedy_takes_the_best_and_reports_its_logprob_at_temperature_one() -> None:
    row = logits(2)
    (sampled,) = draw_all(row, SamplingParams(temperature=0.0), 1)
    assert sampled.token == int(row.argmax())
    assert sampled.rank == 1
    assert sampled.logprob == pytest.approx(math.log(softmax(row.astype(np.float64)).max()), abs=1e-9)


def test_penalties_act_on_what_was_used() -> None:
    row = logits(3)
    used = int(row.argmax())
    params = SamplingParams(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.2)
    sampler = Sampler(params, 0, (7,), frozenset())
    scores = row.astype(np.float64)
    scores[7] = scores[7] / 1.2 if scores[7] > 0 else scores[7] * 1.2
    first = sampler.sample(row)
    assert first.token == int(scores.argmax())
    scores[used] = scores[used] / 1.2 - 2.0
    assert sampler.sample(row).token == int(scores.argmax())
    scores_again = sampler.sample(row)
    assert scores_again.token != used


def test_bias_allowed_ids_and_minimum_length() -> None:
    row = logits(4)
    biased = Sampler(SamplingParams(temperature=0.0, logit_bias={9: 100.0}), 0, (1,), frozenset())
    assert biased.sample(row).token == 9
    allowed = draw_all(row, SamplingParams(allowed_token_ids=(4, 8), seed=1), 50)
    assert {s.token for s in allowed} == {4, 8}
    best = int(row.argmax())
    short = Sampler(SamplingParams(temperature=0.0, min_tokens=1), 0, (1,), frozenset({best}))
    assert short.sample(row).token != best
    assert short.sample(row).token == best


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_an_error_and_not_a_token(bad: float) -> None:
    row = logits(5)
    row[17] = bad
    with pytest.raises(FloatingPointError):
        draw_all(row, SamplingParams(), 1)
    everything_masked = SamplingParams(allowed_token_ids=(2,), min_tokens=1)
    with pytest.raises(FloatingPointError):
        Sampler(everything_masked, 0, (1,), frozenset({2})).sample(logits(5))
