"""Finding chains: recorded parents checked against ids, the longest exact prefix where none holds, and siblings.

Neither arrival order nor text takes part: a child's prompt is longer than its parent's (or as long, and comes after an
empty answer), so there are no cycles, and ties are settled by number and reported as ambiguous.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from polar_reconstructor.calls import Call
from polar_reconstructor.columns import Ids
from polar_reconstructor.contexts import Contexts

from .base import Links

__all__ = ["link"]


def link(calls: Sequence[Call], contexts: Contexts) -> Links:
    """Links of calls given by number."""
    index = {c.id: i for i, c in enumerate(calls)}
    for c in calls:
        if c.replay_of in index:
            # A replayed answer is the earlier sample again: what continues it continues that one.
            index[c.id] = index[c.replay_of]
    candidates = _Candidates(calls)
    parents: list[int | None] = []
    recorded: list[int | None] = []
    ambiguous: set[int] = set()
    for i, c in enumerate(calls):
        said = index.get(c.parent) if c.parent else None
        if said == i or (said is not None and c.parent_by == "adopted" and not contexts.extends(c, calls[said])):
            # Only the beginning of that answer was gone on with.
            said = None
        recorded.append(said)
        if said is not None and (calls[said].length, said) < (c.length, i) and contexts.extends(c, calls[said]):
            parents.append(said)
            if c.parent_ambiguous:
                ambiguous.add(i)
            continue
        found, tied = _longest(i, calls, contexts, candidates)
        parents.append(found)
        if tied:
            ambiguous.add(i)
    contexts.forget_bytes()
    return Links(tuple(parents), tuple(recorded), frozenset(ambiguous), _siblings(calls, contexts))


class _Candidates:
    """Calls that something may go on from, the longest context first; of equal ones the latest first."""

    def __init__(self, calls: Sequence[Call]) -> None:
        some = [i for i, c in enumerate(calls) if len(c.sampled) and not c.replay_of]
        some.sort(key=lambda i: (-calls[i].context_length, -i))
        self._calls = np.array(some, dtype=np.int64)
        self._starts = np.array([calls[i].length for i in some], dtype=np.int64)
        self._ends = np.array([calls[i].context_length for i in some], dtype=np.int64)
        self._first = np.array([calls[i].sampled[0] for i in some], dtype=np.int32)
        self._last = np.array([calls[i].sampled[-1] for i in some], dtype=np.int32)

    def of(self, prompt: Ids) -> list[int]:
        """Those whose sample's first and last id stand in the prompt: few are left to be compared in full."""
        begin = int(np.searchsorted(-self._ends, -len(prompt)))
        firsts = prompt[self._starts[begin:]] == self._first[begin:]
        fits = np.flatnonzero(firsts) + begin
        fits = fits[prompt[self._ends[fits] - 1] == self._last[fits]]
        found: list[int] = self._calls[fits].tolist()
        return found


def _longest(i: int, calls: Sequence[Call], contexts: Contexts, candidates: _Candidates) -> tuple[int | None, bool]:
    """The call with the longest context that begins call i's prompt, and whether another one ties with it."""
    c = calls[i]
    found: int | None = None
    for k in candidates.of(contexts.prompt(c)):
        earlier = calls[k]
        if found is not None and earlier.context_length < calls[found].context_length:
            return found, False
        if k != i and contexts.extends(c, earlier):
            if found is not None:
                return found, True
            found = k
    return found, False


def _siblings(calls: Sequence[Call], contexts: Contexts) -> tuple[tuple[int, ...], ...]:
    """Groups of two or more calls with the same request: equal identity, or the same head and the same prompt ids."""
    leader = list(range(len(calls)))

    def find(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    first: dict[object, int] = {}
    lengths = Counter((c.head, c.length) for c in calls)
    for i, c in enumerate(calls):
        if c.request_hash:
            leader[find(i)] = find(first.setdefault(c.request_hash, i))
        if lengths[c.head, c.length] > 1:
            prompt = hashlib.sha256(contexts.prompt(c).data).digest()
            leader[find(i)] = find(first.setdefault((c.head, prompt), i))
    groups: dict[int, list[int]] = defaultdict(list)
    for i in range(len(calls)):
        groups[find(i)].append(i)
    return tuple(tuple(g) for g in groups.values() if len(g) > 1)
