"""The local engine's token endpoint: wire format, finishes, streaming, choices, bad input."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from local_engine_kit import GENERATE, EngineClient, logprobs_of

pytest.importorskip("torch")
from polar_engine.testing import EngineThread, engine_thread

PROMPT = [504, 300, 301, 302, 303]
EOS = {504: "<|im_start|>", 505: "<|im_end|>", 503: "<|endoftext|>"}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineThread]:
    with engine_thread(model="tiny", max_model_len=2048) as running:
        yield running


@pytest.fixture
def client(engine: EngineThread) -> EngineClient:
    return EngineClient(engine.url)


def shape(value: Any) -> Any:
    """The keys of a JSON value, with scalars reduced to their type."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


# What vLLM 0.32 answered to the same request, as key structure. `kv_mixed` and the cached-token details are ours.
LOGPROB = {
    "token_id": "int",
    "logprob": "float",
    "rank": "int",
    "top_logprobs": [{"token_id": "int", "logprob": "float", "rank": "int"}],
}
ENDED_CHOICE = {
    "index": "int",
    "finish_reason": "str",
    "stop_reason": "NoneType",
    "token_ids": ["int"],
    "routed_experts": "NoneType",
    "sampling_mask": "NoneType",
    "weight_versions": [{"version": "str", "start": "int", "end": "int"}],
    "logprobs": {"content": [LOGPROB]},
    "kv_mixed": "bool",
}
USAGE = {
    "prompt_tokens": "int",
    "total_tokens": "int",
    "completion_tokens": "int",
    "prompt_tokens_details": {"cached_tokens": "int"},
    "completion_tokens_details": "NoneType",
}
ANSWER = {
    "request_id": "str",
    "model": "str",
    "created": "int",
    "usage": USAGE,
    "prompt_logprobs": "NoneType",
    "prompt_token_id_logprobs": "NoneType",
    "prompt_token_ids": ["int"],
    "mm_placeholders": "NoneType",
    "metrics": "NoneType",
    "kv_transfer_params": "NoneType",
    "ec_transfer_params": "NoneType",
    "output_mode": "str",
    "choices": [ENDED_CHOICE],
}


def test_an_answer_has_vllms_structure(client: EngineClient) -> None:
    request = {"request_id": "rid-1", "return_token_ids": True, "model": "tiny"}
    answer = client.generate(PROMPT, max_tokens=3, temperature=0.7, seed=3, request=request)
    assert shape(answer) == ANSWER
    assert answer["request_id"] == "generate-tokens-rid-1"
    assert answer["prompt_token_ids"] == PROMPT
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["total_tokens"] == 8
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": "v0", "start": 0, "end": 3}]
    assert len(logprobs_of(choice)) == 3
    assert all(entry["logprob"] <= 0 and entry["rank"] >= 1 for entry in choice["logprobs"]["content"])


def test_a_stream_has_vllms_structure(client: EngineClient) -> None:
    request = {"stream_options": {"include_usage": True}, "return_token_ids": True}
    chunks = client.chunks(PROMPT, max_tokens=3, seed=3, ignore_eos=True, request=request)
    assert len(chunks) == 4
    running = {**ENDED_CHOICE, "finish_reason": "NoneType", "weight_versions": "NoneType"}
    del running["kv_mixed"]
    frame = {"request_id": "str", "usage": "NoneType", "output_mode": "str"}
    assert shape(chunks[0]) == {**frame, "choices": [running], "prompt_token_ids": ["int"]}
    assert shape(chunks[1]) == {**frame, "choices": [running]}
    assert shape(chunks[2]) == {**frame, "choices": [ENDED_CHOICE]}
    assert shape(chunks[3]) == {**frame, "usage": USAGE, "choices": []}
    assert chunks[0]["prompt_token_ids"] == PROMPT
    assert [len(c["choices"][0]["token_ids"]) for c in chunks[:3]] == [1, 1, 1]
    assert len({c["request_id"] for c in chunks}) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_streamed_equals_unstreamed(client: EngineClient, temperature: float) -> None:
    params = {"max_tokens": 40, "temperature": temperature, "seed": 12, "ignore_eos": True}
    whole = client.generate(PROMPT, **params)["choices"][0]
    streamed = client.stream(PROMPT, **params)[0]
    assert streamed.token_ids == whole["token_ids"]
    assert streamed.logprobs == pytest.approx(logprobs_of(whole), abs=1e-5)
    assert streamed.finish_reason == whole["finish_reason"] == "length"
    assert streamed.weight_versions == whole["weight_versions"]


