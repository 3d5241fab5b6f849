"""How completions refer to earlier ones on the log, both ways: what the proxy writes and every reader resolves.

A captured completion stores its prompt as *(base, shared, new ids)* and its messages as *(base, shared, new bodies)*,
so that a session grows linearly (LOG §8). Bases are acknowledged completions of the same attempt with a lower
sequence. After `MAX_LINKS` links a completion names the whole chain at once (`via`), so that nobody follows more than
`MAX_LINKS` references; where a base holds far more than is shared, the prompt is written out in full.
Readers call `resolve_session`; the writing half is in `references.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import orjson

from polar_common.errors import BlobError, PolarError, TraceError
from polar_common.events import CompletionCaptured
from polar_common.packing import BlobRef, Column, unpack, unzip

from .base import Head
from .messages import Message, from_json, tool_from_json
from .references import MAX_LINKS, Blob, Echo, Ids, Link, Written, column, common_prefix, head_ref, refer

__all__ = [
    "MAX_LINKS", "Blob", "Echo", "Ids", "Link", "ResolvedCompletion", "Written", "blobs_needed", "column",
    "common_prefix", "head_ref", "refer", "resolve_session",
]  # fmt: skip


def blobs_needed(captured: Iterable[CompletionCaptured]) -> list[BlobRef]:
    """The blobs that `resolve_session` wants, each once."""
    found: dict[str, BlobRef] = {}
    for event in captured:
        columns = (event.prompt.new, event.sampled, event.logprobs)
        refs = [c.blob for c in columns if c is not None]
        for ref in (*refs, event.messages.blob, event.head.blob):
            if ref is not None:
                found.setdefault(ref.sha256, ref)
    return list(found.values())


class _Growing:
    """Ids that several prompts share: a continuation appends in place, so that a chain is stored once."""

    __slots__ = ("ids", "used")

    def __init__(self, capacity: int) -> None:
        self.ids: Ids = np.empty(capacity, dtype=np.int32)
        self.used = 0

    def append(self, more: Ids) -> None:
        need = self.used + len(more)
        if need > len(self.ids):
            grown = np.empty(max(need, 2 * len(self.ids)), dtype=np.int32)
            grown[: self.used] = self.ids[: self.used]
            self.ids = grown
        self.ids[self.used : need] = more
        self.used = need


class ResolvedCompletion:
    """A completion with everything it refers to. Arrays are read-only views; lengths have been checked.

    `prompt` int32[P], `sampled` int32[S], `logprobs` float32[S] or None. `base`, `shared`, `new`: the prompt is
    the first `shared` ids of the base's context (prompt + sampled), then `new`; `base` is None for a snapshot.
    """

    def __init__(self, event: CompletionCaptured, blobs: Mapping[str, bytes]) -> None:
        self.event = event
        self.base: ResolvedCompletion | None = None
        self.shared = 0
        self.new = cast(Ids, _numbers(event, event.prompt.new, "i32", blobs))
        self.sampled = cast(Ids, _numbers(event, event.sampled, "i32", blobs))
        self.logprobs = cast(
            "npt.NDArray[np.float32] | None",
            None if event.logprobs is None else _numbers(event, event.logprobs, "f32", blobs),
        )
        self._blobs = blobs
        self._grown: _Growing | None = None
        self._message_base: ResolvedCompletion | None = None
        self._via: tuple[ResolvedCompletion, ...] = ()
        self._head_at: ResolvedCompletion = self

    @property
    def completion(self) -> str:
        return self.event.completion

    @property
    def context_length(self) -> int:
        """Ids in prompt + sampled."""
        return self.event.prompt.length + len(self.sampled)

    @property
    def prompt(self) -> Ids:
        return self._buffer.ids[: self.event.prompt.length]

    @property
    def context(self) -> Ids:
        """prompt + sampled"""
        return self._buffer.ids[: self.context_length]

    @cached_property
    def messages(self) -> tuple[Message | Echo, ...]:
        """The harness's messages as it sent them. Raises TraceError or BlobError where a body is missing or damaged."""
        ref = self.event.messages
        if self._via:
            before = tuple(m for c in self._via for m in c.own_messages)[: ref.shared]
        elif self._message_base is not None:
            before = self._message_base.messages[: ref.shared]
        else:
            before = ()
        if len(before) != ref.shared:
            raise TraceError(f"{self.completion}: its base has fewer than {ref.shared} messages")
        return before + self.own_messages

    @cached_property
    def own_messages(self) -> tuple[Message | Echo, ...]:
        """The messages that this completion introduces."""
        ref = self.event.messages
        bodies: Sequence[dict[str, Any]] = ref.new
        if ref.blob is not None:
            bodies = _json(self._body(ref.blob), self.completion)
        try:
            return tuple(Echo(str(b["echo"])) if "echo" in b else from_json(b) for b in bodies)
        except (TypeError, ValueError) as error:
            raise TraceError(f"{self.completion}: a damaged message: {error}") from error

    @cached_property
    def head(self) -> Head:
        """Tools, response format, template arguments. Raises TraceError or BlobError like `messages`."""
        if self._head_at is not self:
            return self._head_at.head
        ref = self.event.head
        body = ref.body if ref.blob is None else _json(self._body(ref.blob), self.completion)
        if not isinstance(body, dict):
            raise TraceError(f"{self.completion}: its head has no body")
        try:
            tools = tuple(tool_from_json(t) for t in body.get("tools") or ())
        except TypeError as error:
            raise TraceError(f"{self.completion}: a damaged tool: {error}") from error
        return Head(tools, body.get("response_format"), body.get("template_args") or {})

    def _body(self, ref: BlobRef) -> bytes:
        try:
            return self._blobs[ref.sha256]
        except KeyError:
            raise BlobError(f"{self.completion}: blob {ref.sha256} is missing") from None

    @cached_property
    def _buffer(self) -> _Growing:
        """Resolved without recursion: a chain may be long where links were imported."""
        chain: list[ResolvedCompletion] = []
        node: ResolvedCompletion | None = self
        while node is not None and node._grown is None:
            chain.append(node)
            node = node.base
        for item in reversed(chain):
            item._grown = item._grow()
        assert self._grown is not None
        return self._grown

    def _grow(self) -> _Growing:
        base = self.base
        if base is not None and base._grown is not None and base._grown.used == self.shared == base.context_length:
            buffer = base._grown
        else:
            buffer = _Growing(max(64, 2 * self.context_length))
            if base is not None and base._grown is not None:
                buffer.append(base._grown.ids[: self.shared])
        buffer.append(self.new)
        buffer.append(self.sampled)
        return buffer


