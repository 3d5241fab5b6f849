"""The contract of an inference engine: prompt ids and explicit sampling in, sampled ids and log-probs out.

An engine is one replica. It never fills in a sampling field by itself: all of them are in the request. The request id
is the completion's id. What an engine reports is passed on as it is; `validity.py` judges it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from polar_common.events import SamplingUsed, VersionSpan
from polar_render.base import Head
from polar_render.messages import Json, Message, Part
from polar_render.records import Ids

__all__ = ["Capabilities", "Chunk", "Engine", "EngineFinish", "GenerateRequest", "LogprobKind", "NativePrompt"]

EngineFinish = Literal["stop", "length"]
LogprobKind = Literal["processed", "raw", "none"]


@dataclass(frozen=True, slots=True)
class NativePrompt:
    """What an engine renders by its own template.

    `images`: data URLs by hash, for the pictures that the messages name by hash. `tool_choice` is in the chat API's own
    form; None leaves the reading of calls to us.
    """

    messages: tuple[Message, ...]
    head: Head
    prefill: bool = False
    tool_choice: Json = None
    images: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class GenerateRequest:
    """One sample of one prompt. `prompt` int32[P]; empty with `native`, where the engine's template makes the ids.

    `guide` is a structured-output constraint in the engine-independent form of `ChatRequest.response_format`.
    """

    request_id: str
    prompt: Ids
    sampling: SamplingUsed
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    guide: dict[str, Json] | None = None
    native: NativePrompt | None = None


@dataclass(slots=True)
class Chunk:
    """What one read brought: ids and log-probs sampled since the last chunk, and what was told meanwhile.

    `logprobs` has one entry per id; None where the engine gave none at all, entries None where it gave null.
    `finish`, `stop_reason`, `versions`, `cached_tokens`, `prompt_ids` are set once they are known. `kv_mixed`: part of
    the attention cache was computed under other weights. `parts`: the engine's own reading of the whole answer, where
    it gives no ids.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] | None = None
    finish: EngineFinish | None = None
    stop_reason: str | int | None = None
    versions: tuple[VersionSpan, ...] = ()
    cached_tokens: int = 0
    prompt_ids: list[int] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    kv_mixed: bool = False
    parts: tuple[Part, ...] | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a probe found. `logprobs`: their kind, `none` where the engine gives none.

    `abort`, `versions`, `weight_update`, `pause`: whether the engine can. `context_window` in tokens, 0 if unknown.
    `problems`: what the probe couldn't find out, or what keeps completions from being trained.
    """

    model: str
    engine: str
    engine_version: str = ""
    ids_in: bool = True
    ids_out: bool = True
    logprobs: LogprobKind = "processed"
    streaming: bool = True
    abort: bool = True
    versions: bool = False
    weight_update: bool = False
    pause: bool = False
    images: bool = False
    guides: bool = False
    reports_prompt: bool = False
    context_window: int = 0
    weights_version: str = ""
    weights_hash: str = ""
    dtype: str = ""
    problems: tuple[str, ...] = ()


class Engine(Protocol):
    """One replica of an inference engine."""

    name: str
    """Which adapter: `vllm`, `sglang`, `vllm_chat`."""
    replica: str
    """Names this replica in events and subjects."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """The sample as it comes. Closing the iterator aborts the generation.

        Raises EngineRefused, EngineOverflow, EngineBusy, or EngineDown (a stream that breaks off included).
        """
        ...

    async def complete(self, request: GenerateRequest) -> Chunk:
        """The whole sample at once. Cancelling the call aborts the generation. Raises as `stream`."""
        ...

    async def capabilities(self) -> Capabilities:
        """Probe. Raises EngineDown if the engine can't be reached."""
        ...

    async def healthy(self) -> bool: ...

    async def abort(self, request_id: str) -> None:
        """Make sure that a generation ends; closing its connection normally does."""
        ...

    async def update_weights(self, weights: str, version: str, *, drain: bool) -> None:
        """Load weights; `drain`: wait for running generations first. Raises EngineError."""
        ...

    async def close(self) -> None: ...
