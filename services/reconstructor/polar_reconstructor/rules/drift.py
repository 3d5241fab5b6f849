"""Naming why ids differ where messages agree: template, retokenised, edited, or the engine's own doing.

`retokenised`: the same text in other ids. `template`: the model's format shows a past turn otherwise than it was
sampled (an empty think block, thinking dropped, arguments spaced anew). `edited`: the harness changed it. `engine`: the
engine reports other prompt ids than it was sent. Without a decoder, insertions and deletions alone count as the
template's; what is left is retokenised where the proxy found the messages equal, else edited.
"""

from __future__ import annotations

import numpy as np

from polar_reconstructor.calls import Call
from polar_reconstructor.columns import Ids

from .agents import is_subagent
from .base import View

__all__ = ["break_class", "canonical_copy", "drift_class", "end_of_turn"]

_SAID = {"edited": "edited", "head_changed": "edited", "compaction": "edited", "thinking": "template"}


def end_of_turn(view: View) -> frozenset[int]:
    """End-of-turn ids as the tokenizer gives them: from the rules, the engines' facts, and closed samples."""
    known = set(view.rules.end_of_turn)
    for c in view.calls:
        known.update(c.engine.end_of_turn)
        if c.closed and len(c.sampled):
            known.add(int(c.sampled[-1]))
    return frozenset(known)


def canonical_copy(earlier: Call, later: Call, view: View, ends: frozenset[int]) -> Ids:
    """What `later`'s prompt shows in place of `earlier`'s sample, up to the first end-of-turn id, or nothing."""
    tail = view.contexts.prompt(later)[earlier.length :]
    copy = _turn(tail, ends)
    return copy if len(copy) < len(tail) else tail[:0]


def _turn(tail: Ids, ends: frozenset[int]) -> Ids:
    """What stands before the first end-of-turn id; all of it where there is none."""
    at = np.flatnonzero(np.isin(tail, list(ends)))
    return tail[: int(at[0])] if len(at) else tail


def drift_class(earlier: Call, later: Call, copy: Ids, view: View, ends: frozenset[int], *, recorded: bool) -> str:
    """Why `copy` isn't `earlier`'s sample."""
    if said := _SAID.get(later.chain_class):
        return said
    raw = earlier.sampled
    if len(raw) and int(raw[-1]) in ends:
        raw = raw[:-1]
    return _cause(raw, copy, view, recorded)


def _cause(raw: Ids, copy: Ids, view: View, recorded: bool) -> str:
    """Why a turn that was `raw` is shown as `copy`. `recorded`: the proxy found the messages equal."""
    if view.decode is not None:
        was, shown = view.decode(raw), view.decode(copy)
        if was == shown:
            return "retokenised"
        was, shown = was.strip(), shown.strip()
        return "template" if recorded or shown in was or was in shown else "edited"
    if _subsequence(raw, copy) or _subsequence(copy, raw):
        return "template"
    return "retokenised" if recorded else "edited"


def break_class(i: int, view: View, ends: frozenset[int]) -> str:
    """Why call i begins a chain of its own, or the branch of one. `ends`: `end_of_turn`, asked once for all calls."""
    c = view.calls[i]
    said, by_ids = view.links.recorded[i], view.links.parent[i]
    above = by_ids if by_ids is not None else said
    if above is not None and is_subagent(c) and view.calls[above].agent != c.agent:
        return "subagent"
    if by_ids is not None and (said is None or said == by_ids):
        return c.chain_class if c.chain_class not in ("root", "continued", "native") else "branch"
    if said is None or c.chain_class not in ("continued", "native"):
        return c.chain_class
    earlier = view.calls[said]
    if c.context_exact is False:
        return "engine"
    if view.contexts.starts_with_prompt(c, earlier):
        return drift_class(earlier, c, canonical_copy(earlier, c, view, ends), view, ends, recorded=True)
    if earlier.untrainable == "engine_retokenised":
        return "engine"
    # They part within the earlier prompt: in its own turn's beginning, or in a turn before it.
    before, after = view.contexts.context(earlier), view.contexts.prompt(c)
    size = min(len(before), len(after))
    different = np.flatnonzero(before[:size] != after[:size])
    at = int(different[0]) if len(different) else size
    return _cause(_turn(before[at:], ends), _turn(after[at:], ends), view, recorded=True)


def _subsequence(short: Ids, long: Ids) -> bool:
    """Whether `short`'s ids stand in `long` in this order, with others between."""
    if len(short) >= len(long):
        return False
    rest = iter(long.tolist())
    return all(any(value == other for other in rest) for value in short.tolist())
