"""The contract between the proxy and a model's text format.

A `Renderer` turns messages into the ids a model is prompted with, and sampled ids back into an answer. It is made by
`polar_render.load_renderer` from a `ModelProfile`; the start-up proof (`prove`) says which features hold for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from .messages import Json, Message, Part, ToolSpec

__all__ = [
    "Answer", "AnswerEvent", "Check", "Finished", "Head", "Proof", "Provenance", "Renderer", "StreamParser",
    "TextDelta", "ThinkingDelta", "ToolCallDelta", "ToolCallDone", "ToolCallStarted",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Head:
    """What stands before the messages of a call and must be equal for a later call to continue it."""

    tools: tuple[ToolSpec, ...] = ()
    response_format: dict[str, Json] | None = None
    template_args: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Names and hashes (sha256 hex) of everything that decides how text becomes ids. Ids are below `vocab_size`."""

    model: str
    tokenizer_hash: str
    template_hash: str
    renderer: str
    renderer_version: str
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the start-up proof: a feature (`user`, `tool`, `2 x tool`, `mid system`, …), and why it fails."""

    feature: str
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Proof:
    """The start-up proof. `exact` says whether continued calls can be built at all (plain user and tool turns)."""

    checks: tuple[Check, ...]
    exact: bool
    history: Literal["short", "full"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A tool call's name is known. `index` counts the calls of this answer from 0."""

    index: int
    name: str
    namespace: str = ""
    custom: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More bytes of the arguments, as sampled."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDone:
    """The call is complete; `end` is the number of sampled ids up to and including it."""

    index: int
    end: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The turn is over for the parser: no more events follow."""


AnswerEvent = TextDelta | ThinkingDelta | ToolCallStarted | ToolCallDelta | ToolCallDone | Finished


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed sample. Tool-call ids are empty: the proxy mints them.

    `closed` says whether the sample ends with an end-of-turn id; if not, a continued context needs `close_ids`.
    """

    parts: tuple[Part, ...]
    closed: bool
    malformed: tuple[str, ...] = ()


class StreamParser(Protocol):
    """Sampled ids in, answer events out; any split of the ids gives the same concatenation of deltas."""

    def feed(self, ids: Sequence[int]) -> list[AnswerEvent]:
        """Events for more sampled ids. Incomplete characters and possible tag beginnings are held back."""
        ...

    def finish(self) -> list[AnswerEvent]:
        """What was held back, and `Finished`."""
        ...

    def answer(self) -> Answer:
        """The whole answer so far; equal to `Renderer.parse` of all ids fed."""
        ...


class Renderer(Protocol):
    """One model's text format. Thread-safe; all methods are pure CPU work."""

    @property
    def provenance(self) -> Provenance: ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """End-of-turn ids, to be sent to the engine as `stop_token_ids`; from the tokenizer, never guessed."""
        ...

    @property
    def close_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn which the sample itself didn't end (length, stop string)."""
        ...

    def render(self, messages: Sequence[Message], head: Head, *, prefill: bool = False) -> list[int]:
        """Full prompt ids, generation prompt included. `prefill`: the last message is an unfinished assistant turn.

        Raises RenderError naming the message that the template can't express.
        """
        ...

    def tail(
        self, history: Sequence[Message], answer: Message, new: Sequence[Message], head: Head, *, prefill: bool = False
    ) -> list[int] | None:
        """Ids that follow an ended assistant turn `answer` after `history`: the new messages and the generation prompt.

        To be appended to prompt + sampled ids (+ `close_ids` where the sample isn't closed). None: this model can't
        continue this shape exactly; render in full and start a new chain (`bridge_refused`). `prefill`: the last new
        message is an unfinished assistant turn.
        """
        ...

    def parse(self, ids: Sequence[int], head: Head, *, prefill: str = "") -> Answer: ...

    def parser(self, head: Head, *, prefill: str = "") -> StreamParser:
        """A parser of one sample. `prefill`: the text of the unfinished turn that the sample goes on with."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens shown."""
        ...

    def decode_tokens(self, ids: Sequence[int]) -> list[str]:
        """One text per id; joined they are `decode(ids)`. A shared character shows at the id that completes it."""
        ...

    def control_tokens(self, text: str) -> list[str]:
        """Special tokens spelled out in a text: rendered, they would be control tokens. To flag tool output."""
        ...

    def prove(self) -> Proof: ...
