"""Group-relative advantages. The baseline is one value per session: a long session is one try, not a hundred.

`leave_one_out`: a session's baseline is the mean value of the *other* trainable sessions. `mean`: of all of them
(GRPO); `normalise` divides by their standard deviation. A session's value is the mean reward of its traces; a trace's
advantage is its own reward minus its session's baseline. Sessions that aren't trainable take no part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .groups import Group, Member

__all__ = ["Advantages", "Baseline", "group_advantages", "session_advantages"]

Baseline = Literal["leave_one_out", "mean"]
_FLOOR = 1e-6


@dataclass(frozen=True, slots=True)
class Advantages:
    """By trace id. `singleton`: only one trainable session, so every advantage is 0. `flat`: all values were equal."""

    by_trace: Mapping[str, float]
    baselines: Mapping[str, float]
    """By session."""
    singleton: bool
    flat: bool


def session_advantages(
    rewards: Mapping[str, list[float]], *, baseline: Baseline = "leave_one_out", normalise: bool = False
) -> tuple[dict[str, list[float]], dict[str, float], bool, bool]:
    """Session → rewards of its traces in; session → advantages, baselines, singleton and flat out."""
    values = {session: float(np.mean(some)) for session, some in rewards.items() if some}
    flat = len(set(values.values())) < 2
    if len(values) < 2:
        return {s: [0.0] * len(some) for s, some in rewards.items()}, values, len(values) == 1, flat
    total, count = sum(values.values()), len(values)
    if baseline == "leave_one_out":
        bases = {s: (total - v) / (count - 1) for s, v in values.items()}
    else:
        bases = dict.fromkeys(values, total / count)
    scale = 1.0 / (float(np.std(list(values.values()))) + _FLOOR) if normalise else 1.0
    found = {s: [(r - bases[s]) * scale for r in some] if some else [] for s, some in rewards.items()}
    return found, bases, False, flat


def group_advantages(group: Group, *, baseline: Baseline = "leave_one_out", normalise: bool = False) -> Advantages:
    """Advantages of a group's traces; every trained token of a trace gets the trace's."""
    members = [m for m in group.trainable if m.traces or m.reward is not None]
    rewards = {m.session: _rewards(m) for m in members}
    found, bases, singleton, flat = session_advantages(rewards, baseline=baseline, normalise=normalise)
    by_trace = {t.trace_id: a for m in members for t, a in zip(m.traces, found[m.session], strict=False)}
    return Advantages(by_trace, bases, singleton, flat)


def _rewards(member: Member) -> list[float]:
    if member.traces:
        return [t.reward for t in member.traces]
    # Trainable and yet without a trace (all of it too short): its value still tells how hard the task is.
    return [member.reward or 0.0]
