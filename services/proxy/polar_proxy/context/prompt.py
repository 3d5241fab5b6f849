"""The ids a call is prompted with: the continued call's prompt + sample + a rendered tail, else a full rendering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polar_common.errors import RenderError
from polar_common.events.completion_captured import ChainClass, ParentBy
from polar_proxy.demand import NOTHING, Demand
from polar_proxy.dialects.base import ChatRequest
from polar_proxy.engines.base import NativePrompt
from polar_proxy.pictures import ImageFormat
from polar_render.base import Head, Renderer, ToolCallDone
from polar_render.messages import Message, text_of
from polar_render.records import Ids

from .agents import attributed
from .hollow import match_without_hollow
from .match import Keys, Match, chain_class, find, keys_of, nearest
from .nodes import Node, SessionIndex
from .own_ids import given_back

__all__ = ["Plan", "head_of", "plan", "plan_native"]


@dataclass(slots=True, eq=False)
class Plan:
    """What is decided before the engine is asked. `prompt` int32[P]; a guess where `native` is set.

    `base` is what the log refers to: the continued call, or a call of the same conversation, with `shared` messages.
    """

    request: ChatRequest
    head: Head
    keys: Keys
    prompt: Ids
    parent: Node | None = None
    by: ParentBy = "none"
    ambiguous: bool = False
    chain: ChainClass = "root"
    additions: tuple[str, ...] = ()
    base: Node | None = None
    shared: int = 0
    prefill_tokens: int = 0
    dropped: tuple[str, ...] = ()
    spawned_by: str = ""
    native: NativePrompt | None = None
    demand: Demand = NOTHING
    pictures: ImageFormat | None = None
    """Set where the engine is shown pictures."""


def head_of(request: ChatRequest) -> Head:
    """What must be equal for a later call to continue this one. Whether thinking is on is the template's business."""
    args = dict(request.template_args)
    enabled = (request.thinking or {}).get("enabled")
    if isinstance(enabled, bool):
        args.setdefault("enable_thinking", enabled)
    return Head(request.tools, request.response_format, args)


def _ids(ids: Sequence[int]) -> Ids:
    return np.array(ids, dtype=np.int32)


def plan(index: SessionIndex, request: ChatRequest, renderer: Renderer, head: Head, key: bytes, *, keep: bool) -> Plan:
    """`key` is the head's key; `keep`: sampled thinking stays though the harness dropped it.

    Raises RenderError where the template can't express the messages.
    """
    keys = keys_of(request.messages, key)
    match, edited = find(index, request, keys)
    if (fuller := match_without_hollow(index, request, key, match)) is not None:
        request, keys, match = fuller
    header: tuple[str, ...] = ("stripped_header",) if request.billing else ()
    if match is not None:
        request, _ = attributed(index, request, match.node, "continued")
        shown = given_back(index, match, request.messages)
        continued, refused = _continued(match, request, shown, renderer, head, keys, header, keep)
        if continued is not None:
            return continued
        chain: ChainClass = refused
    else:
        chain = chain_class(index, request, keys, edited_thinking=edited)
    request, by = attributed(index, request, match.node if match else None, chain)
    shown = given_back(index, match, request.messages)
    ids = renderer.render(shown, head, prefill=request.prefill)
    base, shared = _relative(index, keys, match, request.messages)
    tokens = len(ids) - len(renderer.render(shown[:-1], head)) if request.prefill else 0
    return Plan(
        request, head, keys, _ids(ids), chain=chain, additions=(*header, *_control(renderer, request.messages)),
        base=base, shared=shared,
        prefill_tokens=max(0, tokens), spawned_by=by,
    )  # fmt: skip


def plan_native(
    index: SessionIndex, request: ChatRequest, renderer: Renderer, head: Head, key: bytes, *, ids_in: bool
) -> Plan:
    """Each call as the model's own template renders it. The parent is recorded, nothing is carried over.

    With `ids_in` we render; otherwise the engine does, and `prompt` is only our guess of what it will be.
    Raises RenderError where the template can't express the messages (with `ids_in`).
    """
    keys = keys_of(request.messages, key)
    match, _ = find(index, request, keys)
    request, by = attributed(index, request, match.node if match else None, "native")
    base, shared = _relative(index, keys, match, request.messages)
    try:
        ids = renderer.render(given_back(index, match, request.messages), head, prefill=request.prefill)
        begun = len(ids) - len(renderer.render(request.messages[:-1], head)) if request.prefill else 0
    except RenderError:
        if ids_in:
            raise
        ids, begun = [], int(request.prefill)
    return Plan(
        request, head, keys, _ids(ids), chain="native", base=base, shared=shared, prefill_tokens=max(0, begun),
        parent=match.node if match else None, by=match.by if match else "none",
        ambiguous=match.ambiguous if match else False,
        native=None if ids_in else NativePrompt(request.messages, head, request.prefill), spawned_by=by,
    )  # fmt: skip