def resolve_session(
    captured: Sequence[CompletionCaptured], blobs: Mapping[str, bytes]
) -> dict[str, ResolvedCompletion]:
    """All completions of one session, by id, in the order given, which must be the log's.

    `blobs`: bodies by hash, at least those of `blobs_needed`. Prompts are resolved when asked for; a chain of
    continuations shares one buffer. Raises TraceError (BlobError for a damaged body) naming the completion that refers
    to nothing earlier, or whose lengths disagree.
    """
    found: dict[str, ResolvedCompletion] = {}
    for event in captured:
        if event.completion in found:
            raise TraceError(f"{event.completion} was captured twice")
        item = ResolvedCompletion(event, blobs)
        _refer(item, found)
        found[event.completion] = item
    return found


def _refer(item: ResolvedCompletion, found: Mapping[str, ResolvedCompletion]) -> None:
    event = item.event

    def earlier(name: str) -> ResolvedCompletion:
        other = found.get(name)
        if other is None or other.event.attempt != event.attempt or other.event.session != event.session:
            raise TraceError(f"{event.completion} refers to {name}, which is no earlier completion of its attempt")
        return other

    prompt = event.prompt
    if prompt.via:
        last = [earlier(name) for name in prompt.via][-1]
        item.base, item.shared = last, prompt.shared
    elif prompt.base:
        item.base, item.shared = earlier(prompt.base), prompt.shared
    elif prompt.shared:
        raise TraceError(f"{event.completion}: a prompt that shares {prompt.shared} ids with nothing")
    if item.base is not None and item.shared > item.base.context_length:
        raise TraceError(f"{event.completion}: {item.base.completion} has fewer than {item.shared} ids")
    if item.shared + len(item.new) != prompt.length:
        raise TraceError(
            f"{event.completion}: the prompt has {item.shared} + {len(item.new)} ids and says {prompt.length}"
        )
    if item.logprobs is not None and len(item.logprobs) != len(item.sampled) and not event.untrainable:
        raise TraceError(f"{event.completion}: {len(item.sampled)} ids, {len(item.logprobs)} log-probs")
    if event.messages.via:
        item._via = tuple(earlier(name) for name in event.messages.via)
    elif event.messages.base:
        item._message_base = earlier(event.messages.base)
    if event.head.at:
        item._head_at = earlier(event.head.at)


def _numbers(
    event: CompletionCaptured, column: Column, kind: str, blobs: Mapping[str, bytes]
) -> npt.NDArray[np.generic]:
    if column.type != kind:
        raise TraceError(f"{event.completion}: a column of {column.type} where {kind} belongs")
    body = None
    if column.blob is not None:
        body = blobs.get(column.blob.sha256)
        if body is None:
            raise BlobError(f"{event.completion}: blob {column.blob.sha256} is missing")
    try:
        return unpack(column, body)
    except PolarError as error:
        raise BlobError(f"{event.completion}: {error}") from error


def _json(body: bytes, completion: str) -> Any:
    try:
        return orjson.loads(unzip(body, 256 << 20))
    except orjson.JSONDecodeError as error:
        raise BlobError(f"{completion}: a blob isn't JSON: {error}") from error
