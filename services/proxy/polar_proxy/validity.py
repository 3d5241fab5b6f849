"""Whether a captured sample can be trained, and why not. The harness is served either way. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from polar_common.events import SamplingUsed
from polar_proxy.engines.base import LogprobKind
from polar_render.records import Ids

__all__ = ["Verdict", "judge"]

_GREEDY = 0.01
_ABOVE_ZERO = 1e-3
"""Engines round: a log-prob may come out a little above 0."""
_NONE = -9999.0
"""What vLLM's API says, and OpenAI's, for a log-prob that is missing or minus infinity."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`untrainable` is "" or the reason, `at` the sampled index it was found at. `logprobs` float32[S], None if none.

    `context_exact`: the engine reported just the ids that were sent; None where it reported none.
    """

    untrainable: str
    logprobs: npt.NDArray[np.float32] | None
    context_exact: bool | None
    at: int | None = None


def judge(
    ids: Sequence[int],
    logprobs: Sequence[float | None] | None,
    used: SamplingUsed,
    kind: LogprobKind,
    sent: Ids,
    reported: Sequence[int] | None,
    *,
    completion_tokens: int | None = None,
    said: bool = False,
) -> Verdict:
    """`completion_tokens`: how many the engine says it sampled, where it says so. `said`: its answer isn't empty."""
    exact = None if reported is None else _equal(sent, reported)
    values, at = _values(logprobs)
    if not ids and (said or (completion_tokens or 0) > 0):
        return Verdict("no_token_ids", values, exact)
    if ids and (values is None or kind == "none"):
        return Verdict("no_logprobs", None, exact)
    if values is not None and (len(values) != len(ids) or (completion_tokens or 0) > len(ids)):
        return Verdict("length_mismatch", values, exact)
    if at is not None:
        return Verdict("invalid_logprobs", values, exact, at)
    if exact is False:
        return Verdict("engine_retokenised", values, exact)
    return Verdict(_policy(used, kind), values, exact)


def _policy(used: SamplingUsed, kind: LogprobKind) -> str:
    """Sampling whose log-probs aren't those of the policy."""
    if used.temperature < _GREEDY:
        return "greedy"
    if used.presence_penalty or used.frequency_penalty or used.repetition_penalty != 1.0:
        return "penalties"
    if used.logit_bias:
        return "logit_bias"
    if kind == "raw" and used.temperature != 1.0:
        return "raw_logprobs"
    return ""


def _equal(sent: Ids, reported: Sequence[int]) -> bool:
    return len(sent) == len(reported) and sent.tolist() == reported


def _plain(logprobs: Sequence[float | None]) -> bool:
    """Whether all are numbers that a log-prob can be: cheaper than asking numpy about a few dozen."""
    try:
        return sum(logprobs) > _NONE and max(logprobs) <= _ABOVE_ZERO  # type: ignore[arg-type,type-var,operator]
    except TypeError:
        return False


def _values(logprobs: Sequence[float | None] | None) -> tuple[npt.NDArray[np.float32] | None, int | None]:
    """float32 values (null becomes NaN) and the first index that isn't a log-prob."""
    if logprobs is None:
        return None, None
    if logprobs and _plain(logprobs):
        return np.array(logprobs, dtype=np.float32), None
    plain = [v if type(v) in (float, int) else np.nan for v in logprobs]
    values = np.array(plain, dtype=np.float64)
    good = (values <= _ABOVE_ZERO) & (values > _NONE)
    with np.errstate(over="ignore"):
        return values.astype(np.float32), None if good.all() else int(good.argmin())