def test_end_of_answer_is_a_stop_and_its_id_is_kept(client: EngineClient) -> None:
    for eos in (505, 503):
        answer = client.generate(PROMPT, max_tokens=5, logit_bias={str(eos): 100})
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert choice["token_ids"] == [eos]
        ignored = client.generate(PROMPT, max_tokens=5, logit_bias={str(eos): 100}, ignore_eos=True)["choices"][0]
        assert (ignored["finish_reason"], ignored["token_ids"]) == ("length", [eos] * 5)


def test_stop_token_ids(client: EngineClient) -> None:
    choice = client.generate(PROMPT, max_tokens=9, logit_bias={"77": 100}, stop_token_ids=[77])["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("stop", 77, [77])
    late = client.generate(PROMPT, max_tokens=9, logit_bias={"77": 100}, stop_token_ids=[77], ignore_eos=True)
    assert late["choices"][0]["stop_reason"] == 77


def test_min_tokens_holds_back_every_end(client: EngineClient) -> None:
    bias = {"505": 60, "77": 50}
    choice = client.generate(PROMPT, max_tokens=9, logit_bias=bias, stop_token_ids=[77], min_tokens=4)["choices"][0]
    assert len(choice["token_ids"]) == 5
    assert choice["token_ids"][-1] == 505
    assert not {505, 503, 77} & set(choice["token_ids"][:4])


def test_a_stop_string_ends_the_answer_and_all_ids_stay(client: EngineClient, engine: EngineThread) -> None:
    params = {"max_tokens": 60, "seed": 4, "ignore_eos": True}
    free = client.generate(PROMPT, request={"output_mode": "text"}, **params)["choices"][0]
    stop = free["text"][10:13]
    end = free["text"].index(stop)
    cut = client.generate(PROMPT, request={"output_mode": "text"}, stop=[stop, "never this"], **params)["choices"][0]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert cut["text"] == free["text"][:end]
    count = len(cut["token_ids"])
    assert cut["token_ids"] == free["token_ids"][:count]
    assert len(cut["logprobs"]["content"]) == count
    assert stop in engine.host.tokenizer.decode(cut["token_ids"])
    assert stop not in engine.host.tokenizer.decode(cut["token_ids"][:-1])
    kept = client.generate(
        PROMPT, request={"output_mode": "text"}, stop=stop, include_stop_str_in_output=True, **params
    )["choices"][0]
    assert kept["text"] == free["text"][: end + len(stop)]
    # Token mode has no text, but ends in the same place.
    tokens = client.generate(PROMPT, stop=stop, **params)["choices"][0]
    assert (tokens["token_ids"], tokens["stop_reason"]) == (cut["token_ids"], stop)
    streamed = client.stream(PROMPT, stop=stop, request={"output_mode": "text"}, **params)[0]
    assert (streamed.text, streamed.token_ids, streamed.stop_reason) == (cut["text"], cut["token_ids"], stop)


def test_text_mode_reports_token_texts(client: EngineClient) -> None:
    answer = client.generate(PROMPT, max_tokens=4, seed=1, request={"output_mode": "text"})
    (choice,) = answer["choices"]
    entry = choice["logprobs"]["content"][0]
    assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
    assert bytes(entry["bytes"]).decode() == entry["token"]
    assert answer["output_mode"] == "text"


def test_alternatives_and_their_absence(client: EngineClient) -> None:
    content = client.generate(PROMPT, max_tokens=4, seed=1, logprobs=5)["choices"][0]["logprobs"]["content"]
    for entry in content:
        top = entry["top_logprobs"]
        assert top[0]["token_id"] == entry["token_id"]
        assert len(top) in (5, 6)
        others = [t["logprob"] for t in top[1:]]
        assert others == sorted(others, reverse=True)
    silent = client.generate(PROMPT, max_tokens=4, logprobs=None)
    assert silent["choices"][0]["logprobs"] is None


def test_several_choices(client: EngineClient) -> None:
    params = {"max_tokens": 30, "n": 5, "seed": 9, "ignore_eos": True}
    answer = client.generate(PROMPT, **params)
    choices = answer["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2, 3, 4]
    assert len({tuple(c["token_ids"]) for c in choices}) == 5
    assert answer["usage"]["completion_tokens"] == 150
    assert answer["usage"]["total_tokens"] == 155
    streamed = client.stream(PROMPT, **params)
    assert {i: s.token_ids for i, s in streamed.items()} == {c["index"]: c["token_ids"] for c in choices}


def test_sixteen_clients_at_once_get_their_own_answers(client: EngineClient) -> None:
    prompts = [[504, 100 + i, 101, 102] for i in range(16)]
    alone = [client.generate(p, max_tokens=25, seed=i, ignore_eos=True)["choices"][0] for i, p in enumerate(prompts)]
    with ThreadPoolExecutor(16) as pool:
        futures = [
            pool.submit(client.generate, p, max_tokens=25, seed=i, ignore_eos=True) for i, p in enumerate(prompts)
        ]
        together = [f.result()["choices"][0] for f in futures]
    for a, b in zip(alone, together, strict=True):
        assert a["token_ids"] == b["token_ids"]
        assert logprobs_of(a) == pytest.approx(logprobs_of(b), abs=1e-4)


def test_more_clients_than_batch_places_are_all_served() -> None:
    with engine_thread(model="tiny", max_batch=3) as running:
        client = EngineClient(running.url)
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda i: client.generate([1, i], max_tokens=12, ignore_eos=True), range(12)))
        assert all(len(a["choices"][0]["token_ids"]) == 12 for a in answers)
        assert client.get("/load") == {"server_load": 0}


