"""The `tree` encoding of exact chains: shared prefixes stored once, each node a trace with a place.

A node's ids follow its parent's; a root-to-leaf `walk` gives back the exact chain, with the spans that another leaf
owns as context (`sampled_elsewhere`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .assemble import Draft, role_of
from .images import exact_images, moved

__all__ = ["encode", "walk"]

Place = dict[str, Any]
"""JSON of `polar_common.traces.TreePosition`."""


def encode(drafts: Sequence[Draft]) -> list[tuple[Draft, Place | None]]:
    """Nodes of all trees, parents before children."""
    trees: dict[tuple[str, bytes], list[Draft]] = defaultdict(list)
    for draft in drafts:
        trees[draft.calls[0].id, draft.prompt.tobytes()].append(draft)
    found: list[tuple[Draft, Place | None]] = []
    for (name, _), members in trees.items():
        nodes: list[tuple[Draft, Place]] = []
        _grow(members, 0, None, name, nodes)
        leaf_of = {d.calls[-1].id: place["node"] for d, place in nodes}
        found += [(d, place | {"owner": leaf_of[place["owner"]]}) for d, place in nodes]
    return found


def _grow(
    members: Sequence[Draft], begin: int, parent: int | None, name: str, nodes: list[tuple[Draft, Place]]
) -> None:
    """One node for the spans [begin, end) that all members share, then one subtree per way they go on."""
    end = begin + 1
    while len(members) > 1 and all(len(m.spans) > end for m in members):
        if len({m.calls[end].id for m in members}) > 1:
            break
        end += 1
    if len(members) == 1:
        end = len(members[0].spans)
    number = len(nodes)
    nodes.append(_node(members, begin, end, parent, name, number))
    ways: dict[str, list[Draft]] = defaultdict(list)
    for member in members:
        if len(member.spans) > end:
            ways[member.calls[end].id].append(member)
    for way in ways.values():
        _grow(way, end, number, name, nodes)


def _node(
    members: Sequence[Draft], begin: int, end: int, parent: int | None, name: str, number: int
) -> tuple[Draft, Place]:
    """The place's `owner` is, until all nodes are known, the last call of the leaf's chain."""
    first = members[0]
    # The leaf that trains the node's spans, or one that shows them.
    owner = next((m for m in members if any(span["trained"] for span in m.spans[begin:end])), first)
    start = 0 if begin == 0 else _end(first, begin - 1)
    stop = _end(first, end - 1)
    spans = [span | {"start": span["start"] - start} for span in owner.spans[begin:end]]
    calls = first.calls[begin:end]
    position = 0 if begin == 0 else len(first.prompt) + start
    own = exact_images(first.calls[:end])[len(exact_images(first.calls[:begin])) :]
    node = replace(
        first,
        prompt=first.prompt if begin == 0 else first.prompt[:0],
        response=first.response[start:stop],
        mask=owner.mask[start:stop],
        logprobs=owner.logprobs[start:stop],
        spans=spans,
        calls=calls,
        role=role_of(next((c for c, span in zip(calls, spans, strict=True) if span["trained"]), calls[-1])),
        images=moved(own, position),
        cut=first.cut and len(members) == 1,
    )
    leaf = owner.calls[-1].id
    return node, {"tree": name, "node": number, "parent": parent, "position_start": position, "owner": leaf}


def _end(draft: Draft, n: int) -> int:
    return int(draft.spans[n]["start"] + draft.spans[n]["length"])


def walk(nodes: Sequence[tuple[Draft, Place]], leaf: int) -> Draft:
    """The exact chain that ends in node `leaf` of one tree's nodes."""
    by_number = {place["node"]: (draft, place) for draft, place in nodes}
    path: list[tuple[Draft, Place]] = []
    at: int | None = leaf
    while at is not None:
        path.append(by_number[at])
        at = path[-1][1]["parent"]
    path.reverse()
    prompt = path[0][0].prompt
    masks, logprobs, spans, start = [], [], [], 0
    for draft, place in path:
        own = place["owner"] == leaf
        masks.append(draft.mask if own else np.zeros_like(draft.mask))
        logprobs.append(draft.logprobs if own else np.zeros_like(draft.logprobs))
        for span in draft.spans:
            shown = span | {"start": span["start"] + start}
            if span["trained"] and not own:
                shown |= {"trained": False, "reason": "sampled_elsewhere"}
            spans.append(shown)
        start += len(draft.response)
    last = path[-1][0]
    calls = [c for d, _ in path for c in d.calls]
    return replace(
        last,
        prompt=prompt,
        response=np.concatenate([d.response for d, _ in path]),
        mask=np.concatenate(masks),
        logprobs=np.concatenate(logprobs),
        spans=spans,
        calls=calls,
        images=exact_images(calls),
    )
