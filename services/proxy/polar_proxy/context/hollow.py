"""Assistant turns that say nothing: some harnesses keep one for an answer that broke off before it said anything.

The policy sampled no such turn, so a context that shows it would continue nothing. Pure functions.
"""

from __future__ import annotations

from dataclasses import replace

from polar_proxy.dialects.base import ChatRequest
from polar_render.messages import Message, Text, Thinking

from .match import Keys, Match, find, keys_of
from .nodes import SessionIndex

__all__ = ["is_hollow", "match_without_hollow"]


def is_hollow(message: Message) -> bool:
    """An assistant turn without text and calls; thoughts that led to nothing may be there."""
    if message.role != "assistant":
        return False
    return all(isinstance(p, Thinking) or (isinstance(p, Text) and not p.text.strip()) for p in message.parts)


def match_without_hollow(
    index: SessionIndex, request: ChatRequest, head: bytes, match: Match | None
) -> tuple[ChatRequest, Keys, Match] | None:
    """What the request continues once its hollow turns are left out, which `dropped` then names.

    An empty turn that was really sampled stays. None where that leaves out nothing, or no more is continued than by
    `match`, the request as it is.
    """
    places = [i for i, m in enumerate(request.messages[:-1]) if is_hollow(m)]
    messages, keys, dropped = list(request.messages), keys_of(request.messages, head) if places else None, list[str]()
    for place in places:
        at = place - len(dropped)
        if keys is not None and not index.by_key.get(keys.at[at]):
            del messages[at]
            dropped.append(f"messages[{place}]")
            keys = keys_of(messages, head)
    if keys is None or not dropped:
        return None
    told = replace(request, messages=tuple(messages), dropped=(*request.dropped, *dropped))
    found, _ = find(index, told, keys)
    if found is None:
        return None
    new = len(messages) - found.position
    return None if match is not None and new >= len(request.messages) - match.position else (told, keys, found)
