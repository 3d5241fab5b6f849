"""A model call was answered; the token ids and log-probs are those the engine really sampled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from polar_common import subjects
from polar_common.packing import BlobRef, Column

from .base import SessionEvent

ParentBy = Literal["none", "minted", "hint", "longest", "adopted"]
ChainClass = Literal[
    "continued", "root", "subagent", "compaction", "head_changed", "edited", "thinking", "bridge_refused",
    "unknown_parent", "native",
]  # fmt: skip


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class PromptRef(_Part):
    """Prompt ids as what an earlier completion's whole context (prompt + sampled) shares, plus the new ids.

    prompt = (base.prompt + base.sampled)[:shared] + new. `base` is "" for a full snapshot. `via` stands in for `base`
    after many links: the own ids (new + sampled) of the completions it names, in that order, are the base's context.
    """

    base: str = ""
    via: tuple[str, ...] = ()
    shared: Annotated[int, Field(ge=0)] = 0
    new: Column
    length: Annotated[int, Field(ge=0)]
    """Of the resolved prompt."""


class MessagesRef(_Part):
    """The harness's messages: the first `shared` of `base`'s messages, then `new` bodies.

    A body is the JSON form of `polar_render.messages.Message`, or `{"echo": <completion>}` where the harness sent back
    that completion's own answer (canonically equal). `via` stands in for `base` after many links: the bodies of the
    completions it names, in that order.
    """

    base: str = ""
    via: tuple[str, ...] = ()
    shared: Annotated[int, Field(ge=0)] = 0
    new: tuple[dict[str, Any], ...] = ()
    blob: BlobRef | None = None
    """Holds `new` as a JSON list where it's too large to be inline."""


class HeadRef(_Part):
    """Tools, response format and template arguments; the body only in the first completion that has this hash."""

    hash: str
    body: dict[str, Any] | None = None
    blob: BlobRef | None = None
    at: str = ""
    """The completion that holds the body, where this one doesn't."""


class VersionSpan(_Part):
    """From sampled index `start` on, `version` sampled."""

    version: str
    start: Annotated[int, Field(ge=0)]


class ImageRef(_Part):
    """A picture in the prompt: part `part` of message `message` of the harness's request.

    `blob` holds the picture's bytes, its media type is theirs; None where the harness gave an address alone, which is
    then `url` (nobody here fetches it, so what the engine saw under it isn't known). `span` is where the picture stands
    in the prompt, as (start, ids), after expansion; `grid` the engine's patch grid; both None where they aren't known.
    """

    message: Annotated[int, Field(ge=0)]
    part: Annotated[int, Field(ge=0)]
    blob: BlobRef | None = None
    url: str = ""
    processor: str = ""
    """The model's image processor, and the hash of its configuration."""
    processor_hash: str = ""
    span: tuple[int, int] | None = None
    grid: tuple[int, int, int] | None = None


class SamplingUsed(_Part):
    """Every field as sent to the engine; nothing is left to an engine's default."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None


class EngineFacts(_Part):
    """Which engine sampled, with what."""

    name: str
    replica: str
    model: str
    weights_hash: str = ""
    dtype: str = ""
    logprob_kind: Literal["processed", "raw", "none"] = "processed"
    tokenizer_hash: str = ""
    template_hash: str = ""
    renderer: str = ""
    renderer_version: str = ""
    vocab_size: int = 0
    """Ids are below this; 0 where it isn't known."""
    end_of_turn: tuple[int, ...] = ()
    """Ids that end an assistant turn, from the tokenizer."""


class CompletionCaptured(SessionEvent):
    """`completion` is also the engine's request id. One event per choice."""

    kind: Literal["completion.captured"] = "completion.captured"
    completion: str
    dialect: str
    stream: bool
    model: str
    """As the harness named it."""
    request_hash: str
    """Identity for retries: stream flags, cache and billing fields and metadata don't count."""
    head: HeadRef
    messages: MessagesRef
    prompt: PromptRef
    sampled: Column
    logprobs: Column | None = None
    """float32, one per sampled id; None where the engine gave none."""
    finish: Literal["stop", "length", "stop_string", "tool_calls"]
    closed: bool
    """The sample ends with an end-of-turn id."""
    untrainable: str = ""
    """"" or the reason: no_token_ids, no_logprobs, invalid_logprobs, length_mismatch, greedy, penalties, logit_bias,
    raw_logprobs, engine_retokenised, truncated_sampling."""
    untrainable_at: int | None = None
    """The sampled index at which the reason was found, where it has one."""
    context: Literal["exact", "native"] = "exact"
    parent: str = ""
    parent_by: ParentBy = "none"
    parent_ambiguous: bool = False
    chain_class: ChainClass = "root"
    context_exact: bool | None = True
    """The engine reported just the prompt ids that were sent; None where it reports none."""
    context_faithful: bool = True
    additions: tuple[str, ...] = ()
    native_equal: bool | None = None
    choice: int = 0
    parallel_of: str = ""
    """First completion of the same request where several were sampled in parallel (n > 1)."""
    prefill_tokens: int = 0
    """Sampled-role ids at the end of the prompt that the harness prefilled."""
    sampling_asked: dict[str, Any] = {}
    sampling: SamplingUsed
    constrained: bool = False
    versions: tuple[VersionSpan, ...] = ()
    policy_seq: int = 0
    cached_tokens: int = 0
    kv_salt: str = ""
    kv_mixed: bool = False
    engine: EngineFacts
    agent: str = ""
    parent_agent: str = ""
    """Of a sub-agent: the agent that started it, `main` where that has no name."""
    agent_role: str = ""
    """Of a sub-agent: its kind, where the tool call that started it names one."""
    spawned_by: str = ""
    """A sub-agent's first call: the completion whose tool call started it, where that is known."""
    images: tuple[ImageRef, ...] = ()
    """The pictures of the whole request that the engine was shown, in the order of the prompt."""
    tool_choice: str = ""
    """What the harness demanded where that isn't `auto`: `none`, `required`, or one of them and names
    (`required:write,read`)."""
    tool_choice_by: Literal["", "tools_hidden", "engine", "dropped"] = ""
    """How it was kept: the tools weren't shown, the engine's grammar forced it (`constrained`), or not at all."""
    dropped: tuple[str, ...] = ()
    """JSON paths of what the harness sent and the engine couldn't be told."""
    billing: tuple[str, ...] = ()
    """Header lines that were taken out of system blocks before rendering."""
    delivered: tuple[str, ...] = ()
    """Earlier completions of the attempt seen delivered since the last event."""
    replay_of: str = ""
    started: float = 0.0
    """Unix seconds when the request had been read."""
    ttft_s: float = 0.0
    duration_s: float = 0.0
    usage: dict[str, int] = {}

    def subject(self) -> str:
        return subjects.completion(self.session, self.attempt, self.completion, "captured")