def _continued(
    match: Match, request: ChatRequest, messages: Sequence[Message], renderer: Renderer, head: Head, keys: Keys,
    header: tuple[str, ...], keep: bool,
) -> tuple[Plan | None, ChainClass]:  # fmt: skip
    """`messages`: the request's, as the model is to see them."""
    node, at = match.node, match.position
    dropped_thinking = _dropped_thinking(node, messages)
    if dropped_thinking and not keep:
        return None, "thinking"
    history, answer, new = messages[:at], messages[at], messages[at + 1 :]
    tail = _tail(renderer, history, answer, new, head, request.prefill)
    if tail is None:
        return None, "bridge_refused"
    context, closed = node.link.context, node.closed
    if match.calls is not None:
        end = _end_of_call(node, renderer, head, match.calls)
        if end is None:
            return None, "edited"
        context, closed = context[: node.sampled_from + end], False
    close: tuple[int, ...] = () if closed else renderer.close_ids
    if not closed and not close:
        return None, "bridge_refused"
    added = dict.fromkeys((*node.additions, *header, *_control(renderer, new)))
    if close:
        added["synthesised_close"] = None
    if match.calls is not None:
        added["adopted_partial"] = None
    if node.finish == "stop_string":
        added["kept_stop_string"] = None
    if dropped_thinking:
        added["kept_thinking"] = None
    prompt = np.concatenate((context, _ids((*close, *tail))))
    tokens = 0
    if request.prefill:
        bare = _tail(renderer, history, answer, new[:-1], head, False)
        tokens = len(tail) - len(bare) if bare is not None else 0
    return Plan(
        request, head, keys, prompt, parent=node, by=match.by, ambiguous=match.ambiguous, chain="continued",
        additions=tuple(added), base=node, shared=min(node.size, node.position), prefill_tokens=max(0, tokens),
    ), "continued"  # fmt: skip


def _control(renderer: Renderer, messages: Sequence[Message]) -> tuple[str, ...]:
    """Flags texts of users and tools that spell out special tokens: the model sees them as such."""
    for message in messages:
        if message.role in ("user", "tool") and renderer.control_tokens(text_of(message)):
            return ("control_tokens",)
    return ()


def _end_of_call(node: Node, renderer: Renderer, head: Head, count: int) -> int | None:
    """Sampled ids up to and including the `count`-th call of an answer."""
    begun = text_of(node.own[-1]) if node.position < node.size and node.own else ""
    events = renderer.parser(head, prefill=begun).feed(node.link.context[node.sampled_from :].tolist())
    return next((e.end for e in events if isinstance(e, ToolCallDone) and e.index == count - 1), None)


def _tail(
    renderer: Renderer, history: Sequence[Message], answer: Message, new: Sequence[Message], head: Head, prefill: bool
) -> list[int] | None:
    if not new:
        return None
    return renderer.tail(history, answer, new, head, prefill=prefill)


def _dropped_thinking(node: Node, messages: Sequence[Message]) -> bool:
    """Whether the context shows sampled thinking that the harness doesn't send back."""
    at: Node | None = node
    while at is not None:
        if at.answer.thinking and not any(t.text or t.signature for t in messages[at.position].thinking):
            return True
        at = at.parent
    return False


def _relative(
    index: SessionIndex, keys: Keys, match: Match | None, messages: Sequence[Message]
) -> tuple[Node | None, int]:
    """A call to which the log can refer where none is continued: one with the same messages, or some of them."""
    if match is not None:
        return match.node, min(match.node.size, match.node.position)
    last = keys.at[-1] if keys.at else keys.head
    if same := index.by_request.get(last):
        return same[0], same[0].size
    node, shared = nearest(index, messages)
    return node, min(shared, node.size) if node is not None else 0
