"""`prefix_merging`: the rule of arXiv 2605.24220, with every span labelled exact or drifted.

Call k+1 goes on k's chain if k's *prompt* is a strict prefix of its prompt. Of what follows that prefix, t, the
assistant's canonical copy is replaced by the raw sample: with j the first end-of-turn id in t, the inserted context is
t[j+1:] if the sample ends with an end-of-turn id, else t[j:]. Kept separate: boundaries that can't be told (no
end-of-turn id in t or one inside the sample, a stop string's cut), siblings that share only the prompt, a sub-agent
and who started it, and calls without a recorded parent where nothing decides between several, or where another went on
from the one it may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from polar_reconstructor.columns import Ids

from .agents import agents
from .base import Chain, Link, View
from .drift import break_class, canonical_copy, drift_class, end_of_turn

__all__ = ["PrefixMerging"]


_UNSEEN = ("replay", "aborted", "undelivered", "side", "empty")
_APART = (*_UNSEEN, "superseded_retry", "unused_parallel", "adopted_partial")
"""Answers that nothing was made of: a prompt that merely begins like theirs doesn't go on from them. The unseen ones
leave the choice to others of the same prompt; the rest may still be what was meant.
"""


@dataclass(slots=True)
class _Building:
    links: list[Link]
    chain_class: str
    ambiguous: bool = field(default=False)


class PrefixMerging:
    """The paper's linear chains."""

    def chains(self, view: View) -> list[Chain]:
        ends, agent = end_of_turn(view), agents(view)
        free = _Free(view)
        tips: dict[int, _Building] = {}
        built: list[_Building] = []
        for i, c in enumerate(view.calls):
            reason = view.excluded.get(c.id, "")
            parent, tied = _parent(i, view, tips, free)
            apart = parent is None or agent[parent] != agent[i]
            joined = None if parent is None or apart else _join(parent, i, view, ends)
            if parent is None or joined is None:
                chain = _Building([Link(i, not reason, reason)], break_class(i, view, ends), tied)
                built.append(chain)
            else:
                gap, drift = joined
                chain = tips.pop(parent)
                free.drop(parent)
                chain.links.append(Link(i, not reason, reason, gap, drift))
                chain.ambiguous |= tied
            tips[i] = chain
        return [done for chain in built if (done := _trimmed(chain)) is not None]


class _Free:
    """Chain ends that a call without a recorded parent may go on: none that something was not made of, and none that
    another call continues exactly or by record, so that a sibling that shares only the prompt doesn't take its chain.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._lengths = np.array([c.length for c in view.calls], dtype=np.int64)
        self._last = np.array([view.contexts.prompt(c)[-1] if c.length else -1 for c in view.calls], dtype=np.int64)
        reasons = [view.excluded.get(c.id) for c in view.calls]
        self._seen = [reason not in _UNSEEN for reason in reasons]
        self._open = {i for i, reason in enumerate(reasons) if reason not in _APART}
        for parents in (view.links.parent, view.links.recorded):
            self._open -= {parent for i, parent in enumerate(parents) if parent is not None and i > parent}

    def drop(self, i: int) -> None:
        """Call i isn't a chain's end any more."""
        self._open.discard(i)

    def find(self, i: int) -> tuple[int | None, bool]:
        """The call with the longest prompt that begins call i's, if it is free; and whether several have it."""
        c = self._view.calls[i]
        some = np.flatnonzero(self._lengths[:i] < c.length)
        # Few are left to be compared in full, and the longest first.
        some = some[self._view.contexts.prompt(c)[self._lengths[some] - 1] == self._last[some]]
        found: list[int] = []
        for k in some[np.argsort(-self._lengths[some], kind="stable")].tolist():
            if found and self._lengths[k] < self._lengths[found[0]]:
                break
            if self._view.contexts.starts_with_prompt(c, self._view.calls[k]):
                found.append(k)
        seen = [k for k in found if self._seen[k]]
        return (seen[0] if len(seen) == 1 and seen[0] in self._open else None), len(seen) > 1


def _parent(i: int, view: View, tips: dict[int, _Building], free: _Free) -> tuple[int | None, bool]:
    """The chain end that call i goes on, and whether several would do."""
    c, said, by_ids = view.calls[i], view.links.recorded[i], view.links.parent[i]
    tied = i in view.links.ambiguous
    if said is not None:
        return (said if said in tips and view.contexts.starts_with_prompt(c, view.calls[said]) else None), tied
    if by_ids is not None:
        return (by_ids if by_ids in tips else None), tied
    if not c.native and c.chain_class != "unknown_parent":
        return None, tied
    return free.find(i)


def _join(parent: int, i: int, view: View, ends: frozenset[int]) -> tuple[Ids | None, str] | None:
    """Gap (None: exact) and drift class of a continuation; None where the boundary is unsafe."""
    earlier, c = view.calls[parent], view.calls[i]
    if view.contexts.extends(c, earlier):
        return None, ""
    raw = earlier.sampled
    if earlier.finish == "stop_string" or np.isin(raw[:-1], list(ends)).any():
        return None
    tail = view.contexts.prompt(c)[earlier.length :]
    copy = canonical_copy(earlier, c, view, ends)
    if len(copy) == len(tail) or not np.isin(tail[len(copy)], list(ends)):
        return None
    ended = len(raw) > 0 and int(raw[-1]) in ends
    recorded = view.links.recorded[i] == parent
    gap = tail[len(copy) + 1 :] if ended else tail[len(copy) :]
    return gap, drift_class(earlier, c, copy, view, ends, recorded=recorded)


def _trimmed(chain: _Building) -> Chain | None:
    """Without what follows its last trained span; None if nothing in it is trained."""
    last = max((n for n, link in enumerate(chain.links) if link.trained), default=-1)
    if last < 0:
        return None
    return Chain(tuple(chain.links[: last + 1]), chain.chain_class, chain.ambiguous)
