"""The contract of engine adapters, on wire servers with the recorded structure of each engine's answers.

vLLM's structures were recorded from a real server; SGLang's are from its published fields (not run here).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from recorded import IDS, LOGPROBS, PROMPT, Wire, serving

from polar_common.errors import EngineBusy, EngineDown, EngineError, EngineOverflow, EngineRefused
from polar_common.events import SamplingUsed, VersionSpan
from polar_proxy.engines.base import Chunk, Engine, GenerateRequest, NativePrompt
from polar_proxy.engines.chat import VllmChatEngine
from polar_proxy.engines.sglang import SglangEngine
from polar_proxy.engines.vllm import VllmEngine
from polar_render.base import Head
from polar_render.messages import Message, Text, ToolSpec

ADAPTERS: dict[str, Any] = {"vllm": VllmEngine, "sglang": SglangEngine, "vllm_chat": VllmChatEngine}
PATHS = {"vllm": "/inference/v1/generate", "sglang": "/generate", "vllm_chat": "/v1/chat/completions"}
KINDS = pytest.mark.parametrize("kind", list(ADAPTERS))
USED = SamplingUsed(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=8, seed=3, stop=("END",))


def request(kind: str) -> GenerateRequest:
    native = None
    if kind == "vllm_chat":
        head = Head(tools=(ToolSpec("bash", "runs", {"type": "object"}),))
        native = NativePrompt((Message("user", (Text("hi"),)),), head)
    return GenerateRequest("cid", np.array(PROMPT, np.int32), USED, stop_token_ids=(2,), cache_salt="v7", native=native)


def engine(wire: Wire, **more: Any) -> Engine:
    made: Engine = ADAPTERS[wire.kind](wire.url, "smol", "e0", **more)
    return made


async def gathered(adapter: Engine, asked: GenerateRequest) -> Chunk:
    """All chunks of a stream added up."""
    total = Chunk()
    async for chunk in adapter.stream(asked):
        total.ids += chunk.ids
        if chunk.logprobs is not None:
            total.logprobs = (total.logprobs or []) + chunk.logprobs
        if chunk.finish is not None:
            total.finish, total.stop_reason, total.versions = chunk.finish, chunk.stop_reason, chunk.versions
        total.prompt_ids = chunk.prompt_ids or total.prompt_ids
        total.cached_tokens = chunk.cached_tokens or total.cached_tokens
    return total


def assert_whole(chunk: Chunk, kind: str, streamed: bool) -> None:
    assert chunk.ids == IDS and chunk.logprobs == LOGPROBS
    assert chunk.finish == "stop" and chunk.stop_reason == 2
    assert chunk.cached_tokens == 2
    if kind != "vllm_chat":
        assert chunk.versions == (VersionSpan(version="step-7", start=0), VersionSpan(version="step-8", start=2))
    if kind == "vllm_chat" or (kind == "vllm" and not streamed):
        assert chunk.prompt_ids == PROMPT


@KINDS
async def test_a_whole_answer(kind: str) -> None:
    async with serving(Wire(kind)) as wire:
        adapter = engine(wire)
        assert_whole(await adapter.complete(request(kind)), kind, False)
        await adapter.close()


@KINDS
@pytest.mark.parametrize("split", [0, 1, 2, 7, 61, 4096])
async def test_a_stream_cut_anywhere_tells_the_same(kind: str, split: int) -> None:
    async with serving(Wire(kind, split=split)) as wire:
        adapter = engine(wire)
        for _ in range(4):
            assert_whole(await gathered(adapter, request(kind)), kind, True)
            # The end of the body may come a moment after the last event; then the connection is free again.
            await asyncio.sleep(0.02)
        assert wire.connections == 1
        await adapter.close()


@KINDS
async def test_every_sampling_field_is_sent(kind: str) -> None:
    async with serving(Wire(kind)) as wire:
        adapter = engine(wire)
        await adapter.complete(request(kind))
        await adapter.close()
        body = wire.generations[0].body
    told = body if kind == "vllm_chat" else body["sampling_params"]
    penalties = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
    assert {"temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids"} | penalties <= set(told)
    assert told["max_new_tokens" if kind == "sglang" else "max_tokens"] == 8
    assert told["sampling_seed" if kind == "sglang" else "seed"] == 3
    assert told["stop"] == ["END"] and told["stop_token_ids"] == [2]
    if kind == "vllm_chat":
        assert body["tool_choice"] == "none" and body["tools"][0]["function"]["name"] == "bash"
        assert wire.generations[0].headers["x-request-id"] == "cid"
    else:
        assert body["token_ids" if kind == "vllm" else "input_ids"] == PROMPT
        assert body["request_id" if kind == "vllm" else "rid"] == "cid"
    assert "v7" in (body.get("cache_salt"), body.get("extra_key"))


@KINDS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (400, "temperature must be non-negative", EngineRefused),
        (400, "This model's maximum context length is 2048 tokens. However, you requested 4000", EngineOverflow),
        (400, "The input (4000 tokens) is longer than the model's context length (2048 tokens).", EngineOverflow),
        (404, "The model `x` does not exist.", EngineRefused),
        (429, "too many", EngineBusy),
        (503, "paused", EngineBusy),
        (500, "CUDA error", EngineDown),
    ],
)
async def test_errors_by_status(
    kind: str, stream: bool, status: int, message: str, expected: type[EngineError]
) -> None:
    body = json.dumps({"error": {"message": message, "type": "X", "code": status}}).encode()
    answer = {PATHS[kind]: (status, {"retry-after": "4"}, body)}
    async with serving(Wire(kind, answer=answer)) as wire:
        adapter = engine(wire)
        with pytest.raises(expected) as caught:
            await (gathered(adapter, request(kind)) if stream else adapter.complete(request(kind)))
        assert type(caught.value) is expected and message in str(caught.value) and caught.value.status == status
        if expected is EngineBusy:
            assert caught.value.retry_after == 4.0
        await adapter.close()


@KINDS
async def test_a_stream_that_breaks_off_is_no_answer(kind: str) -> None:
    async with serving(Wire(kind, split=40, cut_after=120)) as wire:
        adapter = engine(wire)
        with pytest.raises(EngineDown):
            await gathered(adapter, request(kind))
        await adapter.close()


@KINDS
async def test_an_error_inside_a_stream(kind: str) -> None:
    def edit(body: dict[str, Any]) -> None:
        body["error"] = {"message": "generation failed", "code": 500}

    async with serving(Wire(kind, edit=edit)) as wire:
        adapter = engine(wire)
        with pytest.raises(EngineDown, match="generation failed"):
            await gathered(adapter, request(kind))
        await adapter.close()


@KINDS
async def test_an_answer_that_makes_no_sense(kind: str) -> None:
    answer = {PATHS[kind]: (200, {}, b'{"surprise": []}')}
    async with serving(Wire(kind, answer=answer)) as wire:
        adapter = engine(wire)
        with pytest.raises(EngineDown):
            await adapter.complete(request(kind))
        await adapter.close()


@KINDS
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_early_closes_the_connection(kind: str, stream: bool) -> None:
    async with serving(Wire(kind, split=20, hang_after=300)) as wire:
        if not stream:
            wire.answer = {}
            wire.whole = lambda r, p: (_ for _ in ()).throw(ConnectionError())  # type: ignore[method-assign]

            async def never(*_: Any) -> None:
                await asyncio.sleep(30)

            wire._send = never  # type: ignore[method-assign]
            wire.whole = lambda r, p: (200, {})  # type: ignore[method-assign]
        adapter = engine(wire)
        asked = request(kind)
        task = asyncio.ensure_future(gathered(adapter, asked) if stream else adapter.complete(asked))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        used = adapter._wire._connections  # type: ignore[attr-defined]
        assert not used._used and not used._free
        await adapter.close()


@KINDS
async def test_no_engine_at_all(kind: str) -> None:
    async with serving(Wire(kind)) as wire:
        url = wire.url
    gone = ADAPTERS[kind](url, "smol", "e0")
    with pytest.raises(EngineDown):
        await gone.complete(request(kind))
    assert await gone.healthy() is False
    await gone.close()


@KINDS
async def test_an_engine_that_stands_still_is_given_up(kind: str) -> None:
    async with serving(Wire(kind, split=20, hang_after=100)) as wire:
        adapter = engine(wire, idle_s=0.2)
        with pytest.raises(EngineDown):
            await gathered(adapter, request(kind))
        await adapter.close()


@KINDS
async def test_capabilities_come_from_a_probe(kind: str) -> None:
    async with serving(Wire(kind)) as wire:
        adapter = ADAPTERS[kind](wire.url, "", "e0")
        found = await adapter.capabilities()
        assert found.model == "smol" and found.context_window == 2048 and found.problems == ()
        assert found.logprobs == "processed" and found.ids_out and found.ids_in == (kind != "vllm_chat")
        assert found.weights_version == "step-8" and found.weight_update
        assert found.engine == ("sglang" if kind == "sglang" else "vllm")
        assert await adapter.healthy() is True
        await adapter.close()


@KINDS
async def test_an_engine_without_log_probs_says_so(kind: str) -> None:
    def edit(body: dict[str, Any]) -> None:
        for choice in body.get("choices", ()):
            choice["logprobs"] = None
        body.get("meta_info", {}).pop("output_token_logprobs", None)

    async with serving(Wire(kind, edit=edit)) as wire:
        adapter = engine(wire)
        found = await adapter.capabilities()
        assert found.logprobs == "none" and "log-probs" in found.problems[0]
        assert (await adapter.complete(request(kind))).logprobs is None
        await adapter.close()


@KINDS
async def test_another_model_than_the_one_wanted(kind: str) -> None:
    async with serving(Wire(kind)) as wire:
        adapter = ADAPTERS[kind](wire.url, "other", "e0")
        with pytest.raises(EngineRefused, match="smol"):
            await adapter.capabilities()
        await adapter.close()


@KINDS
@pytest.mark.parametrize("drain", [False, True])
async def test_weights_are_loaded_and_named(kind: str, drain: bool) -> None:
    async with serving(Wire(kind)) as wire:
        adapter = engine(wire)
        await adapter.update_weights("/weights/9", "step-9", drain=drain)
        await adapter.close()
        calls = [(r.path, r.body) for r in wire.requests]
    if kind == "sglang":
        update = next(b for p, b in calls if p == "/update_weights_from_disk")
        assert update["model_path"] == "/weights/9" and update["weight_version"] == "step-9"
        assert (calls[-1][0] == "/continue_generation") == (not drain)
        return
    assert [p for p, _ in calls] == [
        f"/pause?mode={'wait' if drain else 'keep'}", "/collective_rpc", "/update_weight_version", "/resume"
    ]  # fmt: skip
    assert calls[1][1]["kwargs"] == {"weights_path": "/weights/9"} and calls[2][1] == {"new_version": "step-9"}


@KINDS
async def test_a_failed_update_ends_the_pause_all_the_same(kind: str) -> None:
    path = "/update_weights_from_disk" if kind == "sglang" else "/collective_rpc"
    async with serving(Wire(kind, answer={path: (500, {}, b'{"detail":"no such file"}')})) as wire:
        adapter = engine(wire)
        with pytest.raises(EngineDown, match="no such file"):
            await adapter.update_weights("/nowhere", "step-9", drain=False)
        assert wire.requests[-1].path in ("/resume", "/continue_generation")
        await adapter.close()


async def test_sglang_streams_that_send_only_what_is_new() -> None:
    seen = 0

    def edit(body: dict[str, Any]) -> None:
        nonlocal seen
        ids = body["output_ids"]
        body["output_ids"], seen_now = ids[seen:], len(ids)
        body["meta_info"]["output_token_logprobs"] = body["meta_info"]["output_token_logprobs"][seen:]
        seen = seen_now

    async with serving(Wire("sglang", edit=edit)) as wire:
        adapter = engine(wire)
        assert_whole(await gathered(adapter, request("sglang")), "sglang", True)
        await adapter.close()


@pytest.mark.parametrize("last", ["v7", "v8", None])
async def test_sglang_releases_that_tell_only_the_last_weights(last: str | None) -> None:
    """Asked under v7: where the answer ends under v8, nobody knows where that began. Some tell no weights at all."""

    def edit(body: dict[str, Any]) -> None:
        if "meta_info" in body:
            del body["meta_info"]["weight_versions"]
            body["meta_info"]["weight_version"] = last

    async with serving(Wire("sglang", edit=edit)) as wire:
        adapter = engine(wire)
        whole = await adapter.complete(request("sglang"))
        assert whole.kv_mixed == (last == "v8")
        assert whole.versions == ((VersionSpan(version="v7", start=0),) if last == "v7" else ())
        await adapter.close()


async def test_a_chat_engine_without_ids_still_says_what_it_said() -> None:
    def edit(body: dict[str, Any]) -> None:
        for choice in body.get("choices", ()):
            choice.pop("token_ids", None)
            choice["logprobs"] = None

    async with serving(Wire("vllm_chat", edit=edit)) as wire:
        adapter = engine(wire)
        whole = await adapter.complete(request("vllm_chat"))
        assert whole.ids == [] and whole.parts == (Text("hey"),) and whole.completion_tokens == 3
        await adapter.close()
