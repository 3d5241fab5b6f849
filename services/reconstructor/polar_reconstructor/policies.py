"""What a rule set's options make of chains: policy versions apart, conservation restored, short traces left out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .assemble import Draft
from .rules.base import Chain, Link, View

__all__ = ["by_policy_version", "conserve", "long_enough"]


def conserve(chains: Iterable[Chain], view: View) -> list[Chain]:
    """Each call that isn't excluded is trained in exactly one link.

    A second training becomes context (`sampled_elsewhere`), an excluded one loses its mask, and what no chain trains
    gets a chain of its own.
    """
    seen: set[int] = set()
    found = []
    for chain in chains:
        links = []
        for link in chain.links:
            reason = view.excluded.get(view.calls[link.call].id, "")
            if link.trained and (reason or link.call in seen):
                link = replace(link, trained=False, reason=reason or "sampled_elsewhere")
            if link.trained:
                seen.add(link.call)
            links.append(link)
        found.append(replace(chain, links=tuple(links)))
    missing = [i for i in range(len(view.calls)) if view.trained(i) and i not in seen]
    return found + [Chain((Link(i),), "unmerged") for i in missing]


def by_policy_version(chains: list[Chain], view: View) -> tuple[list[Chain], dict[str, str]]:
    """Apply `mixed_policy`; also completion id → reason for what it leaves untrained."""
    if view.rules.mixed_policy == "keep":
        return chains, {}
    found: list[Chain] = []
    left: dict[str, str] = {}
    for chain in chains:
        versions = sorted({view.calls[link.call].policy_seq for link in chain.links if link.trained})
        if len(versions) < 2:
            found.append(chain)
        elif view.rules.mixed_policy == "split":
            found += [_only(chain, version, "other_policy", view) for version in versions]
        else:
            found.append(_only(chain, versions[-1], "mixed_policy", view))
            old = [link for link in chain.links if link.trained and view.calls[link.call].policy_seq != versions[-1]]
            left |= {view.calls[link.call].id: "mixed_policy" for link in old}
    return found, left


def _only(chain: Chain, version: int, reason: str, view: View) -> Chain:
    """The chain with only one version trained, up to its last such span."""
    links = [
        replace(link, trained=False, reason=reason)
        if link.trained and view.calls[link.call].policy_seq != version
        else link
        for link in chain.links
    ]
    last = max(n for n, link in enumerate(links) if link.trained)
    return replace(chain, links=tuple(links[: last + 1]), split=last + 1 < len(links))


def long_enough(drafts: Iterable[Draft], minimum: int) -> tuple[list[Draft], dict[str, str]]:
    """Drafts that train at least `minimum` tokens; completion id → reason for the spans of the others and of cuts."""
    kept: list[Draft] = []
    left: dict[str, str] = {}
    for draft in drafts:
        left |= dict.fromkeys(draft.dropped, "max_length")
        if draft.spans and draft.action_tokens >= minimum:
            kept.append(draft)
        else:
            left |= {c.id: "min_tokens" for c in draft.trained}
    return kept, left
