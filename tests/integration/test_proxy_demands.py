"""What a harness demands beside text: tool choices and pictures, on engines that can and engines that can't."""

from __future__ import annotations

import base64
import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from proxy_engine import Say, ScriptedEngine
from proxy_kit import Kit, kit, session_key, user

from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.events import CompletionCaptured, CompletionRejected
from polar_common.nats_server import NatsServer

pytestmark = pytest.mark.nats

TOOLS = [
    {"type": "function", "function": {"name": n, "parameters": {"type": "object", "properties": {}}}}
    for n in ("write", "read")
]
CALLED = '[{"name": "write", "arguments": {"path": "a.txt"}}]'
PNG = b"\x89PNG\r\n\x1a\n" + b"\0picture" * 20
JPEG = b"\xff\xd8\xff" + b"\1other" * 20


def _url(body: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(body).decode()}"


def _picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


async def _captured(proxy: Kit) -> CompletionCaptured:
    events = await proxy.of(CompletionCaptured)
    event = events[-1]
    assert isinstance(event, CompletionCaptured)
    return event


@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_call_is_forced_read_and_continued(proxy: Kit, stream: bool) -> None:
    proxy.engine.say(Say(CALLED, seed=3), "done")
    message = await proxy.told([user("go")], tools=TOOLS, tool_choice="required", stream=stream)
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "write", "arguments": '{"path": "a.txt"}'}
    event = await _captured(proxy)
    assert (event.tool_choice, event.tool_choice_by) == ("required", "engine")
    assert event.constrained and event.finish == "tool_calls"
    assert "tool_choice" not in event.dropped
    schema = proxy.engine.journal[0].body["sampling_params"]["structured_outputs"]["json"]
    assert [c["properties"]["name"]["enum"] for c in schema["items"]["anyOf"]] == [["write"], ["read"]]
    message.pop("finish_reason", None)
    history = [user("go"), message, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    await proxy.told(history, tools=TOOLS, stream=stream)
    one, two = await proxy.agrees()
    # What was sampled is what the next call goes on with, though the list isn't the model's own markup.
    assert two.event.parent == one.completion and two.event.chain_class == "continued"
    assert two.prompt.tolist()[: len(one.context)] == one.context.tolist()


async def test_a_forced_call_is_known_to_another_instance(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, proxy: Kit
) -> None:
    proxy.engine.say(Say(CALLED, seed=5))
    message = await proxy.told([user("go")], tools=TOOLS, tool_choice="required")
    async with kit(model_dir, nats_server.url, bus, tmp_path / "b", proxy.engine) as other:
        history = [
            user("go"),
            message,
            {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"},
        ]
        await other.told(history, tools=TOOLS)
        assert (await other.captured())[-1].event.chain_class == "continued"


async def test_one_named_tool_is_the_only_one_in_the_grammar(proxy: Kit) -> None:
    proxy.engine.say(CALLED)
    named = {"type": "function", "function": {"name": "write"}}
    await proxy.told([user("go")], tools=TOOLS, tool_choice=named)
    assert (await _captured(proxy)).tool_choice == "required:write"
    schema = proxy.engine.journal[0].body["sampling_params"]["structured_outputs"]["json"]
    assert [c["properties"]["name"]["enum"] for c in schema["items"]["anyOf"]] == [["write"]]


async def test_a_list_that_was_cut_is_told_as_it_is(proxy: Kit) -> None:
    proxy.engine.say(Say(CALLED[:20], finish="length"))
    message = await proxy.told([user("go")], tools=TOOLS, tool_choice="required")
    assert message["content"] == CALLED[:20] and not message.get("tool_calls")


async def test_none_hides_the_tools_and_says_so(proxy: Kit) -> None:
    await proxy.told([user("go")], tools=TOOLS, tool_choice="none")
    event = await _captured(proxy)
    assert (event.tool_choice, event.tool_choice_by) == ("none", "tools_hidden")
    assert "tools" in event.dropped
    assert "write" not in proxy.engine.tokenizer.decode(proxy.engine.journal[0].prompt, skip_special_tokens=False)
    await proxy.told([user("go")], tools=TOOLS)
    assert "write" in proxy.engine.tokenizer.decode(proxy.engine.journal[1].prompt, skip_special_tokens=False)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "erase"}}])
async def test_a_demand_for_what_isnt_offered_is_refused(proxy: Kit, choice: Any) -> None:
    response = await proxy.chat([user("go")], tools=[] if choice == "required" else TOOLS, tool_choice=choice)
    assert response.status_code == 400 and response.json()["error"]["param"] == "tool_choice"
    assert not proxy.engine.journal and not proxy.proxy.service.count_running  # type: ignore[union-attr]


