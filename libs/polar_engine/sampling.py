"""From a row of logits to a sampled token and its exact log-probability. Pure numpy; no torch, no server.

The order is vLLM's: penalties and biases, temperature, min_p, top_k, top_p. The log-probability is that of the
distribution really drawn from, renormalised over what truncation left (vLLM's `processed_logprobs`). Greedy decoding
reports the log-softmax at temperature 1, as vLLM does, since its own distribution is a single point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["GREEDY_BELOW", "Sampled", "Sampler", "SamplingParams", "Scored", "score_row"]

Floats = npt.NDArray[np.float64]
# vLLM's border: anything lower is argmax.
GREEDY_BELOW = 1e-5
# JSON has no -inf; a token that truncation removed is reported with this instead, as vLLM does.
_FLOOR = -9999.0
_BLOCK = 256


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for. Neutral defaults; `top_k` 0 is off, `logprobs` None reports none."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken instead of a draw."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the distribution."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability and rank (1 is the most likely)."""

    token: int
    logprob: float
    rank: int


@dataclass(frozen=True)
class Sampled(Scored):
    """A drawn token; `top` starts with the token itself, then the most likely others that were asked for."""

    top: tuple[Scored, ...] = ()


def score_row(logprobs: Floats, token: int, alternatives: int | None) -> Sampled:
    """`token` under `logprobs` [vocab], with the `alternatives` most likely tokens beside it; None asks for no list."""
    own = float(logprobs[token])
    rank = int(np.count_nonzero(logprobs >= own))
    if alternatives is None:
        return Sampled(token, own, rank)
    top = [Scored(token, max(own, _FLOOR), rank)]
    if alternatives:
        count = min(alternatives, len(logprobs))
        best = np.argpartition(-logprobs, count - 1)[:count]
        best = best[np.lexsort((best, -logprobs[best]))]
        top += [
            Scored(int(t), max(float(logprobs[t]), _FLOOR), place + 1) for place, t in enumerate(best) if t != token
        ]
    return Sampled(token, own, rank, tuple(top))


class Sampler:
    """Draws the tokens of one choice. The draw at a position depends on seed, choice index and position alone."""

    def __init__(self, params: SamplingParams, index: int, prompt: Sequence[int], ends: frozenset[int]) -> None:
        """`ends` are the ids that would end the answer, masked until `min_tokens` are out."""
        self.params = params
        self._draws = np.random.default_rng(None if params.seed is None else [params.seed % (1 << 64), index])
        self._early = np.array(sorted(ends), dtype=np.int64)
        self._count = 0
        self._seen = np.unique(np.asarray(prompt if params.penalised else [], dtype=np.int64))
        self._used: dict[int, int] = {}

    def sample(self, logits: npt.NDArray[np.float32]) -> Sampled:
        """The next token for `logits` [vocab]. Raises FloatingPointError where they aren't finite, or all masked."""
        scores = logits.astype(np.float64)
        self._adjust(scores)
        best = scores.max()
        # A NaN anywhere makes the maximum one; -inf as the maximum means that no token is left.
        if not np.isfinite(best):
            raise FloatingPointError("no finite logits to sample from")
        if not self.params.greedy:
            scores = _truncate(scores / self.params.temperature, self.params)
            best = scores.max()
        scores -= best
        weights = np.exp(scores)
        token = int(scores.argmax()) if self.params.greedy else _pick(weights, self._draws.random())
        scores -= np.log(weights.sum())
        self._count += 1
        if self.params.penalised:
            self._used[token] = self._used.get(token, 0) + 1
        return score_row(scores, token, self.params.logprobs)

    def _adjust(self, scores: Floats) -> None:
        params = self.params
        if params.penalised:
            self._penalise(scores)
        for token, bias in params.logit_bias.items():
            scores[token] += bias
        if params.allowed_token_ids:
            banned = np.ones(len(scores), dtype=bool)
            banned[list(params.allowed_token_ids)] = False
            scores[banned] = -np.inf
        if self._count < params.min_tokens:
            scores[self._early] = -np.inf

    def _penalise(self, scores: Floats) -> None:
        params = self.params
        used = np.fromiter(self._used, dtype=np.int64, count=len(self._used))
        seen = np.union1d(self._seen, used)
        rows = scores[seen]
        factor = params.repetition_penalty
        scores[seen] = np.where(rows > 0, rows / factor, rows * factor)
        counts = np.fromiter(self._used.values(), dtype=np.float64, count=len(self._used))
        scores[used] -= params.frequency_penalty * counts + params.presence_penalty


def _pick(weights: Floats, draw: float) -> int:
    """The place where the running sum of `weights` passes `draw` (0 to 1) of their total; never one of weight 0.

    Summed by blocks first: a running sum over a whole vocabulary costs as much as all the rest of sampling.
    """
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)))
    point = draw * blocks[-1]
    # side="right" finds the first strictly larger sum, so what has no weight can't be hit.
    block = min(int(np.searchsorted(blocks, point, side="right")), len(blocks) - 1)
    start = block * _BLOCK
    inside = np.cumsum(weights[start : start + _BLOCK])
    rest = point - (blocks[block - 1] if block else 0.0)
    place = int(np.searchsorted(inside, rest, side="right"))
    if place < len(inside):
        return start + place
    # Rounding put the point behind the sum: the last token of any weight up to here is meant.
    return int(np.flatnonzero(weights[: start + _BLOCK])[-1])


def _log_softmax(scores: Floats) -> Floats:
    shifted = scores - scores.max()
    normalised: Floats = shifted - np.log(np.exp(shifted).sum())
    return normalised


def _truncate(scores: Floats, params: SamplingParams) -> Floats:
    """`scores` with -inf where min_p, top_k or top_p cut; ties with the last kept token stay for top_k."""
    if params.min_p > 0.0:
        scores = np.where(scores < scores.max() + np.log(params.min_p), -np.inf, scores)
    if 0 < params.top_k < len(scores):
        least = np.partition(scores, -params.top_k)[-params.top_k]
        scores = np.where(scores < least, -np.inf, scores)
    if params.top_p < 1.0:
        scores = _nucleus(scores, params.top_p)
    return scores


def _nucleus(scores: Floats, top_p: float) -> Floats:
    """`scores` with -inf outside the smallest set of most likely tokens that holds `top_p`; one always stays."""
    logprobs = _log_softmax(scores)
    # The set is nearly always small, and sorting a whole vocabulary costs ten times as much as finding its head.
    for size in (512, 8192, len(scores)):
        count = min(size, len(scores))
        head = np.argpartition(-scores, count - 1)[:count]
        order = head[np.lexsort((head, -scores[head]))]
        probabilities = np.exp(logprobs[order])
        before = np.cumsum(probabilities) - probabilities
        if before[-1] >= top_p or count == len(scores):
            break
    keep = order[: max(1, int(np.searchsorted(before, top_p, side="left")))]
    cut = np.full_like(scores, -np.inf)
    cut[keep] = scores[keep]
    return cut
