"""Reported log-probabilities against a plain recompute, for any mixture of batching and prefix reuse; and its speed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from local_engine_kit import EngineClient, Reference, logprobs_of

pytest.importorskip("torch")
from polar_engine.models import ensure_model
from polar_engine.testing import EngineThread, engine_thread

# The bar for fp32 log-probs in EXACT-mode traces.
BAR = 1e-4


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineThread]:
    # Small chunks, so that prompts are read in many pieces beside decoding requests.
    with engine_thread(model="tiny", max_model_len=2048, chunk_alone=48, chunk_beside_decodes=7) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(ensure_model("tiny").path)


@pytest.fixture
def client(engine: EngineThread) -> EngineClient:
    return EngineClient(engine.url)


def session(client: EngineClient, reference: Reference, seed: int, trunk: list[int]) -> tuple[float, int, int]:
    """An agent session of several calls; worst difference, reused and sent prompt tokens."""
    rng = random.Random(seed)
    context = trunk[: rng.randrange(2, len(trunk))] + [rng.randrange(500) for _ in range(rng.randrange(1, 30))]
    worst, cached, sent = 0.0, 0, 0
    for call in range(4):
        temperature = rng.choice([0.7, 1.0, 1.0, 1.3])
        answer = client.generate(
            context,
            max_tokens=rng.randrange(1, 25),
            temperature=temperature,
            seed=seed * 10 + call,
            n=rng.choice([1, 1, 2]),
            request={"cache_salt": rng.choice(["", "other"])},
        )
        for choice in answer["choices"]:
            expected = reference.logprobs(context, choice["token_ids"], temperature)
            worst = max(worst, float(np.abs(expected - logprobs_of(choice)).max()))
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        sent += len(context)
        picked = rng.choice(answer["choices"])["token_ids"]
        # Mostly the whole answer continues; sometimes the harness edits and the context branches off.
        keep = len(picked) if rng.random() < 0.8 else rng.randrange(len(picked))
        context = context + picked[:keep] + [rng.randrange(500) for _ in range(rng.randrange(1, 12))]
    return worst, cached, sent


@pytest.mark.parametrize("round_", range(3))
def test_any_mixture_recomputes_within_the_bar(client: EngineClient, reference: Reference, round_: int) -> None:
    rng = random.Random(round_)
    trunk = [rng.randrange(500) for _ in range(400)]
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(session, client, reference, round_ * 100 + i, trunk) for i in range(10)]
        results = [f.result() for f in futures]
    assert max(worst for worst, _, _ in results) < BAR
    # The test proves nothing about reuse unless there was some.
    assert sum(c for _, c, _ in results) > 0.5 * sum(s for _, _, s in results)


@pytest.mark.parametrize(
    "params",
    [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.9, "temperature": 0.6}],
)
def test_truncated_sampling_reports_the_renormalised_logprob(client: EngineClient, params: dict[str, float]) -> None:
    prompt = [504, 7, 8, 9]
    content = client.generate(prompt, max_tokens=30, seed=2, ignore_eos=True, **params, logprobs=20)
    for entry in content["choices"][0]["logprobs"]["content"]:
        ranked = {t["token_id"]: t["logprob"] for t in entry["top_logprobs"] if t["logprob"] > -9999}
        total = sum(np.exp(lp) for lp in ranked.values())
        assert total <= 1 + 1e-9
        if params.get("top_k", 99) <= 20:
            assert total == pytest.approx(1.0, abs=1e-9)


def test_prompt_logprobs_recompute(client: EngineClient, reference: Reference) -> None:
    rng = random.Random(8)
    prompt = [rng.randrange(500) for _ in range(120)]
    client.generate(prompt, max_tokens=2)  # leaves a prefix that must not be reused here
    rows = client.generate(prompt, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    reported = [row[str(token)]["logprob"] for token, row in zip(prompt[1:], rows[1:], strict=True)]
    assert np.abs(reference.logprobs(prompt[:1], prompt[1:]) - reported).max() < BAR


def test_a_continued_call_computes_only_what_is_new(client: EngineClient) -> None:
    prompt = list(range(100, 400))
    first = client.generate(prompt, max_tokens=10, seed=1, ignore_eos=True)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < 10
    continued = prompt + first["choices"][0]["token_ids"] + [5, 6, 7]
    second = client.generate(continued, max_tokens=10, seed=1)
    # All but the last sampled token has keys and values; it was never fed back.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 309
    again = client.generate(prompt, max_tokens=10, seed=1, ignore_eos=True)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 299
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert logprobs_of(again["choices"][0]) == pytest.approx(logprobs_of(first["choices"][0]), abs=1e-5)


def test_samples_that_arrive_together_read_their_prompt_once(engine: EngineThread, client: EngineClient) -> None:
    prompt = [9, *range(50, 450)]
    before = engine.host.scheduler.steps
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda s: client.generate(prompt, max_tokens=2, seed=s, ignore_eos=True), range(6)))
    cached = sorted(a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers)
    assert cached[1:] == [400] * 5
    assert engine.host.scheduler.steps - before < 30


def test_salts_and_resets_share_nothing(client: EngineClient) -> None:
    prompt = [11, *range(200, 260)]
    client.generate(prompt, max_tokens=1, request={"cache_salt": "a"})
    other = client.generate(prompt, max_tokens=1, request={"cache_salt": "b"})
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    same = client.generate(prompt, max_tokens=1, request={"cache_salt": "a"})
    assert same["usage"]["prompt_tokens_details"]["cached_tokens"] == 60
    assert client.post("/reset_prefix_cache") == {"success": True}
    fresh = client.generate(prompt, max_tokens=1, request={"cache_salt": "a"})
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_memory_for_keys_and_values_is_bounded() -> None:
    # 16 MB hold 32,768 positions of the tiny model; every prompt here is different.
    with engine_thread(model="tiny", kv_cache_mb=16) as running:
        client = EngineClient(running.url)
        for i in range(40):
            client.generate([i] * 2000, max_tokens=1)
        cache = running.host.scheduler._cache
        assert 0 < cache.used <= 16 << 20
        # A request that needs more than the bound is served alone.
        assert client.generate([3] * 2000, max_tokens=30_000, stop_token_ids=list(range(512)))["choices"]


@pytest.fixture(scope="module")
def smollm2() -> Iterator[EngineThread]:
    with engine_thread(model="smollm2-135m") as running:
        yield running


@pytest.mark.model
def test_smollm2_recomputes_within_the_bar_and_continues_fast(smollm2: EngineThread) -> None:
    client = EngineClient(smollm2.url)
    reference = Reference(smollm2.host.model.path)
    lines = [f"step {i}: the agent reads file number {i * 7} and reports {i * i} lines of code." for i in range(40)]
    text = "<|im_start|>user\n" + "\n".join(lines) + "<|im_end|>\n<|im_start|>assistant\n"
    context = client.post("/tokenize", {"prompt": text})["tokens"]
    assert len(context) > 800
    seconds = []
    for call in range(3):
        start = time.monotonic()
        answer = client.generate(context, max_tokens=16, seed=call, temperature=0.8, ignore_eos=True)
        seconds.append(time.monotonic() - start)
        choice = answer["choices"][0]
        expected = reference.logprobs(context, choice["token_ids"], 0.8)
        assert np.abs(expected - logprobs_of(choice)).max() < BAR
        context = context + choice["token_ids"] + client.post("/tokenize", {"prompt": "\nGo on.\n"})["tokens"]
    assert min(seconds[1:]) < seconds[0]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > len(context) - 60
