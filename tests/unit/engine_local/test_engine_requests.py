"""What is refused before anything runs, and how it is named."""

from __future__ import annotations

from typing import Any

import pytest

from polar_common.errors import RequestError
from polar_engine.requests import Served, parse_body, parse_generate

SERVED = Served("tiny", 512, 100)


def parse(**body: Any) -> Any:
    return parse_generate({"token_ids": [1, 2, 3], **body}, SERVED)


def test_defaults_are_neutral_and_fill_the_context() -> None:
    asked = parse()
    params = asked.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert params.max_tokens == 97
    assert params.logprobs is None
    assert asked.request_id.startswith("generate-tokens-")
    assert (asked.n, asked.stream, asked.salt) == (1, False, "")


def test_every_field_arrives() -> None:
    asked = parse(
        model="tiny",
        request_id="r1",
        cache_salt="v3",
        stream=True,
        stream_options={"include_usage": True},
        return_token_ids=True,
        sampling_params={
            "max_tokens": 4,
            "temperature": 0.5,
            "top_k": -1,
            "stop": "x",
            "stop_token_ids": [7],
            "n": 3,
            "seed": -5,
            "logit_bias": {"5": 2},
            "logprobs": 0,
            "bad_words": None,
        },
    )
    params = asked.params
    assert asked.request_id == "generate-tokens-r1"
    assert (asked.salt, asked.n, asked.include_usage, asked.return_token_ids) == ("v3", 3, True, True)
    assert (params.max_tokens, params.temperature, params.top_k, params.seed) == (4, 0.5, 0, -5)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), frozenset({7}), {5: 2.0})


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, -2]}, "token_ids[1]"),
        ({"token_ids": [1, 512]}, "token_ids[1]"),
        ({"token_ids": "1 2"}, "token_ids"),
        ({"token_ids": [1, "2"]}, "token_ids[1]"),
        ({"token_ids": [1, True]}, "token_ids[1]"),
        ({"token_ids": [1, 2.5]}, "token_ids[1]"),
        ({"token_ids": list(range(100))}, "token_ids"),
        ({"sampling_params": {"max_tokens": 98}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"max_tokens": 10**12}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"max_tokens": 2, "min_tokens": 3}}, "sampling_params.min_tokens"),
        ({"sampling_params": {"temperature": -0.1}}, "sampling_params.temperature"),
        ({"sampling_params": {"temperature": "nan"}}, "sampling_params.temperature"),
        ({"sampling_params": {"temperature": float("inf")}}, "sampling_params.temperature"),
        ({"sampling_params": {"top_p": 0.0}}, "sampling_params.top_p"),
        ({"sampling_params": {"top_p": 1.1}}, "sampling_params.top_p"),
        ({"sampling_params": {"top_k": -2}}, "sampling_params.top_k"),
        ({"sampling_params": {"min_p": 2}}, "sampling_params.min_p"),
        ({"sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"sampling_params": {"n": 65}}, "sampling_params.n"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
        ({"sampling_params": {"repetition_penalty": 0}}, "sampling_params.repetition_penalty"),
        ({"sampling_params": {"presence_penalty": 3}}, "sampling_params.presence_penalty"),
        ({"sampling_params": {"stop": ["a", ""]}}, "sampling_params.stop"),
        ({"sampling_params": {"stop_token_ids": [900]}}, "sampling_params.stop_token_ids[0]"),
        ({"sampling_params": {"logit_bias": {"900": 1}}}, "sampling_params.logit_bias[0]"),
        ({"sampling_params": {"guided_json": {}}}, "sampling_params.guided_json"),
        ({"sampling_params": 7}, "sampling_params"),
        ({"output_mode": "images"}, "output_mode"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"request_id": ""}, "request_id"),
    ],
)
def test_a_bad_field_is_refused_by_name(body: dict[str, Any], path: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**body)
    assert caught.value.status == 400
    assert caught.value.path == path


def test_overflow_says_how_long_the_context_is() -> None:
    with pytest.raises(RequestError, match="maximum context length is 100 tokens"):
        parse(token_ids=[1] * 100)
    with pytest.raises(RequestError, match="maximum context length is 100 tokens"):
        parse(sampling_params={"max_tokens": 98})


def test_another_model_is_not_found() -> None:
    with pytest.raises(RequestError) as caught:
        parse(model="gpt-5")
    assert (caught.value.status, caught.value.kind) == (404, "NotFoundError")


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"null", b'{"token_ids": [1], "a": NaN}', b"\xff\xfe"])
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_body(raw)
    assert caught.value.status == 400