def test_prompt_logprobs(client: EngineClient) -> None:
    answer = client.generate(PROMPT, max_tokens=1, n=2, prompt_logprobs=2)
    rows = answer["prompt_logprobs"]
    assert rows[0] is None
    assert len(rows) == len(PROMPT)
    for token, row in zip(PROMPT[1:], rows[1:], strict=True):
        assert set(row[str(token)]) == {"logprob", "rank", "decoded_token"}
        assert 1 in {entry["rank"] for entry in row.values()}
        assert len(row) in (2, 3)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"token_ids": [1, -1]}, 400),
        ({"token_ids": [1, 512]}, 400),
        ({"token_ids": []}, 400),
        ({"token_ids": [2] * 2048}, 400),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 10**9}}, 400),
        ({"token_ids": [1], "sampling_params": {"temperature": "NaN"}}, 400),
        ({"token_ids": [1], "model": "other"}, 404),
        ({}, 400),
    ],
)
def test_bad_requests_are_answered_in_vllms_error_shape(
    client: EngineClient, body: dict[str, Any], status: int
) -> None:
    answer = client.http.post(GENERATE, json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["type"] == ("BadRequestError" if status == 400 else "NotFoundError")


def test_bodies_that_are_no_json_object(client: EngineClient) -> None:
    for raw in (b"", b"{", b"[]", b'{"token_ids": [1], "sampling_params": {"temperature": NaN}}'):
        answer = client.http.post(GENERATE, content=raw)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")


def test_an_overflow_names_the_context_length(client: EngineClient) -> None:
    error = client.generate([2] * 2048, status=400)["error"]
    assert "maximum context length is 2048 tokens" in error["message"]
    fits = client.generate([2] * 2047, max_tokens=1)
    assert fits["usage"]["prompt_tokens"] == 2047
    rest = client.generate([2] * 2040, ignore_eos=True)
    assert rest["usage"]["completion_tokens"] == 8


def test_model_list_health_version_and_unknown_routes(client: EngineClient) -> None:
    (card,) = client.get("/v1/models")["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 2048)
    assert client.http.get("/health").status_code == 200
    assert client.http.get("/health").content == b""
    assert set(client.get("/version")) >= {"version"}
    missing = client.http.post("/v1/chat/completions", json={})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, 404)
    assert client.http.get(GENERATE).status_code == 405


def test_tokenizer_routes(client: EngineClient) -> None:
    asked = client.post("/tokenize", {"prompt": "hello <tool_call>", "return_token_strs": True})
    assert asked["count"] == len(asked["tokens"]) == len(asked["token_strs"])
    assert asked["max_model_len"] == 2048
    assert client.post("/detokenize", {"tokens": asked["tokens"]}) == {"prompt": "hello <tool_call>"}
    client.post("/detokenize", {"tokens": [600]}, status=400)
    client.post("/tokenize", {}, status=400)
    refused = client.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}, status=400)
    assert refused["error"]["param"] == "messages"


def test_an_engine_without_logprobs() -> None:
    with engine_thread(model="tiny", no_logprobs=True) as running:
        client = EngineClient(running.url)
        choice = client.generate(PROMPT, max_tokens=3, ignore_eos=True)["choices"][0]
        assert choice["logprobs"] is None
        assert len(choice["token_ids"]) == 3
        streamed = client.stream(PROMPT, max_tokens=3, ignore_eos=True)[0]
        assert (len(streamed.token_ids), streamed.logprobs) == (3, [])
