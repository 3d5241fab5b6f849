"""Answers whose stream broke and of which the harness went on with the finished items (EXACT §3).

The adopting call's prompt shows the broken call's prompt, then a prefix of what it had sampled, then a close. By
default that prefix is context. Where the rules say `train`, it becomes the broken call's sample with its own log-probs;
what the harness never saw stays untrained. A call that was cut off by its engine records no sampling settings: those of
the adopting call stand in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .calls import Aborted, Call
from .columns import Floats, Ids
from .contexts import Contexts

__all__ = ["adopt"]


def adopt(calls: Sequence[Call], cut: Sequence[Aborted]) -> tuple[list[Call], set[str]]:
    """Calls with adopted partials as what was adopted of them, by sequence, and the ids of cut calls among these."""
    contexts = Contexts(calls)
    captured, aborted = {c.id: c for c in calls}, {a.id: a for a in cut}
    found: dict[str, Call] = {}
    for c in calls:
        if c.parent_by != "adopted" or c.parent in found:
            continue
        if (broken := captured.get(c.parent)) is not None:
            made = _shortened(broken, c, calls, contexts)
        elif (partial := aborted.get(c.parent)) is not None:
            made = _from_cut(partial, c, contexts)
        else:
            made = None
        if made is not None:
            found[made.id] = made
    kept = [found.get(c.id, c) for c in calls]
    new = [c for name, c in found.items() if name in aborted]
    return sorted([*kept, *new], key=lambda c: c.sequence), {c.id for c in new}


def _shortened(broken: Call, c: Call, calls: Sequence[Call], contexts: Contexts) -> Call | None:
    """A captured call with only the ids that were adopted; None where somebody has more of them."""
    size = _adopted(broken.sampled, broken.logprobs, broken.length, c, contexts)
    seen = broken.length + size
    if not size or any(other.shared > seen for other in calls if broken.id in (other.base, *other.via)):
        return None
    if broken.logprobs is None or any(contexts.extends(other, broken) for other in calls):
        return None
    return replace(
        broken,
        sampled=broken.sampled[:size],
        logprobs=broken.logprobs[:size],
        doc=broken.doc
        | {
            "finish": "length",
            "closed": False,
            "additions": [*broken.doc["additions"], "adopted_partial"],
            "versions": [v for v in broken.doc["versions"] if v["start"] < size],
        },
    )


def _from_cut(partial: Aborted, c: Call, contexts: Contexts) -> Call | None:
    if partial.sampled is None or partial.logprobs is None:
        return None
    at = partial.prompt_tokens
    size = _adopted(partial.sampled, partial.logprobs, at, c, contexts)
    if not size:
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
        # Those behind it are the adopting call's own.
        "images": [i for i in c.images if i.get("span") is None or sum(i["span"]) <= at],
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
        sampled=partial.sampled[:size],
        logprobs=partial.logprobs[:size],
        parent="",
        request_hash=partial.request_hash,
        doc=c.doc | own,
    )


def _adopted(sampled: Ids, logprobs: Floats | None, at: int, c: Call, contexts: Contexts) -> int:
    """How many of the sampled ids stand at `at` in the adopting call's prompt; 0 where they can't be trained."""
    if logprobs is None or len(sampled) != len(logprobs) or not 0 < at < c.length:
        return 0
    shown = contexts.prompt(c)[at:]
    size = min(len(shown), len(sampled))
    different = np.flatnonzero(shown[:size] != sampled[:size])
    size = int(different[0]) if len(different) else size
    return size if np.isfinite(logprobs[:size]).all() else 0
