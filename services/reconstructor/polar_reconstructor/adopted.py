"""Cut answers that the harness went on with (EXACT §3): as samples of their own, where the rules say `train`.

The adopting call's prompt shows the cut call's prompt, then a prefix of what it had sampled, then a close. That prefix
becomes a call with the cut call's log-probs; sampling settings and versions are those of the adopting call, since a
cut call records none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .calls import Aborted, Call
from .contexts import Contexts

__all__ = ["adopt"]


def adopt(calls: Sequence[Call], cut: Sequence[Aborted]) -> tuple[list[Call], set[str]]:
    """Calls with adopted partials among them, by sequence, and the partials' ids."""
    partials = {a.id: a for a in cut}
    contexts = Contexts(calls)
    found: dict[str, Call] = {}
    for c in calls:
        partial = partials.get(c.parent)
        if partial is None or c.parent_by != "adopted" or partial.id in found:
            continue
        if (made := _partial(partial, c, contexts)) is not None:
            found[partial.id] = made
    return sorted([*calls, *found.values()], key=lambda c: c.sequence), set(found)


def _partial(partial: Aborted, c: Call, contexts: Contexts) -> Call | None:
    sampled, logprobs, at = partial.sampled, partial.logprobs, partial.prompt_tokens
    if sampled is None or logprobs is None or len(sampled) != len(logprobs) or not 0 < at < c.length:
        return None
    shown = contexts.prompt(c)[at:]
    size = min(len(shown), len(sampled))
    different = np.flatnonzero(shown[:size] != sampled[:size])
    size = int(different[0]) if len(different) else size
    if not size or not np.isfinite(logprobs[:size]).all():
        return None
    own = {
        "completion": partial.id,
        "finish": "length",
        "closed": False,
        "parent_by": "none",
        "parallel_of": "",
        "delivered": [],
        "additions": ["adopted_partial"],
        "versions": [v for v in c.doc["versions"] if v["start"] == 0],
    }
    return replace(
        c,
        id=partial.id,
        sequence=partial.sequence,
        number=partial.number,
        base="",
        via=(),
        shared=0,
        new=contexts.prompt(c)[:at].copy(),
        length=at,
        sampled=sampled[:size],
        logprobs=logprobs[:size],
        parent="",
        request_hash=partial.request_hash,
        doc=c.doc | own,
    )