async def test_an_engine_without_grammars_leaves_a_demand_on_record(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    engine = ScriptedEngine(model_dir)
    engine.local = True
    await engine.start()
    try:
        async with kit(model_dir, nats_server.url, bus, tmp_path, engine) as proxy:
            await proxy.told([user("go")], tools=TOOLS, tool_choice="required")
            event = await _captured(proxy)
            assert (event.tool_choice, event.tool_choice_by) == ("required", "dropped")
            assert "tool_choice" in event.dropped and not event.constrained
    finally:
        await engine.stop()


# -- pictures


@pytest.fixture
async def seeing(model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path) -> Any:
    """A proxy before an engine that takes messages and pictures."""
    directory = tmp_path / "model"
    shutil.copytree(model_dir, directory)
    (directory / "preprocessor_config.json").write_text('{"image_processor_type": "SquareProcessor"}')
    (directory / "config.json").write_text('{"max_position_embeddings": 32768, "eos_token_id": 2, "image_token_id": 0}')
    engine = ScriptedEngine(directory)
    engine.sees = True
    await engine.start()
    try:
        async with kit(directory, nats_server.url, bus, tmp_path, engine, proxy_engine_kind="vllm_chat") as proxy:
            yield proxy
    finally:
        await engine.stop()


async def test_pictures_are_shown_stored_once_and_named_by_the_event(seeing: Kit, bus: Bus) -> None:
    first = {"role": "user", "content": [{"type": "text", "text": "see"}, _picture(_url(PNG)), _picture(_url(PNG))]}
    await seeing.told([first])
    shown = seeing.engine.journal[0].body["messages"][0]["content"]
    assert [p["image_url"]["url"] for p in shown if p["type"] == "image_url"] == [_url(PNG)] * 2
    event = await _captured(seeing)
    name = hashlib.sha256(PNG).hexdigest()
    assert [(r.message, r.part, r.blob and r.blob.sha256) for r in event.images] == [(0, 1, name), (0, 2, name)]
    assert {r.processor for r in event.images} == {"SquareProcessor"} and event.context_faithful
    prompt = seeing.engine.journal[0].prompt
    # Side by side they are one stretch of ids: then no span is better than a wrong one.
    assert prompt.count(0) == 6 and event.images[0].span is None
    assert event.images[0].blob is not None and event.images[0].blob.media_type == "image/png"
    assert await Blobs(bus, "s1").get(event.images[0].blob) == PNG

    answer = {"role": "assistant", "content": "ok"}
    second = {"role": "user", "content": [{"type": "text", "text": "and"}, _picture(_url(JPEG, "image/jpeg"))]}
    stored = (await bus.js.stream_info("POLAR_BLOBS_s1")).state.messages
    one = {"role": "user", "content": first["content"][:2]}
    await seeing.told([one, answer, second])
    event = await _captured(seeing)
    assert (await bus.js.stream_info("POLAR_BLOBS_s1")).state.messages == stored + 1
    heard = seeing.engine.journal[1].prompt
    for ref in event.images:
        assert ref.span is not None
        start, length = ref.span
        assert heard[start : start + length] == [0, 0, 0] and heard[start - 1] != 0 != heard[start + length]
    assert len(event.images) == 2 and base64.b64encode(PNG).decode() not in event.model_dump_json()


async def test_another_instance_knows_the_pictures_of_a_named_response(
    seeing: Kit, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    part = {"type": "input_image", "image_url": _url(PNG)}
    body = {"model": "m", "input": [{"type": "message", "role": "user", "content": [part]}]}
    first = (await seeing.client.post(f"{seeing.base()}/v1/responses", json=body)).json()
    directory = seeing.proxy.settings.proxy_model_dir
    assert directory is not None
    options = {"proxy_engine_kind": "vllm_chat"}
    async with kit(directory, nats_server.url, bus, tmp_path / "b", seeing.engine, **options) as other:
        more = {"model": "m", "input": "and now?", "previous_response_id": first["id"]}
        response = await other.client.post(f"{other.base()}/v1/responses", json=more)
        assert response.status_code == 200, response.text
    shown = seeing.engine.journal[1].body["messages"][0]["content"]
    assert shown == [{"type": "image_url", "image_url": {"url": _url(PNG)}}]


SHAPES: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/chat/completions": (
        {"model": "m", "messages": [{"role": "user", "content": [_picture(_url(PNG))]}]},
        lambda e: e["error"]["type"] == "invalid_request_error",
    ),
    "/v1/messages": (
        {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}]}]}]},
        lambda e: e["type"] == "error" and e["error"]["type"] == "invalid_request_error",
    ),
    "/v1/responses": (
        {"model": "m", "input": [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c",
             "output": [{"type": "input_image", "image_url": _url(PNG)}]}]},
        lambda e: e["error"]["type"] == "invalid_request_error",
    ),
    "/v1beta/models/g:generateContent": (
        {"contents": [{"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": "aGk="}}]}]},
        lambda e: e["error"]["status"] == "INVALID_ARGUMENT",
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", SHAPES)
async def test_a_blind_engine_refuses_pictures_in_the_providers_shape(proxy: Kit, path: str) -> None:
    body, fits = SHAPES[path]
    response = await proxy.client.post(f"{proxy.base()}{path}", json=body)
    assert response.status_code == 400 and fits(response.json()) and "no images" in response.text
    (refused,) = await proxy.eventually(CompletionRejected)
    assert refused.status == 400 and not proxy.engine.journal


