"""Which calls aren't trained, and why: siblings, side calls, undelivered and untrainable ones (EXACT §6).

Classes come from use. A call whose output is found again in a later prompt is an action, whatever it looked like.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from polar_reconstructor.calls import Call
from polar_reconstructor.contexts import Contexts

from .agents import is_subagent
from .base import Links
from .ruleset import RuleSet

__all__ = ["fates"]

_WINDOW = 12
"""Ids in a row that have to be found again for an output to count as reused."""
_MIN_REUSE = 3


def fates(
    calls: Sequence[Call], links: Links, contexts: Contexts, undelivered: Iterable[str], rules: RuleSet
) -> dict[str, str]:
    """Completion id → reason, for every call that no span may train."""
    extended = links.extended()
    missed = _undelivered(calls, extended, undelivered)
    found = {i: "replay" if c.replay_of else "empty" for i, c in enumerate(calls) if c.replay_of or not len(c.sampled)}
    adopted = {c.parent for c in calls if c.parent_by == "adopted"}
    for i, c in enumerate(calls):
        if c.id in adopted and i not in extended:
            found.setdefault(i, "adopted_partial")
    for group in links.siblings:
        for i, reason in _sibling_fates([i for i in group if i not in found], calls, extended, missed, rules):
            found.setdefault(i, reason)
    if rules.undelivered == "exclude":
        for i in missed:
            found.setdefault(i, "undelivered")
    if rules.side == "exclude":
        for i in _sides(calls, links, contexts, extended):
            found.setdefault(i, "side")
    for i, c in enumerate(calls):
        if c.untrainable:
            found.setdefault(i, c.untrainable)
        elif rules.subagents == "exclude" and is_subagent(c):
            found.setdefault(i, "subagent")
    return {calls[i].id: reason for i, reason in sorted(found.items())}


def _undelivered(calls: Sequence[Call], extended: frozenset[int], undelivered: Iterable[str]) -> set[int]:
    """Answers that didn't arrive: a later prompt that contains one, a replay or a proxy that saw it prove otherwise."""
    arrived = {name for c in calls for name in (*c.delivered, c.replay_of)}
    missed = set(undelivered) - arrived
    return {i for i, c in enumerate(calls) if c.id in missed and i not in extended}


def _sibling_fates(
    group: Sequence[int], calls: Sequence[Call], extended: frozenset[int], missed: set[int], rules: RuleSet
) -> list[tuple[int, str]]:
    found = []
    if len(group) > 1:
        found += [(i, "aborted") for i in group if i in missed]
    rest = [i for i in group if i not in missed]
    if len(rest) < 2:
        return found
    used = [i for i in rest if i in extended]
    for i in rest:
        if i in extended:
            continue
        if any(_parallel(calls[i], calls[k]) for k in rest if k != i):
            if rules.unused_parallel == "exclude":
                found.append((i, "unused_parallel"))
        elif used and rules.superseded == "exclude":
            found.append((i, "superseded_retry"))
    return found


def _parallel(a: Call, b: Call) -> bool:
    """Choices of one request, or calls that overlapped in time."""
    if a.parallel_of == b.parallel_of:
        return True
    return a.started < b.ended and b.started < a.ended


def _sides(calls: Sequence[Call], links: Links, contexts: Contexts, extended: frozenset[int]) -> list[int]:
    """Roots without tools in a session that has a root with tools, never extended, whose output isn't found again."""
    tools = _tools(calls)
    roots = [i for i in range(len(calls)) if links.parent[i] is None and links.recorded[i] is None]
    if not any(tools[calls[i].head] for i in roots):
        return []
    echoed = {name for c in calls for name in c.echoes}
    return [
        i
        for i in roots
        if not tools[calls[i].head]
        and i not in extended
        and not is_subagent(calls[i])
        and calls[i].id not in echoed
        and not _reused(i, calls, links, contexts)
    ]


def _tools(calls: Sequence[Call]) -> Mapping[str, bool]:
    """Head hash → whether it offers tools; a head whose body isn't in this attempt counts as one that does."""
    known: dict[str, bool] = {}
    for c in calls:
        if c.tools is not None:
            known[c.head] = c.tools
        else:
            known.setdefault(c.head, True)
    return known


def _reused(i: int, calls: Sequence[Call], links: Links, contexts: Contexts) -> bool:
    """Whether a run of the sample's ids is shown to a later call, and not because its own prompt or another call's
    sample says the same. What is looked at are prompts, however they were stored.
    """
    c = calls[i]
    core = c.sampled[: -1 if c.closed else None]
    size = min(_WINDOW, len(core))
    if size < _MIN_REUSE:
        return False
    own = contexts.prompt(c).tobytes()
    runs = [core[s : s + size].tobytes() for s in range(0, len(core) - size + 1, max(1, size // 2))]
    runs = [run for run in runs if not _holds(own, run)]
    later = range(i + 1, len(calls)) if runs else ()
    others = [calls[k].sampled.tobytes() for k in later]
    alone = [run for run in runs if not any(_holds(sample, run) for sample in others)]
    for k in later:
        start, whole = _shown_from(k, calls, links, contexts)
        shown = contexts.prompt(calls[k])[start:].tobytes()
        if any(_holds(shown, run) for run in (runs if whole else alone)):
            return True
    return False


def _shown_from(k: int, calls: Sequence[Call], links: Links, contexts: Contexts) -> tuple[int, bool]:
    """Where in call k's prompt begins what the call it continues wasn't shown, and whether that call's sample is left
    out: without an exact parent, copies of earlier samples stand among what was said.
    """
    parent, said = links.parent[k], links.recorded[k]
    if parent is not None:
        return calls[parent].context_length, True
    if said is not None and contexts.starts_with_prompt(calls[k], calls[said]):
        return calls[said].length, False
    return 0, False


def _holds(haystack: bytes, run: bytes) -> bool:
    """Whether the ids of `run` stand in `haystack`, at the border of an id."""
    at = haystack.find(run)
    while at >= 0:
        if at % 4 == 0:
            return True
        at = haystack.find(run, at + 1)
    return False
