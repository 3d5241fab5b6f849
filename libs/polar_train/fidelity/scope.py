"""What the bar of EXACT §5 covers: spans of one version, `kv_mixed=false`, fp32, untruncated, processed log-probs.

Pure functions of a span and its trace's provenance. What isn't covered is recomputed and reported all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from polar_common.traces import Span

__all__ = ["OUTSIDE", "TOLERANCE", "Stretch", "Want", "context_label", "outside", "stretches", "want_of"]

TOLERANCE = 1e-4
"""In log-prob, per token."""
GREEDY = 0.01
_FP32 = ("float32", "fp32", "torch.float32")

OUTSIDE: dict[str, str] = {
    "several_versions": "the weights changed during the call",
    "kv_mixed": "part of the context was read by other weights than sampled",
    "dtype": "the engine didn't compute in fp32",
    "dtype_unknown": "the engine didn't say in what precision it computes",
    "greedy": "the most likely token was taken: nothing was drawn",
    "raw_logprobs": "recorded before temperature and truncation",
    "truncated_sampling": "drawn from a kept set, which is found again from recomputed numbers",
    "constrained": "drawn under a grammar, which isn't recomputed",
}
"""Reason → what it means. In this order: a span is counted under the first that applies."""


@dataclass(frozen=True, slots=True)
class Want:
    """Log-probs wanted of ids [start, stop) of a sequence, under these sampling parameters."""

    start: int
    stop: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Sampled indices [start, stop) of a span came from `version`."""

    version: str
    start: int
    stop: int


def outside(span: Span, dtype: str) -> str:
    """Why the bar doesn't cover a span: a key of `OUTSIDE`, "" where it does. `dtype` is the engine's."""
    reasons = {
        "several_versions": len({v.version for v in span.versions}) > 1,
        "kv_mixed": span.kv_mixed,
        "dtype": dtype not in ("", *_FP32),
        "dtype_unknown": not dtype,
        "greedy": span.temperature < GREEDY,
        "raw_logprobs": span.logprob_kind != "processed",
        "truncated_sampling": _truncated(span),
        "constrained": span.constrained,
    }
    return next((name for name in OUTSIDE if reasons[name]), "")


def context_label(span: Span) -> str:
    """`exact`, or `drifted/<class>`."""
    return "exact" if span.context_exact else f"drifted/{span.drift_class or 'unknown'}"


def stretches(span: Span) -> list[Stretch]:
    """The span by version, in order; the version is "" where none is recorded."""
    starts = [(v.start, v.version) for v in sorted(span.versions, key=lambda v: v.start)]
    if not starts or starts[0][0] > 0:
        starts.insert(0, (0, starts[0][1] if starts else ""))
    stops = [start for start, _ in starts[1:]] + [span.length]
    found = (Stretch(name, at, min(stop, span.length)) for (at, name), stop in zip(starts, stops, strict=True))
    return [s for s in found if s.stop > s.start]


def want_of(span: Span, stretch: Stretch, begin: int) -> Want:
    """What to recompute for a stretch of a span whose sample starts at place `begin` of its sequence.

    Raw log-probs are the model's own; a greedy token's are reported at temperature 1 without truncation.
    """
    start, stop = begin + stretch.start, begin + stretch.stop
    if span.logprob_kind != "processed" or span.temperature < GREEDY:
        return Want(start, stop)
    return Want(start, stop, span.temperature, span.top_p, span.top_k, span.min_p)


def _truncated(span: Span) -> bool:
    return span.top_p < 1.0 or span.top_k > 0 or span.min_p > 0.0
