"""The contract of a provider dialect: bytes in, a `ChatRequest` out; answer events in, bytes out. No I/O.

A dialect never drops what the harness sent: what it can't express stays in `ChatRequest.dropped` as a JSON path, and
that list is recorded with the completion. Everything on which a client may act is marked `actionable`; the proxy holds
such frames, and all that follow, until the completion event is acknowledged by the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from polar_common.errors import PolarError
from polar_render.base import (
    AnswerEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStarted,
)
from polar_render.messages import Json, Message, Part, Text, Thinking, ToolCall, ToolSpec

__all__ = [
    "ChatRequest", "Dialect", "Encoder", "Finish", "Frame", "Hints", "Minted", "Reply", "Route", "Sampling", "Usage",
    "completion_of", "events_of",
]  # fmt: skip

Finish = Literal["stop", "length", "stop_string", "tool_calls"]
Kind = Literal["generate", "count_tokens", "list_models", "get_model", "hello", "upgrade", "unknown"]


@dataclass(frozen=True, slots=True)
class Route:
    """What a request line asks for. `dialect` names the provider shape in which errors are answered."""

    dialect: str
    kind: Kind
    model: str = ""
    stream: bool = False
    sse: bool = True


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the harness asked for; None where it was silent."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int = 1
    logprobs: bool = False
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Hints:
    """What a harness reveals about who calls: agent ids, parents, retries, context edits. All may be empty.

    `previous_response` is the id as sent (`completion_of` names the completion, if it is ours). `request_kind` is the
    harness's own word (`turn`, `compaction`, `collab_spawn`, …). `context_edits` are compact JSON objects
    (`{"type":"clear_tool_uses_…",…}`) of edits that remove something.
    """

    agent: str = ""
    parent_agent: str = ""
    agent_role: str = ""
    retry: int = 0
    previous_response: str = ""
    request_kind: str = ""
    context_edits: tuple[str, ...] = ()
    errors_in_stream: bool = False
    """This client gives up on a 429 and on an overflow told by status, and handles both inside a stream."""
    keeps_broken_calls: bool = False
    """A tool call whose stream broke off stays in this client's history: it is to be told of whole ones alone."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One generation request, independent of the provider. `messages` keep their order and place, system included.

    `sse`: a streamed answer is server-sent events; if not (Google without `alt=sse`), it is one JSON array.
    `prefill`: the last message is an assistant turn to be continued. `billing` holds header lines that were stripped
    from system blocks (EXACT: recorded, never rendered). `raw_hash` identifies the request for retries: stream flags,
    cache and billing fields and metadata don't count.

    `tool_choice`: `auto`, `none`, `required`, `{"name": …, "namespace"?: …}` for one tool, or
    `{"mode": "auto" | "required", "allowed": [names]}`. `response_format`: None,
    `{"type": "json_object"}` or `{"type": "json_schema", "json_schema": {"name", "schema", "strict"?}}`. `thinking`:
    None where the harness was silent, else any of `{"enabled": bool, "budget": tokens, "effort": word, "show": bool}`.
    """

    dialect: str
    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: str | dict[str, Json] = "auto"
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Json] | None = None
    sampling: Sampling = Sampling()
    stream: bool = False
    sse: bool = True
    include_usage: bool = True
    thinking: dict[str, Json] | None = None
    template_args: dict[str, Json] = field(default_factory=dict)
    hints: Hints = Hints()
    prefill: bool = False
    billing: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    raw_hash: str = ""
    store: bool = True


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Minted:
    """Ids for one answer, derived from the completion id, so that a recorded answer is re-encoded byte for byte.

    `tool_id(i)`, `item_id(i)`, `signature(i)` name their completion and can be recognised when echoed.
    """

    completion: str
    created: int

    def message_id(self) -> str:
        return self.completion

    def tool_id(self, index: int) -> str:
        return f"call_{self.completion}_{index}"

    def item_id(self, index: int) -> str:
        return f"item_{self.completion}_{index}"

    def signature(self, index: int) -> str:
        return f"polar.{self.completion}.{index}"


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer (one per choice of n). `parts` carry tool-call ids already minted."""

    parts: tuple[Part, ...]
    finish: Finish
    usage: Usage
    minted: Minted
    stop_sequence: str | None = None
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    token_texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Frame:
    """Bytes for the client. `actionable`: not before the completion is in the log."""

    data: bytes
    actionable: bool = False


def completion_of(identifier: str) -> str:
    """The completion that an echoed id names, or "" if the id isn't one of ours.

    Understands what `Minted` makes and the prefixes under which dialects send `message_id()`.
    """
    if identifier.startswith("polar."):
        return identifier[6:].rpartition(".")[0]
    for prefix in ("call_", "item_"):
        if identifier.startswith(prefix):
            completion, _, index = identifier[len(prefix) :].rpartition("_")
            return completion if index.isdigit() else ""
    for prefix in ("chatcmpl-", "msg_", "resp_"):
        if identifier.startswith(prefix):
            return identifier[len(prefix) :]
    return ""


def events_of(parts: Sequence[Part]) -> list[AnswerEvent]:
    """The events of a recorded answer, for encoding it again as a stream."""
    events: list[AnswerEvent] = []
    calls = 0
    for part in parts:
        if isinstance(part, Text):
            events.append(TextDelta(part.text))
        elif isinstance(part, Thinking):
            events.append(ThinkingDelta(part.text))
        elif isinstance(part, ToolCall):
            events.append(ToolCallStarted(calls, part.name, part.namespace, part.custom))
            events.append(ToolCallDelta(calls, part.arguments))
            events.append(ToolCallDone(calls, 0))
            calls += 1
    return events


class Encoder(Protocol):
    """Writes one streamed answer. Deterministic: the same events give the same bytes.

    One encoder serves all choices of `n`; `choice` says which one an event belongs to.
    """

    def start(self, usage: Usage) -> list[Frame]:
        """Opening frames; `usage` holds the prompt's tokens."""
        ...

    def feed(self, event: AnswerEvent, choice: int = 0) -> list[Frame]: ...

    def finish(self, reply: Reply, choice: int = 0) -> list[Frame]:
        """Closing frames of a choice: open blocks, finish reason."""
        ...

    def end(self, usage: Usage) -> list[Frame]:
        """Usage and terminator after the last choice."""
        ...

    def fail(self, error: PolarError) -> list[Frame]:
        """An error in the middle of a stream, in this protocol's form; the completion isn't trained."""
        ...

    def keepalive(self) -> bytes:
        """A frame the protocol's clients ignore, or b"" where they tolerate none."""
        ...


class Dialect(Protocol):
    """One provider's API."""

    name: str

    def route(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route | None:
        """What this request line means, or None if it isn't this provider's. `path` has no session prefix.

        Header names are lower case.
        """
        ...

    def parse(self, route: Route, headers: Mapping[str, str], body: bytes) -> ChatRequest:
        """Raises RequestError with the offending path."""
        ...

    def encode(self, replies: Sequence[Reply], request: ChatRequest) -> bytes:
        """The unstreamed answer."""
        ...

    def encoder(self, request: ChatRequest, minted: Sequence[Minted]) -> Encoder: ...

    def count(self, tokens: int) -> bytes:
        """The answer of a token count."""
        ...

    def models(self, ids: Sequence[str], context_window: int, route: Route) -> bytes:
        """The model listing, or one model where `route.model` is set. Raises RequestError 404 if it isn't there."""
        ...

    def error(self, error: PolarError) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (Retry-After, content type) and body in this provider's error shape."""
        ...
