"""`exact`: a call goes on a chain iff its prompt starts with the chain's whole context, sampled ids included.

Chains are the root-to-leaf paths of the tree that these continuations form; a leaf is a trained call that no trained
call of its agent descends from. A span is trained in the chain of its lowest-numbered descendant leaf and is context
(`sampled_elsewhere`) in the others.
"""

from __future__ import annotations

from .agents import agents
from .base import Chain, Link, View
from .drift import break_class, end_of_turn

__all__ = ["Exact", "owners"]


def owners(view: View) -> dict[int, int]:
    """Call → the lowest-numbered leaf of its agent below it (a leaf is its own). Calls without a trained descendant of
    their agent are left out.
    """
    parent, agent = view.links.parent, agents(view)
    owner: dict[int, int] = {}
    # Children are longer than their parents, so this order meets every child before its parent.
    for i in sorted(range(len(view.calls)), key=lambda i: (-view.calls[i].length, -i)):
        if i not in owner and view.trained(i):
            owner[i] = i
        up = parent[i]
        if i in owner and up is not None and agent[up] == agent[i]:
            owner[up] = min(owner.get(up, owner[i]), owner[i])
    return owner


class Exact:
    """Paths of the tree of exact continuations."""

    def chains(self, view: View) -> list[Chain]:
        owner = owners(view)
        leaves = sorted({o for o in owner.values()})
        paths = [_path(leaf, view) for leaf in leaves]
        paths.sort(key=lambda path: (path[0], path[-1]))
        ends = end_of_turn(view)
        return [_chain(path, owner, view, ends) for path in paths]


def _path(leaf: int, view: View) -> list[int]:
    path = []
    at: int | None = leaf
    while at is not None:
        path.append(at)
        at = view.links.parent[at]
    return path[::-1]


def _chain(path: list[int], owner: dict[int, int], view: View, ends: frozenset[int]) -> Chain:
    leaf = path[-1]
    links = []
    for i in path:
        reason = view.excluded.get(view.calls[i].id, "")
        if not reason and owner[i] != leaf:
            reason = "sampled_elsewhere"
        links.append(Link(i, not reason, reason))
    begins = next(i for i in path if owner.get(i) == leaf)
    return Chain(tuple(links), break_class(begins, view, ends), any(i in view.links.ambiguous for i in path))
