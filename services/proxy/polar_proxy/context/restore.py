"""An attempt's index from the log: what another instance, or this one before a restart, had captured. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from polar_common.errors import TraceError
from polar_common.events import CompletionAborted, CompletionCaptured, CompletionUndelivered, Event
from polar_proxy.dialects.base import Minted, Usage
from polar_proxy.sample import cut_stop
from polar_render.base import Head, Renderer
from polar_render.canonical import prefix_keys, with_prefill
from polar_render.demand import demanded_calls
from polar_render.messages import Message, Part, ToolCall, text_of
from polar_render.records import Echo, Ids, Link, ResolvedCompletion

from .hollow import is_hollow
from .nodes import Node, SessionIndex
from .own_ids import own_ids

__all__ = ["answer_of", "apply", "mint"]


def mint(parts: Sequence[Part], minted: Minted) -> tuple[Part, ...]:
    """The parts with our ids on their tool calls."""
    if not any(isinstance(p, ToolCall) for p in parts):
        return tuple(parts)
    out: list[Part] = []
    calls = 0
    for part in parts:
        if isinstance(part, ToolCall):
            part = replace(part, id=minted.tool_id(calls))
            calls += 1
        out.append(part)
    return tuple(out)


def answer_of(messages: Sequence[Message], parts: tuple[Part, ...], *, prefill: bool) -> tuple[Message, int]:
    """The whole assistant turn, and its index in a conversation that goes on."""
    said = Message("assistant", parts)
    if prefill:
        return with_prefill(messages[-1], said), len(messages) - 1
    return said, len(messages)


def apply(
    index: SessionIndex, events: Iterable[tuple[int, Event]], blobs: Mapping[str, bytes], renderer: Renderer
) -> None:
    """Add completion events that the log has and `index` hasn't; they may refer to what it has.

    Raises TraceError or BlobError where the log is damaged.
    """
    calls: dict[str, dict[str, int]] = {}
    for sequence, event in sorted(events, key=lambda e: e[0]):
        if isinstance(event, CompletionCaptured):
            _captured(index, ResolvedCompletion(event, blobs), sequence, renderer, calls)
        else:
            _ended(index, event)
        index.synced = max(index.synced, sequence)


def _captured(
    index: SessionIndex, item: ResolvedCompletion, sequence: int, renderer: Renderer, calls: dict[str, dict[str, int]]
) -> None:
    event = item.event
    for name in event.delivered:
        if (earlier := index.nodes.get(name)) is not None:
            earlier.delivery = "delivered"
    if event.completion in index.nodes:
        return
    node = _node(index, item, sequence, renderer, calls)
    node.delivery = "unknown"
    index.add(node)
    index.pictures.update((ref.blob.sha256, ref.blob) for ref in event.images if ref.blob is not None)
    index.calls += 1
    index.tokens += len(item.sampled)


def _earlier(index: SessionIndex, event: CompletionCaptured, name: str) -> Node:
    node = index.nodes.get(name)
    if node is None:
        raise TraceError(f"{event.completion} refers to {name}, which is no earlier completion of its attempt")
    return node


def _context(index: SessionIndex, item: ResolvedCompletion) -> Ids:
    """Prompt + sampled ids."""
    ref = item.event.prompt
    name = ref.via[-1] if ref.via else ref.base
    before = _earlier(index, item.event, name).link.context[: ref.shared] if name else item.new[:0]
    if len(before) + len(item.new) != ref.length:
        raise TraceError(f"{item.completion}: {len(before)} + {len(item.new)} ids, and its prompt says {ref.length}")
    return np.concatenate((before, item.new, item.sampled))


def _head(index: SessionIndex, item: ResolvedCompletion) -> Head:
    key = bytes.fromhex(item.event.head.hash)
    if (known := index.bodies.get(key)) is not None:
        return known
    if item.event.head.at:
        raise TraceError(f"{item.completion}: the head it refers to isn't known")
    return index.bodies.setdefault(key, item.head)


def _ended(index: SessionIndex, event: Event) -> None:
    if isinstance(event, CompletionUndelivered):
        node = index.nodes.get(event.completion)
        if node is not None and node.delivery == "unknown":
            node.delivery = "undelivered"
    elif isinstance(event, CompletionAborted) and event.completion not in index.ended:
        index.ended.add(event.completion)
        index.aborted[event.request_hash] += 1
        index.calls += 1


def _expanded(index: SessionIndex, messages: Iterable[Message | Echo]) -> tuple[Message, ...]:
    return tuple(index.nodes[m.completion].answer if isinstance(m, Echo) else m for m in messages)


def _node(
    index: SessionIndex, item: ResolvedCompletion, sequence: int, renderer: Renderer, calls: dict[str, dict[str, int]]
) -> Node:
    event = item.event
    head = bytes.fromhex(event.head.hash)
    named = event.messages.base or (event.messages.via[-1] if event.messages.via else "")
    base = _earlier(index, event, named) if named else None
    shared = event.messages.shared if base is not None else 0
    own = _expanded(index, item.own_messages)
    known = calls.get(named)
    if base is not None and shared == base.size and base.head == head and known is not None:
        start, counted, fresh = base.request_key, dict(known), own
    else:
        whole = (*base.messages()[:shared], *own) if base is not None else own
        start, counted, fresh = head, {}, whole
    keys = prefix_keys(fresh, start, counted)
    request_key = keys[-1] if keys else start
    calls[event.completion] = counted
    prefill = bool(own) and own[-1].role == "assistant" and (event.prefill_tokens > 0 or _begun_empty(event, own[-1]))
    before = (keys[-2] if len(keys) > 1 else start) if prefill else request_key
    begun = text_of(own[-1]) if prefill else ""
    found = renderer.parse(item.sampled.tolist(), _head(index, item), prefill=begun)
    parts, stop = found.parts, None
    if event.finish == "stop_string":
        parts, stop = cut_stop(parts, event.sampling.stop)
    if event.tool_choice_by == "engine":
        parts = demanded_calls(parts, _head(index, item).tools)
    minted = Minted(event.completion, int(event.started))
    sampled, parts = parts, mint(parts, minted)
    size = shared + len(own)
    if prefill:
        answer, position = with_prefill(own[-1], Message("assistant", parts)), size - 1
    else:
        answer, position = Message("assistant", parts), size
    parent = index.nodes.get(event.parent)
    usage = event.usage
    return Node(
        completion=event.completion,
        sequence=sequence,
        head=head,
        key=prefix_keys([answer], before, dict(counted))[0],
        request_key=request_key,
        base=base,
        shared=shared,
        own=own,
        position=position,
        answer=answer,
        parts=parts,
        finish=event.finish,
        closed=event.closed,
        link=_link(index, item),
        request_hash=event.request_hash,
        created=minted.created,
        usage=Usage(
            usage.get("prompt_tokens", event.prompt.length),
            usage.get("completion_tokens", len(item.sampled)),
            usage.get("cached_tokens", 0),
            usage.get("reasoning_tokens", 0),
        ),
        sampled_from=event.prompt.length,
        stop_sequence=stop,
        agent=event.agent,
        parent_agent=event.parent_agent,
        agent_role=event.agent_role,
        own_ids=own_ids(sampled, parts),
        parent=parent,
        additions=event.additions,
        choice=event.choice,
        parallel_of=event.parallel_of,
    )


def _begun_empty(event: CompletionCaptured, last: Message) -> bool:
    """Whether the answer was begun with nothing, which left no ids in the prompt. Responses begin no answers."""
    return event.dialect != "openai_responses" and is_hollow(last)


def _link(index: SessionIndex, item: ResolvedCompletion) -> Link:
    """As `records.refer` had made it when the completion was written."""
    event, name = item.event, item.event.completion
    context = _context(index, item)
    chain: tuple[str, ...] | None = (name,)
    links, reads = 0, len(context)
    if event.prompt.via:
        chain = (*event.prompt.via, name)
    elif event.prompt.base:
        base = index.nodes[event.prompt.base].link
        whole = base.chain is not None and event.prompt.shared == len(base.context)
        chain = (*base.chain, name) if whole and base.chain is not None else None
        links, reads = base.links + 1, base.reads + len(context) - event.prompt.shared
    said: tuple[str, ...] | None = (name,)
    message_links = 0
    if event.messages.via:
        said = (*event.messages.via, name)
    elif event.messages.base:
        before = index.nodes[event.messages.base].link
        whole = before.message_chain is not None and event.messages.shared == before.messages
        said = (*before.message_chain, name) if whole and before.message_chain is not None else None
        message_links = before.message_links + 1
    count = event.messages.shared + len(item.own_messages)
    return Link(name, context, count, chain, links, reads, said, message_links)