COUNTS = {
    "/v1/messages": ("/v1/messages/count_tokens", "input_tokens"),
    "/v1/responses": ("/v1/responses/input_tokens", "input_tokens"),
    "/v1beta/models/g:generateContent": ("/v1beta/models/g:countTokens", "totalTokens"),
}


@pytest.mark.parametrize("path", COUNTS)
async def test_a_count_with_pictures_is_the_engines_own_and_no_sample(seeing: Kit, path: str) -> None:
    body, _ = SHAPES[path]
    question, field = COUNTS[path]
    counted = await seeing.client.post(f"{seeing.base()}{question}", json=body)
    assert counted.status_code == 200, counted.text
    (asked,) = seeing.engine.journal
    assert counted.json()[field] == len(asked.prompt) and asked.prompt.count(0) == 3
    assert asked.body["max_tokens"] == 1 and await seeing.events() == []
    assert (await seeing.client.post(f"{seeing.base()}{path}", json=body)).status_code == 200
    assert (await _captured(seeing)).prompt.length == counted.json()[field]


async def test_a_count_that_asks_the_engine_keeps_to_the_limits_of_calls(seeing: Kit) -> None:
    body, _ = SHAPES["/v1/messages"]
    key = session_key(calls=1)
    assert (await seeing.client.post(f"{seeing.base(key)}/v1/messages", json=body)).status_code == 200
    counted = await seeing.client.post(f"{seeing.base(key)}/v1/messages/count_tokens", json=body)
    assert counted.status_code == 403 and len(seeing.engine.journal) == 1


@pytest.mark.parametrize("path", COUNTS)
async def test_a_count_of_what_would_be_refused_is_refused(proxy: Kit, path: str) -> None:
    body, fits = SHAPES[path]
    response = await proxy.client.post(f"{proxy.base()}{COUNTS[path][0]}", json=body)
    assert response.status_code == 400 and fits(response.json()) and "no images" in response.text
    assert await proxy.events() == []


@pytest.mark.parametrize("path", SHAPES)
async def test_a_seeing_engine_is_shown_the_pictures_of_every_dialect(seeing: Kit, path: str) -> None:
    body, _ = SHAPES[path]
    response = await seeing.client.post(f"{seeing.base()}{path}", json=body)
    assert response.status_code == 200, response.text
    shown = [m["content"] for m in seeing.engine.journal[0].body["messages"] if isinstance(m["content"], list)]
    assert [p["type"] for content in shown for p in content] == ["image_url"]
    assert len((await _captured(seeing)).images) == 1


async def test_an_address_is_fetched_by_nobody_unless_the_engine_may(
    seeing: Kit, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    message = {"role": "user", "content": [_picture("https://example.org/x.png")]}
    refused = await seeing.chat([message])
    assert refused.status_code == 400 and "base64" in refused.json()["error"]["message"]
    assert not seeing.engine.journal
    directory = seeing.proxy.settings.proxy_model_dir
    assert directory is not None
    options = {"proxy_engine_kind": "vllm_chat", "proxy_image_urls": "engine"}
    async with kit(directory, nats_server.url, bus, tmp_path / "b", seeing.engine, **options) as other:
        other.key = session_key(f"{other.key.task}-1")
        await other.told([message])
        (ref,) = (await _captured(other)).images
        assert ref.blob is None and ref.url == "https://example.org/x.png"
    assert seeing.engine.journal[0].body["messages"][0]["content"] == [_picture("https://example.org/x.png")]
