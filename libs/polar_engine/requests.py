"""What clients may ask of `/inference/v1/generate`, checked before anything runs. Pure: bytes in, values out.

Nothing is ignored in silence: a field that this engine can't honour is refused by name, unless it is null.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError, model_validator

from polar_common.errors import RequestError
from polar_engine.sampling import SamplingParams

__all__ = ["GenerateRequest", "Served", "parse_body", "parse_generate", "validated"]

Unit = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]
M = TypeVar("M", bound=BaseModel)
Count = Annotated[StrictInt, Field(ge=0)]


@dataclass(frozen=True)
class Served:
    """What is served: the name, the vocabulary's size, and how many tokens prompt and answer may have together."""

    name: str
    vocab: int
    max_model_len: int


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class _Sampling(_Body):
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[StrictInt, Field(ge=-1)] = 0
    min_p: Unit = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[int, Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]] = {}
    allowed_token_ids: list[StrictInt] | None = None
    min_tokens: Count = 0
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    seed: StrictInt | None = None
    n: Annotated[StrictInt, Field(ge=1, le=64)] = 1
    stop: str | list[str] = []
    stop_token_ids: list[StrictInt] = []
    ignore_eos: StrictBool = False
    include_stop_str_in_output: StrictBool = False
    skip_special_tokens: StrictBool = True
    # Accepted because adapters for vLLM send them; they change nothing here.
    spaces_between_special_tokens: StrictBool = True
    detokenize: StrictBool = True


class _StreamOptions(_Body):
    include_usage: StrictBool = False
    continuous_usage_stats: Literal[False] = False


class _Generate(_Body):
    model: str | None = None
    token_ids: list[StrictInt]
    sampling_params: _Sampling = Field(default_factory=_Sampling)
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    stream: StrictBool = False
    stream_options: _StreamOptions = Field(default_factory=_StreamOptions)
    return_token_ids: StrictBool = False
    output_mode: Literal["tokens", "text"] = "tokens"


@dataclass(frozen=True)
class GenerateRequest:
    """A checked request. `request_id` is the full id, under which it can be aborted."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    n: int
    salt: str
    stream: bool
    include_usage: bool
    return_token_ids: bool
    as_text: bool


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises RequestError (400) for anything else, NaN and infinities included."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body isn't valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def validated(model: type[M], body: dict[str, Any]) -> M:
    """`body` as `model`. Raises RequestError (400) that names the first offending field."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
        raise RequestError(first["msg"], path=path) from error


def parse_generate(body: dict[str, Any], served: Served) -> GenerateRequest:
    """Check a generate request against the served model. Raises RequestError: 400, or 404 for another model."""
    asked = validated(_Generate, body)
    if asked.model is not None and asked.model != served.name:
        message = f"The model `{asked.model}` does not exist."
        raise RequestError(message, status=404, path="model", kind="NotFoundError")
    _check_ids(asked.token_ids, served, "token_ids")
    if not asked.token_ids:
        raise RequestError("the prompt is empty", path="token_ids")
    sampling = asked.sampling_params
    _check_ids(sampling.stop_token_ids, served, "sampling_params.stop_token_ids")
    _check_ids(list(sampling.logit_bias), served, "sampling_params.logit_bias")
    _check_ids(sampling.allowed_token_ids or [], served, "sampling_params.allowed_token_ids")
    room = _room(len(asked.token_ids), sampling.max_tokens, served)
    if sampling.min_tokens > room:
        raise RequestError("min_tokens is larger than max_tokens", path="sampling_params.min_tokens")
    return GenerateRequest(
        request_id=f"generate-tokens-{asked.request_id or uuid.uuid4().hex[:16]}",
        prompt=tuple(asked.token_ids),
        params=_params(sampling, room),
        n=sampling.n,
        salt=asked.cache_salt,
        stream=asked.stream,
        include_usage=asked.stream_options.include_usage,
        return_token_ids=asked.return_token_ids,
        as_text=asked.output_mode == "text",
    )


def _params(sampling: _Sampling, max_tokens: int) -> SamplingParams:
    stop = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop
    if not all(stop):
        raise RequestError("a stop string is empty", path="sampling_params.stop")
    same = {
        name: getattr(sampling, name)
        for name in SamplingParams.__dataclass_fields__
        if name not in ("max_tokens", "top_k", "stop", "stop_token_ids", "allowed_token_ids")
    }
    return SamplingParams(
        max_tokens=max_tokens,
        top_k=max(sampling.top_k, 0),
        stop=tuple(stop),
        stop_token_ids=frozenset(sampling.stop_token_ids),
        allowed_token_ids=tuple(sampling.allowed_token_ids or ()),
        **same,
    )


def _check_ids(ids: list[int], served: Served, path: str) -> None:
    for place, token in enumerate(ids):
        if not 0 <= token < served.vocab:
            raise RequestError(
                f"token id {token} is out of vocabulary (0 to {served.vocab - 1})", path=f"{path}[{place}]"
            )


def _room(prompt: int, max_tokens: int | None, served: Served) -> int:
    """How many tokens the answer may have. Raises RequestError where the context window is too small."""
    limit = served.max_model_len
    if prompt >= limit:
        raise RequestError(
            f"This model's maximum context length is {limit} tokens. However, your request has {prompt} input tokens. "
            "Please reduce the length of the input.",
            path="token_ids",
        )
    if max_tokens is not None and prompt + max_tokens > limit:
        raise RequestError(
            f"This model's maximum context length is {limit} tokens. However, you requested {max_tokens} output tokens "
            f"and your prompt contains {prompt} input tokens, for a total of {prompt + max_tokens} tokens. "
            "Please reduce the length of the input or the number of requested output tokens.",
            path="sampling_params.max_tokens",
        )
    return limit - prompt if max_tokens is None else max_tokens
