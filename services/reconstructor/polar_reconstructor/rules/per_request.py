"""`per_request`: one completion, one trace. Nothing is merged."""

from __future__ import annotations

from .base import Chain, Link, View

__all__ = ["PerRequest"]


class PerRequest:
    """One chain per trained call."""

    def chains(self, view: View) -> list[Chain]:
        return [
            Chain((Link(i),), view.calls[i].chain_class, i in view.links.ambiguous)
            for i in range(len(view.calls))
            if view.trained(i)
        ]
