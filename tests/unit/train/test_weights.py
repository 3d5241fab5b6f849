"""Weights sum to one, and each weighting means what it says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_train import token_weights
from polar_train.weights import Weighting

KINDS: list[Weighting] = ["token", "trace", "session"]


def test_the_three_means_of_a_small_group() -> None:
    """Session A has traces of 2 and 6 action tokens, B one of 4."""
    counts, sessions = [2, 6, 4], ["A", "A", "B"]
    np.testing.assert_allclose(token_weights(counts, sessions, "token"), [1 / 12] * 3)
    np.testing.assert_allclose(token_weights(counts, sessions, "trace"), [1 / 6, 1 / 18, 1 / 12])
    np.testing.assert_allclose(token_weights(counts, sessions, "session"), [1 / 16, 1 / 16, 1 / 8])


@given(
    st.lists(st.tuples(st.integers(0, 500), st.sampled_from("ABCD")), min_size=1, max_size=40), st.sampled_from(KINDS)
)
def test_weights_sum_to_one_over_trained_tokens(traces: list[tuple[int, str]], kind: Weighting) -> None:
    counts, sessions = [c for c, _ in traces], [s for _, s in traces]
    weights = token_weights(counts, sessions, kind)
    total = float(np.dot(weights, counts))
    assert total == pytest.approx(1.0 if any(counts) else 0.0)
    shares = {s: sum(w * c for w, c, t in zip(weights, counts, sessions, strict=True) if t == s) for s in set(sessions)}
    if kind == "session":
        alive = {s for s, c in zip(sessions, counts, strict=True) if c}
        assert all(share == pytest.approx(1 / len(alive)) for s, share in shares.items() if s in alive)


def test_a_hundred_calls_of_one_session_weigh_as_much_as_one_try() -> None:
    weights = token_weights([10] * 100 + [10], ["long"] * 100 + ["short"], "session")
    assert weights[:100].sum() * 10 == pytest.approx(0.5) == weights[100] * 10


def test_lengths_have_to_agree_and_the_weighting_has_to_exist() -> None:
    with pytest.raises(ValueError):
        token_weights([1], [], "token")
    with pytest.raises(ValueError):
        token_weights([1], ["A"], "sample")  # type: ignore[arg-type]
