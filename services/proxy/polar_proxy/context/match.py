"""Which earlier call a request continues (EXACT §2), and, if none, what kind of new chain it begins. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polar_common.events.completion_captured import ChainClass, ParentBy
from polar_proxy.dialects.base import ChatRequest, Hints, completion_of
from polar_render.canonical import canonical_key, prefix_keys, same_thinking
from polar_render.messages import Message, Part, ToolCall, text_of

from .agents import spawner
from .nodes import Node, SessionIndex

__all__ = ["Keys", "Match", "chain_class", "find", "first_calls", "keys_of", "minted_names", "names", "nearest"]

_RECENT = 16
"""Conversations that are compared where nothing is continued."""


@dataclass(slots=True, eq=False)
class Keys:
    """Prefix keys of a request. `at[i]` stands for head + messages[: i + 1]; `calls` is what `prefix_keys` filled."""

    head: bytes
    at: tuple[bytes, ...]
    calls: dict[str, int]

    def answered(self, answer: Message, position: int) -> bytes:
        """The key of the conversation with `answer` at `position` behind the messages before it."""
        start = self.at[position - 1] if position else self.head
        return prefix_keys([answer], start, dict(self.calls))[0]


def keys_of(messages: Sequence[Message], head: bytes) -> Keys:
    calls: dict[str, int] = {}
    return Keys(head, tuple(prefix_keys(messages, head, calls)), calls)


@dataclass(slots=True, eq=False)
class Match:
    """The call that is continued: its answer is message `position` of the request.

    `calls`: the harness kept only so many of the answer's tool calls, those that had arrived when its stream broke.
    """

    node: Node
    position: int
    by: ParentBy
    ambiguous: bool = False
    calls: int | None = None


def minted_names(message: Message) -> set[str]:
    """Completions named by ids in this message that Polar minted."""
    found = {completion_of(call.id) for call in message.tool_calls}
    found |= {completion_of(t.signature) for t in message.thinking if t.signature}
    if message.item_id:
        found.add(completion_of(message.item_id))
    found.discard("")
    return found


def names(completion: str) -> Callable[[str], bool]:
    """Whether a signature was minted for this completion."""
    return lambda signature: completion_of(signature) == completion


def find(index: SessionIndex, request: ChatRequest, keys: Keys) -> tuple[Match | None, bool]:
    """The continued call, and whether thinking alone kept another from being it.

    The longest shared conversation wins; among equals a minted id, then the harness's hint, then the latest.
    """
    edited_thinking = False
    for position in range(len(request.messages) - 2, -1, -1):
        echoed = request.messages[position]
        found = index.by_key.get(keys.at[position])
        if not found:
            if echoed.tool_calls and (partial := _partial(index, echoed, keys, position)) is not None:
                return partial, False
            continue
        named = minted_names(echoed)
        candidates = [n for n in found if not named or n.completion in named]
        kept = [n for n in candidates if thinking_kept(n, request.messages)]
        edited_thinking = edited_thinking or len(kept) < len(candidates)
        if kept:
            return _choose(kept, position, named, request.hints), False
    return None, edited_thinking


def _partial(index: SessionIndex, echoed: Message, keys: Keys, position: int) -> Match | None:
    """An answer of which the harness has the first calls only: its stream broke behind them."""
    before = keys.at[position - 1] if position else keys.head
    named = minted_names(echoed)
    count = len(echoed.tool_calls)
    for node in reversed(index.by_request.get(before, ())):
        if node.completion not in named or count >= len(node.answer.tool_calls):
            continue
        if canonical_key(Message("assistant", first_calls(node.answer.parts, count))) == canonical_key(echoed):
            return Match(node, position, "adopted", calls=count)
    return None


def first_calls(parts: Sequence[Part], count: int) -> tuple[Part, ...]:
    """The parts up to and including the `count`-th tool call."""
    kept: list[Part] = []
    for part in parts:
        if isinstance(part, ToolCall) and not count:
            break
        count -= isinstance(part, ToolCall)
        kept.append(part)
        if not count:
            break
    return tuple(kept)


def thinking_kept(node: Node, messages: Sequence[Message]) -> bool:
    """Whether the thinking that the harness sends back is what it was given, in the whole conversation."""
    if not any(m.thinking for m in messages[: node.position + 1]):
        return True
    owners: dict[int, Node] = {}
    at: Node | None = node
    while at is not None:
        owners[at.position] = at
        at = at.parent
    for place, recorded in enumerate(node.conversation()):
        echoed = messages[place]
        if not echoed.thinking:
            continue
        owner = owners.get(place)
        if owner is not None:
            if not same_thinking(owner.answer, echoed, names(owner.completion)):
                return False
        elif not same_thinking(recorded, echoed):
            return False
    return True


def _choose(kept: list[Node], position: int, named: set[str], hints: Hints) -> Match:
    by: ParentBy = "minted" if named else "longest"
    if len(kept) == 1:
        return Match(kept[0], position, by)
    hinted = completion_of(hints.previous_response)
    same = [n for n in kept if n.completion == hinted] or [n for n in kept if hints.agent and n.agent == hints.agent]
    if len(same) == 1:
        return Match(same[0], position, "hint")
    latest = max(same or kept, key=lambda n: n.sequence)
    return Match(latest, position, by, ambiguous=True)


def chain_class(index: SessionIndex, request: ChatRequest, keys: Keys, *, edited_thinking: bool) -> ChainClass:
    """Why a request that continues nothing begins a new chain."""
    hints = request.hints
    if not index.nodes:
        return "root"
    if hints.request_kind == "compaction":
        return "compaction"
    if edited_thinking:
        return "thinking"
    if hints.agent and hints.agent not in index.agents and (hints.parent_agent or "spawn" in hints.request_kind):
        return "subagent"
    if spawner(index, request.messages) is not None:
        return "subagent"
    related = _related(index, request.messages)
    if related is not None:
        return related
    if hints.context_edits:
        return "edited"
    if _summarised(index, request.messages):
        return "compaction"
    if hints.agent and hints.agent not in index.agents:
        return "subagent"
    return "unknown_parent" if any(m.role == "assistant" for m in request.messages[:-1]) else "root"


def nearest(index: SessionIndex, messages: Sequence[Message]) -> tuple[Node | None, int]:
    """The recent conversation that shares most messages with these from the beginning, and how many."""
    bare = prefix_keys(messages)
    best: tuple[Node | None, int] = (None, 0)
    for node in [n for n in reversed(list(index.nodes.values())) if not n.extended][:_RECENT]:
        shared = _shared(prefix_keys(node.conversation()), bare)
        if shared > best[1]:
            best = (node, shared)
    return best


def _shared(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


def _related(index: SessionIndex, messages: Sequence[Message]) -> ChainClass | None:
    """`head_changed` where only the head differs, `edited` where our own answers reappear in a changed history."""
    node, shared = nearest(index, messages)
    if node is not None and node.position < shared < len(messages):
        return "head_changed"
    echoed = any(minted_names(m) & index.nodes.keys() for m in messages)
    leading = sum(1 for m in messages if m.role in ("system", "developer"))
    changed = shared > leading and any(m.role == "assistant" for m in messages)
    return "edited" if echoed or changed else None


def _summarised(index: SessionIndex, messages: Sequence[Message]) -> bool:
    """An earlier answer's text stands in a message that isn't the assistant's: a compacted history."""
    texts = [t for n in list(index.nodes.values())[-_RECENT:] if len(t := text_of(n.answer).strip()) >= 40]
    said = "\n".join(text_of(m) for m in messages if m.role != "assistant")
    return any(t in said for t in texts)
