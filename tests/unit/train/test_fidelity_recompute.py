"""The recompute itself: chunks and batches change nothing, truncation cuts what a few lines of numpy cut."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from polar_common.errors import ConfigError
from polar_engine.models import ensure_model
from polar_train.fidelity.recompute import Item, Recomputer
from polar_train.fidelity.scope import Want

TINY = ensure_model("tiny").path


@pytest.fixture(scope="module")
def network() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(TINY), dtype=torch.float32).eval()


def ids(seed: int, count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 500, count).astype(np.int32)


def plain(network: Any, sequence: np.ndarray[Any, Any], want: Want) -> np.ndarray[Any, Any]:
    """One forward pass, one place after the other."""
    with torch.inference_mode():
        logits = network(torch.from_numpy(sequence[None].astype(np.int64))).logits[0].double().numpy()
    return np.array(
        [chance(logits[p - 1] / want.temperature, int(sequence[p]), want) for p in range(want.start, want.stop)]
    )


def chance(scores: np.ndarray[Any, Any], token: int, want: Want) -> float:
    """Log-prob of a token after min_p, top_k, top_p; -inf where it was cut."""
    p = np.exp(scores - scores.max())
    p /= p.sum()
    p[p < want.min_p * p.max()] = 0
    if want.top_k:
        p[p < np.sort(p)[-want.top_k]] = 0
    p /= p.sum()
    if want.top_p < 1:
        mass = 0.0
        for i in np.argsort(-p, kind="stable"):
            if mass >= want.top_p:
                p[i] = 0
            mass += p[i]
    with np.errstate(divide="ignore"):
        return float(np.log(p[token] / p.sum()))


@pytest.mark.parametrize(
    ("batch_tokens", "chunk", "scored"), [(8192, 1024, 1000), (64, 7, 3), (200, 1, 1), (1, 16, 5), (8192, 1024, 4)]
)
def test_batches_and_chunks_change_nothing(
    network: Any, batch_tokens: int, chunk: int, scored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`scored`: places whose logits are scored at a time."""
    model = Recomputer(TINY, batch_tokens=batch_tokens, chunk=chunk)
    model._rows = chunk
    monkeypatch.setattr("polar_train.fidelity.recompute._SCORED", scored * model.vocab)
    items = []
    for seed, length in enumerate([40, 9, 40, 61, 2, 33]):
        borders = sorted({1, length // 3 or 1, length // 2 or 1, length})
        wants = tuple(Want(a, b, temperature=(0.7, 1.0, 1.4)[a % 3]) for a, b in pairwise(borders))
        items.append(Item(ids(seed, length), wants))
    done: list[int] = []
    found = model.logprobs(items, done.append)
    assert sum(done) == len(items)
    for item, values in zip(items, found, strict=True):
        for want, got in zip(item.wants, values, strict=True):
            np.testing.assert_allclose(got, plain(network, item.ids, want), atol=2e-5)


@pytest.mark.parametrize(
    "cut",
    [
        {"top_k": 40}, {"top_k": 1}, {"top_p": 0.9}, {"top_p": 0.01}, {"min_p": 0.05},
        {"top_k": 60, "top_p": 0.8, "min_p": 0.01, "temperature": 1.3},
    ],
)  # fmt: skip
def test_truncation_cuts_what_it_should(network: Any, cut: dict[str, Any]) -> None:
    sequence = ids(5, 60)
    want = Want(3, 60, **cut)
    ((got,),) = Recomputer(TINY, chunk=16).logprobs([Item(sequence, (want,))])
    expected = plain(network, sequence, want)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    kept = ~np.isneginf(expected)
    np.testing.assert_allclose(got[kept], expected[kept], atol=2e-5)
    assert not kept.all()


def test_nothing_predicts_a_sequences_first_id() -> None:
    ((got,),) = Recomputer(TINY).logprobs([Item(ids(1, 5), (Want(0, 5),))])
    assert np.isnan(got[0]) and np.isfinite(got[1:]).all()
    ((only,),) = Recomputer(TINY).logprobs([Item(ids(1, 1), (Want(0, 1),))])
    assert np.isnan(only).all()


def test_what_a_model_cannot_read_is_refused(tmp_path: Path) -> None:
    model = Recomputer(TINY)
    assert model.refuses(ids(1, 50)) == ""
    assert model.refuses(np.array([1, model.vocab], dtype=np.int32)) == "beyond_vocabulary"
    assert model.refuses(ids(1, 40_000)) == "too_long"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="can't be loaded"):
        Recomputer(tmp_path)
