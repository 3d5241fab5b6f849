"""The JSON that clients get, in the shape of vLLM's token endpoint. Pure: values in, JSON-ready dictionaries out.

Two fields are ours: `kv_mixed` in a choice, and `prompt_token_ids` in a stream's first chunk where they were asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from polar_engine.choice import Delta, Finish
from polar_engine.requests import GenerateRequest
from polar_engine.sampling import Sampled, Scored

__all__ = ["Answer", "Tokenizer", "chunk", "error_body", "usage_chunk"]

_KINDS = {400: "BadRequestError", 404: "NotFoundError", 413: "BadRequestError", 429: "TooManyRequestsError"}


class Tokenizer(Protocol):
    """What answers need of a tokenizer: one token's text."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""


def error_body(message: str, status: int, param: str | None = None, kind: str = "") -> dict[str, Any]:
    """An error as vLLM words it: `{"error": {message, type, param, code}}`."""
    named = kind if kind.endswith("Error") else _KINDS.get(status, "InternalServerError")
    return {"error": {"message": message, "type": named, "param": param or None, "code": status}}


@dataclass
class _Choice:
    sampled: list[Sampled] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None


class Answer:
    """Collects the deltas of one request, and is the unstreamed answer when all choices have ended."""

    def __init__(
        self, request: GenerateRequest, model: str, created: int, tokenizer: Tokenizer, logprobs: bool
    ) -> None:
        self.request = request
        self.model = model
        self.created = created
        self.tokenizer = tokenizer
        self.logprobs = logprobs and request.params.logprobs is not None
        self._choices = [_Choice() for _ in range(request.n)]
        self._prompt_scores: Sequence[Sequence[Scored]] | None = None

    def add(self, delta: Delta) -> None:
        """Take in what one step brought."""
        choice = self._choices[delta.index]
        choice.sampled.extend(delta.sampled)
        choice.text += delta.text
        choice.finish = delta.finish or choice.finish
        if delta.prompt_scores is not None:
            self._prompt_scores = delta.prompt_scores

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return all(c.finish is not None for c in self._choices)

    @property
    def failed(self) -> str | None:
        """Why the engine couldn't generate, or None."""
        return next((c.finish.message for c in self._choices if c.finish and c.finish.reason == "error"), None)

    def usage(self) -> dict[str, Any]:
        """Token counts over all choices."""
        prompt = len(self.request.prompt)
        sampled = sum(len(c.sampled) for c in self._choices)
        first = self._choices[0].finish
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + sampled,
            "completion_tokens": sampled,
            "prompt_tokens_details": {"cached_tokens": first.cached_tokens if first else 0},
            "completion_tokens_details": None,
        }

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        request = self.request
        return {
            "request_id": request.request_id,
            "model": self.model,
            "created": self.created,
            "usage": self.usage(),
            "prompt_logprobs": self._prompt_logprobs(),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": list(request.prompt) if request.return_token_ids else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "text" if request.as_text else "tokens",
            "choices": [_choice(self, index, c.sampled, c.text, c.finish) for index, c in enumerate(self._choices)],
        }

    def _prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        if self._prompt_scores is None:
            return None
        rows: list[dict[str, Any] | None] = [None]
        for scores in self._prompt_scores:
            rows.append(
                {
                    str(s.token): {
                        "logprob": s.logprob,
                        "rank": s.rank,
                        "decoded_token": _text(self.tokenizer, s.token),
                    }
                    for s in scores
                }
            )
        return rows


def chunk(answer: Answer, delta: Delta, first: bool) -> dict[str, Any]:
    """One server-sent event of a streamed answer."""
    request = answer.request
    body: dict[str, Any] = {
        "request_id": request.request_id,
        "usage": None,
        "output_mode": "text" if request.as_text else "tokens",
        "choices": [_choice(answer, delta.index, delta.sampled, delta.text, delta.finish)],
    }
    if first and request.return_token_ids:
        body["prompt_token_ids"] = list(request.prompt)
    return body


def usage_chunk(answer: Answer) -> dict[str, Any]:
    """The event behind the last token, where usage was asked for."""
    mode = "text" if answer.request.as_text else "tokens"
    return {"request_id": answer.request.request_id, "usage": answer.usage(), "output_mode": mode, "choices": []}


def _choice(answer: Answer, index: int, sampled: Sequence[Sampled], text: str, finish: Finish | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "index": index,
        "finish_reason": finish.reason if finish else None,
        "stop_reason": finish.stop_reason if finish else None,
        "token_ids": [s.token for s in sampled],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None,
        "logprobs": None,
    }
    if finish is not None:
        body["weight_versions"] = [{"version": s.version, "start": s.start, "end": s.end} for s in finish.spans]
        body["kv_mixed"] = finish.kv_mixed
    if answer.request.as_text:
        body["text"] = text
    if answer.logprobs:
        of = _text_logprob if answer.request.as_text else _token_logprob
        body["logprobs"] = {"content": [of(answer.tokenizer, s) for s in sampled]}
    return body


def _token_logprob(_: Tokenizer, sampled: Sampled) -> dict[str, Any]:
    return {
        "token_id": sampled.token,
        "logprob": sampled.logprob,
        "rank": sampled.rank,
        "top_logprobs": [{"token_id": t.token, "logprob": t.logprob, "rank": t.rank} for t in sampled.top],
    }


def _text_logprob(tokenizer: Tokenizer, sampled: Sampled) -> dict[str, Any]:
    def entry(scored: Scored) -> dict[str, Any]:
        text = _text(tokenizer, scored.token)
        return {"token": text, "logprob": scored.logprob, "bytes": list(text.encode())}

    return {**entry(sampled), "top_logprobs": [entry(t) for t in sampled.top]}


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)
