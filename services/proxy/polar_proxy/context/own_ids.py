"""Ids that a model gives its own tool calls (Kimi's `functions.look:0`), for templates that print them.

Harnesses get minted ids, by which their echoes are recognised; what is rendered for the model bears its own again.
Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polar_render.messages import Message, Part, ToolCall

from .match import Match
from .nodes import Node, SessionIndex

__all__ = ["given_back", "own_ids"]


def own_ids(sampled: Sequence[Part], minted: Sequence[Part]) -> tuple[tuple[str, str], ...]:
    """(minted id, the model's own) of each call that the model named. The parts are the same, before and after."""
    both = zip(sampled, minted, strict=True)
    return tuple((n.id, o.id) for o, n in both if isinstance(o, ToolCall) and isinstance(n, ToolCall) and o.id)


def given_back(index: SessionIndex, match: Match | None, messages: Sequence[Message]) -> Sequence[Message]:
    """The messages as the model is to see them. `match`: whose answers stand where, for harnesses that echo no ids."""
    if not index.own_ids:
        return messages
    names = dict(index.own_ids)
    node: Node | None = match.node if match is not None else None
    while node is not None:
        for call, (_, own) in zip(messages[node.position].tool_calls, node.own_ids, strict=False):
            if call.id:
                names[call.id] = own
        node = node.parent
    return [_renamed(m, names) for m in messages]


def _renamed(message: Message, names: dict[str, str]) -> Message:
    if message.role == "tool":
        return replace(message, call_id=names[message.call_id]) if message.call_id in names else message
    if not any(call.id in names for call in message.tool_calls):
        return message
    parts = (replace(p, id=names.get(p.id, p.id)) if isinstance(p, ToolCall) else p for p in message.parts)
    return replace(message, parts=tuple(parts))
