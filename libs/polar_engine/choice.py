"""One choice of one request while it is generated: its tokens, where they came from, and when it ends. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from polar_engine.prefix import Buffer, Tokens
from polar_engine.sampling import Sampled, Sampler, SamplingParams, Scored
from polar_engine.text import TextStream

__all__ = ["Call", "Choice", "Delta", "Finish", "Span"]

B = TypeVar("B", bound=Buffer)


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `end` (exclusive) of an answer were sampled by the weights called `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Finish:
    """Why a choice ended: `stop | length | abort | error`; `stop_reason` is the stop string or stop token id."""

    reason: str
    stop_reason: str | int | None
    spans: tuple[Span, ...]
    # Part of the answer's keys and values were computed by other weights than sampled later tokens.
    kv_mixed: bool
    cached_tokens: int
    message: str = ""


@dataclass(frozen=True)
class Delta:
    """What one step added to choice `index`; `prompt_scores` comes with the first one where it was asked for."""

    index: int
    sampled: tuple[Sampled, ...]
    text: str = ""
    finish: Finish | None = None
    prompt_scores: tuple[tuple[Scored, ...], ...] | None = None


@dataclass(frozen=True)
class Call:
    """One HTTP request: `choices` samples of one prompt. `deliver` is called on the scheduler's thread."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    choices: int
    salt: str
    deliver: Callable[[Delta], None]
    # Without streaming nobody looks at partial answers, so tokens are delivered once, at the end.
    every_token: bool = False
    wants_text: bool = False


@dataclass
class Choice(Generic[B]):
    """A choice in the scheduler. Tokens below `buffer.length` have their keys and values computed."""

    call: Call
    index: int
    prompt: Tokens
    sampler: Sampler
    ends: frozenset[int]
    text: TextStream | None
    buffer: B | None = None
    cached: int = 0
    kv_mixed: bool = False
    out: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    # The prefix cache's generation and what it then held of this prompt, while the choice waits.
    held: tuple[int, int] = (-1, 0)
    prompt_scores: list[tuple[Scored, ...]] = field(default_factory=list)
    _waiting: list[Sampled] = field(default_factory=list)
    _text: str = ""

    @property
    def total(self) -> int:
        """Prompt and sampled tokens."""
        return len(self.prompt) + len(self.out)

    @property
    def pending(self) -> int:
        """Tokens whose keys and values must be computed before the next one can be sampled."""
        return self.total - (self.buffer.length if self.buffer is not None else 0)

    @property
    def prefilling(self) -> bool:
        """Whether no token has been sampled yet."""
        return not self.out

    @property
    def scores_prompt(self) -> bool:
        """Whether this choice reports the log-probs of the prompt: the first one does, where they were asked for."""
        return self.index == 0 and self.call.params.prompt_logprobs is not None

    def next_tokens(self, count: int) -> list[int]:
        """The next `count` tokens to compute."""
        done = self.buffer.length if self.buffer is not None else 0
        if done >= len(self.prompt):
            at = done - len(self.prompt)
            return self.out[at : at + count]
        tokens: list[int] = self.prompt[done : done + count].tolist()
        return tokens

    def computed(self) -> Tokens:
        """The tokens whose keys and values the buffer holds."""
        length = self.buffer.length if self.buffer is not None else 0
        return np.concatenate([self.prompt, np.asarray(self.out, dtype=np.int32)])[:length]

    def accept(self, sampled: Sampled, version: str) -> Finish | None:
        """Add a sampled token, stamped with `version`; the end where this token brought it."""
        self.out.append(sampled.token)
        self._waiting.append(sampled)
        place = len(self.out)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = Span(version, self.spans[-1].start, place)
        else:
            self.spans.append(Span(version, place - 1, place))
        params = self.call.params
        stop_string = self._decode(sampled.token, may_stop=place >= params.min_tokens)
        if place >= params.min_tokens:
            if sampled.token in params.stop_token_ids:
                return self.finish("stop", sampled.token)
            if sampled.token in self.ends and not params.ignore_eos:
                return self.finish("stop", None)
            if stop_string is not None:
                return self.finish("stop", stop_string)
        if place >= params.max_tokens:
            return self.finish("length", None)
        return None

    def _decode(self, token: int, *, may_stop: bool) -> str | None:
        if self.text is None:
            return None
        piece = self.text.push(token, may_stop=may_stop)
        self._text += piece.text
        return piece.stop

    def finish(self, reason: str, stop_reason: str | int | None = None, message: str = "") -> Finish:
        """The end of this choice as it stands."""
        if self.text is not None and not isinstance(stop_reason, str):
            self._text += self.text.flush()
        return Finish(reason, stop_reason, tuple(self.spans), self.kv_mixed, self.cached, message)

    def deliver(self, finish: Finish | None) -> None:
        """Hand on what was sampled since the last delivery; without `every_token`, at the end only."""
        if finish is None and not (self.call.every_token and self._waiting):
            return
        first = len(self._waiting) == len(self.out)
        scores = tuple(self.prompt_scores) if first and self.scores_prompt else None
        self.call.deliver(Delta(self.index, tuple(self._waiting), self._text, finish, scores))
        self._waiting.clear()
        self._text = ""
