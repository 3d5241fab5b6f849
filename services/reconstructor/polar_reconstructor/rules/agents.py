"""Whose calls are whose: a sub-agent has chains of its own, also where it begins in its parent's context.

Its role, and with it its group, is its chain's; what its parent sampled is context there.
"""

from __future__ import annotations

from polar_reconstructor.calls import Call

from .base import View

__all__ = ["agents", "is_subagent"]


def is_subagent(c: Call) -> bool:
    """Whether a call belongs to an agent that another one started."""
    return bool(c.parent_agent) or c.chain_class == "subagent"


def agents(view: View) -> list[str]:
    """By call: its agent. A call of which nothing is told is of the agent whose context it goes on with."""
    found = ["main"] * len(view.calls)
    for i in sorted(range(len(view.calls)), key=lambda i: (view.calls[i].length, i)):
        c, parent = view.calls[i], view.links.parent[i]
        if is_subagent(c):
            found[i] = f"sub {c.agent}"
        elif not c.agent and parent is not None:
            found[i] = found[parent]
    return found
