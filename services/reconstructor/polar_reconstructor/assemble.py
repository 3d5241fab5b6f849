"""Chains → arrays and spans, with exactness found by comparing ids, never taken from the rule.

A link that claims to go on exactly and doesn't begins a chain of its own: a failed check never discards the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from .calls import Call
from .columns import Floats, Ids, Mask
from .images import Image, Place, images_of
from .rules.agents import is_subagent
from .rules.base import Chain, Link, View

__all__ = ["Draft", "assemble", "role_of", "span_json"]

SpanJson = dict[str, Any]


@dataclass(slots=True)
class Draft:
    """A trace before it is named: prompt int32[P]; response int32[R], mask uint8[R], logprobs float32[R]."""

    prompt: Ids
    response: Ids
    mask: Mask
    logprobs: Floats
    spans: list[SpanJson]
    calls: list[Call]
    """By span."""
    chain_class: str
    ambiguous: bool
    role: str
    cut: bool = False
    dropped: list[str] = field(default_factory=list)
    """Completions whose spans were cut off by the length bound."""
    images: list[Image] = field(default_factory=list)

    @property
    def action_tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def trained(self) -> list[Call]:
        return [c for c, span in zip(self.calls, self.spans, strict=True) if span["trained"]]


@dataclass(slots=True)
class _Placed:
    link: Link
    call: Call
    start: int
    """Of the sample, in prompt + response."""
    exact: bool
    drift_class: str = ""
    drift_at: int | None = None
    shown: bool = True
    """Nothing before it is the template's or the harness's in another form than the call's prompt has it."""


def assemble(chain: Chain, view: View) -> list[Draft]:
    """The chain's drafts: one, or more where an exactness claim failed. Empty where nothing in it is trained."""
    drafts: list[Draft] = []
    rest: Sequence[Link] = chain.links
    while rest:
        whole, placed, used = _lay_out(rest, view)
        draft = _draft(whole, placed, chain, view)
        if draft is not None:
            drafts.append(draft)
        rest = rest[used:]
    return drafts


def _lay_out(links: Sequence[Link], view: View) -> tuple[Ids, list[_Placed], int]:
    """Ids of the trace, its spans, and how many links were used."""
    exact = _exact_run(links, view)
    if exact == len(links) or links[exact].gap is None:
        placed = [_exactly(link, view) for link in links[:exact]]
        return view.contexts.context(placed[-1].call), placed, exact
    return _with_gaps(links, exact, view)


def _exact_run(links: Sequence[Link], view: View) -> int:
    """How many links from the first on continue each other exactly."""
    for n in range(1, len(links)):
        earlier, later = view.calls[links[n - 1].call], view.calls[links[n].call]
        if links[n].gap is not None or not view.contexts.extends(later, earlier):
            return n
    return len(links)


def _exactly(link: Link, view: View) -> _Placed:
    c = view.calls[link.call]
    if c.context_exact is False:
        return _Placed(link, c, c.length, False, "engine")
    return _Placed(link, c, c.length, True)


def _with_gaps(links: Sequence[Link], exact: int, view: View) -> tuple[Ids, list[_Placed], int]:
    placed = [_exactly(link, view) for link in links[:exact]]
    first = view.contexts.context(placed[-1].call)
    ids = np.empty(len(first) + _room(links[exact - 1 :], view), dtype=np.int32)
    ids[: len(first)] = first
    used = len(first)
    drifts: list[str] = []
    for n in range(exact, len(links)):
        link, c = links[n], view.calls[links[n].call]
        earlier = view.calls[links[n - 1].call]
        gap = link.gap
        if gap is None:
            if not view.contexts.extends(c, earlier):
                return ids[:used], placed, n
            gap = view.contexts.prompt(c)[earlier.context_length :]
        ids[used : used + len(gap)] = gap
        used += len(gap)
        placed.append(_compared(link, c, ids[:used], drifts, view))
        ids[used : used + len(c.sampled)] = c.sampled
        used += len(c.sampled)
    return ids[:used], placed, len(links)


def _room(links: Sequence[Link], view: View) -> int:
    """An upper bound of what the links after the first add: gaps, or what their prompts add, and samples."""
    calls = [view.calls[link.call] for link in links]
    gaps = [
        max(later.length - earlier.length, 0) if link.gap is None else len(link.gap)
        for (earlier, later), link in zip(pairwise(calls), links[1:], strict=True)
    ]
    return sum(gaps) + sum(len(c.sampled) for c in calls[1:])


