"""Per-token weights of a set of traces, said aloud: token-, trace- and session-mean (EXACT §8).

With a the action tokens of a trace: w_token = 1/Σa, w_trace = 1/(N_traces · a_trace), w_session = 1/(N_sessions ·
a_session). Each sums to 1 over all trained tokens; what a trainer leaves out has to be left out before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Weighting", "token_weights"]

Weighting = Literal["token", "trace", "session"]


def token_weights(
    action_tokens: Sequence[int], sessions: Sequence[str], weighting: Weighting
) -> npt.NDArray[np.float64]:
    """float64[n]: the weight of each trained token of trace i. Traces without action tokens get 0 and don't count."""
    counts = np.asarray(action_tokens, dtype=np.float64)
    if len(counts) != len(sessions):
        raise ValueError(f"{len(counts)} traces, {len(sessions)} sessions")
    weights = np.zeros(len(counts))
    live = counts > 0
    if not live.any():
        return weights
    if weighting == "token":
        weights[live] = 1.0 / counts.sum()
    elif weighting == "trace":
        weights[live] = 1.0 / (live.sum() * counts[live])
    elif weighting == "session":
        totals: Counter[str] = Counter()
        for session, count in zip(sessions, counts, strict=True):
            totals[session] += int(count)
        alive = sum(1 for total in totals.values() if total)
        per_token = {s: 1.0 / (alive * total) for s, total in totals.items() if total}
        weights[live] = [per_token[s] for s, on in zip(sessions, live, strict=True) if on]
    else:
        raise ValueError(f"no weighting {weighting!r}")
    return weights
