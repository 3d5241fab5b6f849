"""What a rule returned, held to the contract of `base`: a rule of the user's own may say anything.

What it says of calls is settled elsewhere (conservation, exactness); here are calls that exist, ids that can be ids,
and texts that are texts, so that nothing is published that nobody can read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from polar_common.errors import TraceError
from polar_reconstructor.columns import Ids

from .base import Chain, Link, View

__all__ = ["checked"]


def checked(chains: Iterable[Chain], view: View) -> list[Chain]:
    """The chains, gaps as int32. Raises TraceError naming chain, link and field."""
    bound = min((c.engine.vocab_size for c in view.calls if c.engine.vocab_size), default=1 << 31)
    found = []
    for number, chain in enumerate(chains):
        where = f"chains[{number}]"
        if not isinstance(chain, Chain):
            raise TraceError(f"{where} is {chain!r}")
        _text(chain.chain_class, f"{where}.chain_class")
        links = [_link(link, f"{where}.links[{n}]", bound, view) for n, link in enumerate(chain.links)]
        found.append(replace(chain, links=tuple(links)))
    return found


def _link(link: Link, where: str, bound: int, view: View) -> Link:
    if not isinstance(link, Link):
        raise TraceError(f"{where} is {link!r}")
    if not isinstance(link.call, int | np.integer) or not 0 <= link.call < len(view.calls):
        raise TraceError(f"{where}.call is {link.call!r} of {len(view.calls)} calls")
    _text(link.reason, f"{where}.reason")
    _text(link.drift_class, f"{where}.drift_class")
    return link if link.gap is None else replace(link, gap=_ids(link.gap, f"{where}.gap", bound))


def _text(value: object, where: str) -> None:
    if not isinstance(value, str):
        raise TraceError(f"{where} is {value!r}")


def _ids(gap: Ids, where: str, bound: int) -> Ids:
    array = np.asarray(gap)
    if not array.size:
        return np.empty(0, dtype=np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TraceError(f"{where} is no row of ids: {array.dtype}{list(array.shape)}")
    wrong = np.flatnonzero((array < 0) | (array >= bound))
    if len(wrong):
        raise TraceError(f"{where}[{int(wrong[0])}] is {int(array[wrong[0]])}, ids are below {bound}")
    return array.astype(np.int32, copy=False)