def _compared(link: Link, c: Call, before: Ids, drifts: list[str], view: View) -> _Placed:
    """`drifts`: what the spans before it left standing otherwise, by place; the link's own is added. The first
    difference has the first one's class; the context is as faithful as the worst.
    """
    seen = view.contexts.prompt(c)
    shared = min(len(before), len(seen))
    different = np.flatnonzero(before[:shared] != seen[:shared])
    at = int(different[0]) if len(different) else (None if len(before) == len(seen) else shared)
    if at is None:
        drifts.clear()
    elif link.drift_class or not drifts:
        drifts.append(link.drift_class or "retokenised")
    shown = not {"edited", "template"}.intersection(drifts)
    if c.context_exact is False:
        return _Placed(link, c, len(before), False, "engine", at, shown)
    return _Placed(link, c, len(before), at is None, drifts[0] if drifts else "", at, shown)


def _draft(whole: Ids, placed: list[_Placed], chain: Chain, view: View) -> Draft | None:
    bound = view.rules.max_trace_tokens
    kept = [p for p in placed if not bound or p.start + len(p.call.sampled) <= bound]
    dropped = [p.call.id for p in placed[len(kept) :] if p.link.trained]
    while kept and not kept[-1].link.trained:
        kept.pop()
    if not kept:
        return Draft(whole[:0], whole[:0], *_empty(0), [], [], "", False, "main", True, dropped) if dropped else None
    start = kept[0].start
    end = kept[-1].start + len(kept[-1].call.sampled)
    mask, logprobs = _empty(end - start)
    for p in kept:
        if p.link.trained:
            _fill(p.call, p.start - start, mask, logprobs)
    return Draft(
        prompt=whole[:start],
        response=whole[start:end],
        mask=mask,
        logprobs=logprobs,
        spans=[_span(p, start) for p in kept],
        calls=[p.call for p in kept],
        chain_class=chain.chain_class,
        ambiguous=chain.ambiguous,
        role=role_of(next(p.call for p in kept if p.link.trained)),
        cut=bool(dropped) or chain.split,
        dropped=dropped,
        images=images_of(Place(p.call, p.start) for p in kept),
    )


def _empty(length: int) -> tuple[Mask, Floats]:
    return np.zeros(length, dtype=np.uint8), np.zeros(length, dtype=np.float32)


def _fill(c: Call, at: int, mask: npt.NDArray[np.uint8], logprobs: npt.NDArray[np.float32]) -> None:
    """Under a grammar, an id with log-prob 0.0 was forced: nothing was chosen, nothing is trained."""
    if c.logprobs is None:
        return
    stop = at + len(c.sampled)
    logprobs[at:stop] = c.logprobs
    mask[at:stop] = c.logprobs != 0.0 if c.constrained else 1


def role_of(c: Call) -> str:
    """`main`, or the kind of the sub-agent that made the call: not its own name, which no other session has."""
    return (c.agent_role or "subagent") if is_subagent(c) else "main"


def _span(p: _Placed, start: int) -> SpanJson:
    faithful = p.call.doc["context_faithful"] and p.shown
    return span_json(
        p.call,
        p.start - start,
        trained=p.link.trained,
        reason=p.link.reason,
        exact=p.exact,
        faithful=faithful,
        drift_class=p.drift_class,
        drift_at=p.drift_at,
    )


def span_json(
    c: Call,
    start: int,
    *,
    trained: bool,
    reason: str,
    exact: bool,
    faithful: bool,
    drift_class: str,
    drift_at: int | None,
) -> SpanJson:
    """The JSON form of `polar_common.traces.Span`; a test holds the two together."""
    doc, sampling = c.doc, c.doc["sampling"]
    return {
        "completion": c.id,
        "start": start,
        "length": len(c.sampled),
        "trained": trained,
        "reason": reason,
        "versions": doc["versions"],
        "policy_seq": c.policy_seq,
        "temperature": float(sampling["temperature"]),
        "top_p": float(sampling["top_p"]),
        "top_k": sampling["top_k"],
        "min_p": float(sampling["min_p"]),
        "logprob_kind": c.engine.logprob_kind,
        "finish": doc["finish"],
        "constrained": doc["constrained"],
        "cached_tokens": doc["cached_tokens"],
        "kv_salt": doc["kv_salt"],
        "kv_mixed": doc["kv_mixed"],
        "context_exact": exact,
        "context_faithful": faithful,
        "additions": doc["additions"],
        "native_equal": doc["native_equal"],
        "drift_class": drift_class,
        "drift_at": drift_at,
        "agent_role": role_of(c),
    }
