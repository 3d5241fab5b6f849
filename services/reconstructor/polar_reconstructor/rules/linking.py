"""Finding chains: recorded parents checked against ids, the longest exact prefix where none holds, and siblings.

Neither arrival order nor text takes part: a child's prompt is longer than its parent's, so there are no cycles, and
ties are settled by number and reported as ambiguous.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from polar_reconstructor.calls import Call
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
    by_length = sorted(
        (i for i, c in enumerate(calls) if len(c.sampled) and not c.replay_of),
        key=lambda i: (-calls[i].context_length, -i),
    )
    parents: list[int | None] = []
    recorded: list[int | None] = []
    ambiguous: set[int] = set()
    for i, c in enumerate(calls):
        said = index.get(c.parent) if c.parent else None
        if said == i or (said is not None and c.parent_by == "adopted" and not contexts.extends(c, calls[said])):
            # Only the beginning of that answer was gone on with.
            said = None
        recorded.append(said)
        if said is not None and contexts.extends(c, calls[said]):
            parents.append(said)
            if c.parent_ambiguous:
                ambiguous.add(i)
            continue
        found, tied = _longest(i, calls, contexts, by_length)
        parents.append(found)
        if tied:
            ambiguous.add(i)
    contexts.forget_bytes()
    return Links(tuple(parents), tuple(recorded), frozenset(ambiguous), _siblings(calls, contexts))


def _longest(i: int, calls: Sequence[Call], contexts: Contexts, by_length: Sequence[int]) -> tuple[int | None, bool]:
    """The call with the longest context that begins call i's prompt, and whether another one ties with it."""
    c = calls[i]
    found: int | None = None
    for k in by_length:
        earlier = calls[k]
        if k == i or earlier.context_length > c.length:
            continue
        if found is not None and earlier.context_length < calls[found].context_length:
            return found, False
        if contexts.extends(c, earlier):
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

    by_request: dict[str, int] = {}
    by_shape: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, c in enumerate(calls):
        if c.request_hash:
            leader[find(i)] = find(by_request.setdefault(c.request_hash, i))
        same = by_shape[c.head, c.length]
        for k in same:
            if _same_prompt(c, calls[k], contexts):
                leader[find(i)] = find(k)
                break
        same.append(i)
    groups: dict[int, list[int]] = defaultdict(list)
    for i in range(len(calls)):
        groups[find(i)].append(i)
    return tuple(tuple(g) for g in groups.values() if len(g) > 1)


def _same_prompt(a: Call, b: Call, contexts: Contexts) -> bool:
    if a.base == b.base and a.via == b.via and a.shared == b.shared:
        return a.new.tobytes() == b.new.tobytes()
    return bool((contexts.prompt(a) == contexts.prompt(b)).all())
