"""Traces → padded numpy batches. Column t of every array speaks of token t; next-token losses shift by one.

`input_ids`, `attention_mask`, `loss_mask`, `logprobs`, `advantages`, `weights`: [B, T] with T the longest trace (or a
multiple of `pad_to`). Masked and padded places hold 0; the weights of a batch sum to 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .groups import TrainTrace
from .weights import Weighting, token_weights

__all__ = ["Batch", "collate", "microbatches"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """See the module's docstring. `trace_ids` by row."""

    input_ids: npt.NDArray[np.int64]
    attention_mask: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]
    logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    trace_ids: tuple[str, ...]


def collate(
    traces: Sequence[TrainTrace],
    advantages: Mapping[str, float],
    *,
    weighting: Weighting = "session",
    weights: Sequence[float] | None = None,
    pad_id: int = 0,
    pad_to: int = 1,
) -> Batch:
    """One batch. `weights`: per-token weight of each trace where several batches make one update; else from these."""
    if weights is None:
        weights = token_weights([t.action_tokens for t in traces], [t.session for t in traces], weighting).tolist()
    width = max((t.length for t in traces), default=0)
    shape = (len(traces), -(-width // pad_to) * pad_to)
    ids = np.full(shape, pad_id, dtype=np.int64)
    attention = np.zeros(shape, dtype=np.int64)
    mask, old, gain, weight = (np.zeros(shape, dtype=np.float32) for _ in range(4))
    for row, trace in enumerate(traces):
        start, end = len(trace.prompt_ids), trace.length
        ids[row, :start], ids[row, start:end] = trace.prompt_ids, trace.response_ids
        attention[row, :end] = 1
        mask[row, start:end] = trace.loss_mask
        old[row, start:end] = trace.logprobs
        gain[row] = mask[row] * advantages[trace.trace_id]
        weight[row] = mask[row] * weights[row]
    return Batch(ids, attention, mask, old, gain, weight, tuple(t.trace_id for t in traces))


def microbatches(traces: Iterable[TrainTrace], max_tokens: int) -> list[list[TrainTrace]]:
    """Traces by length in batches of at most `max_tokens` padded tokens (one trace at least)."""
    found: list[list[TrainTrace]] = []
    for trace in sorted(traces, key=lambda t: (-t.length, t.trace_id)):
        if found and found[-1][0].length * (len(found[-1]) + 1) <= max_tokens:
            found[-1].append(trace)
        else:
            found.append([trace])
    return found
