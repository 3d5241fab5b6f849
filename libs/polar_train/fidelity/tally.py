"""Adding up differences: by scope and context, with the worst places kept for each kind of context. Pure."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from polar_train.groups import Ids

from .scope import TOLERANCE

__all__ = ["Report", "Stats", "Worst"]

Floats = npt.NDArray[np.float64]
IN_SCOPE = ""


@dataclass(slots=True)
class Stats:
    """Sums over spans. A span's ratio is exp(Σ recomputed − recorded): its importance ratio at identical weights."""

    spans: int = 0
    tokens: int = 0
    within: int = 0
    """Spans all of whose tokens agree within the tolerance."""
    max_abs: float = 0.0
    sum_abs: float = 0.0
    finite: int = 0
    outside_kept: int = 0
    """Sampled tokens that the recomputed kept set doesn't hold."""
    ratio_sum: float = 0.0
    ratio_min: float = math.inf
    ratio_max: float = 0.0

    def add(self, difference: Floats) -> None:
        """One span: recomputed − recorded, float64[n], -inf where the recomputed kept set lacks the token."""
        finite = np.abs(difference[np.isfinite(difference)])
        worst = float(finite.max(initial=0.0))
        lost = len(difference) - len(finite)
        self.spans += 1
        self.tokens += len(difference)
        self.within += int(worst <= TOLERANCE and not lost)
        self.max_abs = max(self.max_abs, worst)
        self.sum_abs += float(finite.sum())
        self.finite += len(finite)
        self.outside_kept += lost
        ratio = float(np.exp(min(700.0, float(difference.sum()))))
        self.ratio_sum += ratio
        self.ratio_min = min(self.ratio_min, ratio)
        self.ratio_max = max(self.ratio_max, ratio)

    def merge(self, other: Stats) -> None:
        for name in ("spans", "tokens", "within", "sum_abs", "finite", "outside_kept", "ratio_sum"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_abs = max(self.max_abs, other.max_abs)
        self.ratio_min = min(self.ratio_min, other.ratio_min)
        self.ratio_max = max(self.ratio_max, other.ratio_max)

    @property
    def share(self) -> float | None:
        return self.within / self.spans if self.spans else None

    @property
    def mean_abs(self) -> float | None:
        return self.sum_abs / self.finite if self.finite else None

    @property
    def ratio_mean(self) -> float | None:
        return self.ratio_sum / self.spans if self.spans else None

    def json(self) -> dict[str, Any]:
        there = self.spans > 0
        return {
            "spans": self.spans,
            "tokens": self.tokens,
            "within": self.within,
            "share": self.share,
            "max_abs": self.max_abs if there else None,
            "mean_abs": self.mean_abs,
            "outside_kept": self.outside_kept,
            "ratio_mean": self.ratio_mean,
            "ratio_min": self.ratio_min if there else None,
            "ratio_max": self.ratio_max if there else None,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Worst:
    """A token whose log-prob differs much. `place` counts from the trace's first id; `at` within its span."""

    difference: float
    recorded: float
    recomputed: float
    session: str
    number: int
    completion: str
    place: int
    at: int
    token: int
    before: Ids
    after: Ids
    context: str
    scope: str
    tokenizer_hash: str = ""


@dataclass(slots=True)
class Report:
    """What `check` found. `rows`: (reason outside the scope or "", context) → sums over recomputed spans."""

    build: str
    run: str = ""
    sessions: int = 0
    traces: int = 0
    checked: int = 0
    spans: int = 0
    """Trained spans of the checked traces."""
    tokens: int = 0
    rows: dict[tuple[str, str], Stats] = field(default_factory=dict)
    unmeasured: Counter[str] = field(default_factory=Counter)
    """Why spans couldn't be recomputed → spans."""
    unreadable: Counter[str] = field(default_factory=Counter)
    """`missing` or `damaged` → traces."""
    details: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    """Version → directory, or the reason for none."""
    keep: int = 5
    _worst: dict[str, list[tuple[float, int, Worst]]] = field(default_factory=dict)
    _order: Iterable[int] = field(default_factory=itertools.count)

    def add(self, scope: str, context: str, difference: Floats) -> None:
        self.rows.setdefault((scope, context), Stats()).add(difference)

    def consider(self, worst: Worst) -> None:
        """Keep it if it is among the worst of its context."""
        heap = self._worst.setdefault(worst.context, [])
        size = abs(worst.difference)
        entry = (size, -next(iter(self._order)), worst)
        if len(heap) < self.keep:
            heapq.heappush(heap, entry)
        elif heap and size > heap[0][0]:
            heapq.heapreplace(heap, entry)

    def threshold(self, context: str) -> float:
        """A difference that isn't larger needn't be considered."""
        heap = self._worst.get(context, [])
        return heap[0][0] if self.keep and len(heap) >= self.keep else (0.0 if self.keep else math.inf)

    @property
    def worst(self) -> list[Worst]:
        """By context, the worst first."""
        return [w for context in sorted(self._worst) for _, _, w in sorted(self._worst[context], reverse=True)]

    @property
    def in_scope(self) -> Stats:
        return self._sum(lambda scope, _: scope == IN_SCOPE)

    def context(self, context: str) -> Stats:
        """Sums over one kind of context, whatever the scope."""
        return self._sum(lambda _, label: label == context)

    def scope(self, reason: str) -> Stats:
        """Sums over what is outside for one reason."""
        return self._sum(lambda scope, _: scope == reason)

    @property
    def contexts(self) -> list[str]:
        return sorted({label for _, label in self.rows})

    @property
    def reasons(self) -> list[str]:
        return sorted({scope for scope, _ in self.rows if scope != IN_SCOPE})

    @property
    def faultless(self) -> bool:
        """Something was in scope, all of it agrees, and no trace is damaged."""
        return self.in_scope.share == 1.0 and not self.unreadable["damaged"]

    def _sum(self, wanted: Any) -> Stats:
        total = Stats()
        for (scope, label), stats in self.rows.items():
            if wanted(scope, label):
                total.merge(stats)
        return total

    def json(self) -> dict[str, Any]:
        """Plain values, without the worst places, whose text needs a tokenizer."""
        return {
            "build": self.build,
            "run": self.run,
            "sessions": self.sessions,
            "traces": self.traces,
            "checked": self.checked,
            "spans": self.spans,
            "tokens": self.tokens,
            "tolerance": TOLERANCE,
            "in_scope": self.in_scope.json(),
            "outside": {reason: self.scope(reason).json() for reason in self.reasons},
            "not_recomputed": dict(self.unmeasured),
            "contexts": {context: self.context(context).json() for context in self.contexts},
            "rows": [
                {"scope": scope or "in scope", "context": label, **stats.json()}
                for (scope, label), stats in sorted(self.rows.items())
            ],
            "unreadable": dict(self.unreadable),
            "details": self.details,
            "versions": self.versions,
        }
