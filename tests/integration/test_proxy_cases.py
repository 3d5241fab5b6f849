"""Kinds of mistakes that recorders of model calls have made, tried on a whole proxy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from proxy_engine import Say
from proxy_kit import Kit, kit, user

from polar_common.bus import Bus
from polar_common.events import CompletionAborted, CompletionCaptured, CompletionUndelivered
from polar_common.nats_server import NatsServer

pytestmark = pytest.mark.nats


async def _events(proxy: Kit) -> list[CompletionCaptured]:
    return [e for e in await proxy.of(CompletionCaptured) if isinstance(e, CompletionCaptured)]


STREAMS: dict[str, tuple[dict[str, Any], bytes, bytes]] = {
    "/v1/chat/completions": (
        {"model": "m", "stream": True, "messages": [user("go")]}, b'"error"', b"data: [DONE]"
    ),
    "/v1/messages": (
        {"model": "m", "stream": True, "max_tokens": 99, "messages": [user("go")]}, b"event: error", b"message_stop"
    ),
    "/v1/responses": (
        {"model": "m", "stream": True, "input": "go"}, b"event: response.failed", b"response.completed"
    ),
    "/v1beta/models/g:streamGenerateContent?alt=sse": (
        {"contents": [{"role": "user", "parts": [{"text": "go"}]}]}, b'"error"', b'"finishReason"'
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", STREAMS)
async def test_an_engine_that_dies_in_mid_stream_is_an_error_in_every_protocol(proxy: Kit, path: str) -> None:
    """Not a completed answer, not a sample; the same request is then served as if nothing had been."""
    body, failed, ended = STREAMS[path]
    proxy.engine.say(Say("one two three four five six", chunk=1, cut=5, delay_s=0.01), "whole")
    response = await proxy.client.post(f"{proxy.base()}{path}", json=body)
    assert response.status_code == 200 and failed in response.content and ended not in response.content
    (event,) = await proxy.eventually(CompletionAborted)
    assert event.reason == "engine_error" and await _events(proxy) == []
    again = await proxy.client.post(f"{proxy.base()}{path}", json=body)
    assert ended in again.content and failed not in again.content
    assert [e.untrainable for e in await _events(proxy)] == [""]


ACTED_UPON = (
    b"[DONE]", b'"finish_reason":"', b"message_stop", b'"type":"content_block_stop","index":1', b"output_item.done",
    b"response.completed", b"functionCall", b'"finishReason"',
)  # fmt: skip
"""What clients run tools for, or keep."""


@pytest.mark.parametrize("path", STREAMS)
async def test_nothing_to_act_upon_leaves_before_the_log_has_it(proxy: Kit, path: str) -> None:
    assert proxy.proxy.service is not None
    publisher, entered, acknowledged = proxy.proxy.service.publisher, asyncio.Event(), asyncio.Event()
    real = publisher.captured

    async def slow(session: Any, item: Any) -> None:
        entered.set()
        await acknowledged.wait()
        await real(session, item)

    publisher.captured = slow  # type: ignore[method-assign]
    proxy.engine.say(
        Say('Looking.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>', chunk=1)
    )
    got = bytearray()

    async def read() -> None:
        async with proxy.client.stream("POST", f"{proxy.base()}{path}", json=STREAMS[path][0]) as response:
            async for piece in response.aiter_raw():
                got.extend(piece)

    reading = asyncio.ensure_future(read())
    await entered.wait()
    await asyncio.sleep(0.2)
    early = bytes(got)
    acknowledged.set()
    await reading
    assert early and not [m for m in ACTED_UPON if m in early], early
    assert [m for m in ACTED_UPON if m in got]


@pytest.mark.parametrize("path", STREAMS)
async def test_an_answer_cut_by_length_says_so_in_every_protocol(proxy: Kit, path: str) -> None:
    body, failed, _ = STREAMS[path]
    proxy.engine.say(Say("one two three", finish="length"))
    response = await proxy.client.post(f"{proxy.base()}{path}", json=body)
    words = (b'"length"', b'"max_tokens"', b"response.incomplete", b'"MAX_TOKENS"')
    assert any(word in response.content for word in words) and failed not in response.content
    (event,) = await _events(proxy)
    assert event.finish == "length" and not event.closed and event.untrainable == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_that_the_engine_lost_on_the_way_are_missed(proxy: Kit, stream: bool) -> None:
    """It counts more tokens than it gives: a parser in between has swallowed some."""

    def edit(body: dict[str, Any]) -> None:
        body["usage"]["completion_tokens"] += 3

    proxy.engine.say(Say("fine words", edit=edit))
    assert (await proxy.told([user("go")], stream=stream))["content"] == "fine words"
    assert [e.untrainable for e in await _events(proxy)] == ["length_mismatch"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_without_ids_serves_and_is_not_trained(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, stream: bool
) -> None:
    def edit(body: dict[str, Any]) -> None:
        body["choices"][0]["token_ids"] = None
        body["choices"][0]["logprobs"] = None

    async with kit(model_dir, nats_server.url, bus, tmp_path, proxy_engine_kind="vllm_chat") as proxy:
        proxy.engine.say(Say("I am heard", edit=edit))
        told = await proxy.told([user("go")], stream=stream)
        assert told["content"] == "I am heard"
        assert [e.untrainable for e in await _events(proxy)] == ["no_token_ids"]


async def test_a_billing_line_that_changes_with_each_call_breaks_no_context(proxy: Kit) -> None:
    async def ask(line: str, messages: list[dict[str, Any]]) -> str:
        system = [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={line};"},
                  {"type": "text", "text": "Be brief."}]  # fmt: skip
        body = {"model": "m", "max_tokens": 50, "system": system, "messages": messages}
        answer = await proxy.client.post(f"{proxy.base()}/v1/messages", json=body)
        assert answer.status_code == 200
        return str(answer.json()["content"][0]["text"])

    said = await ask("36ee5", [user("go")])
    await ask("0aaa9", [user("go"), {"role": "assistant", "content": said}, user("on")])
    one, two = await proxy.agrees()
    assert two.event.parent == one.completion and two.prompt.tolist()[: len(one.context)] == one.context.tolist()
    assert (one.event.billing, two.event.billing) != ((), ()) and one.event.billing != two.event.billing
    assert "billing" not in proxy.engine.tokenizer.decode(two.prompt.tolist())
    assert "stripped_header" in two.event.additions


async def test_a_context_meter_is_told_the_true_prompt_from_the_first_event_on(proxy: Kit) -> None:
    """Claude Code reads the size of its context from `message_start`."""
    body, _, _ = STREAMS["/v1/messages"]
    response = await proxy.client.post(f"{proxy.base()}/v1/messages", json=body)
    told = [orjson.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")]
    (event,) = await _events(proxy)
    usages = [told[0]["message"]["usage"], next(e["usage"] for e in told if e["type"] == "message_delta")]
    assert [u["input_tokens"] + u["cache_read_input_tokens"] for u in usages] == [event.prompt.length] * 2
    assert event.prompt.length > 0 and usages[1]["output_tokens"] == event.usage["completion_tokens"]


async def test_what_is_no_generation_is_never_recorded_as_one(proxy: Kit) -> None:
    """Counts, embeddings and compaction endpoints have been taken for samples."""
    asked = {
        "/v1/messages/count_tokens?beta=true": ({"model": "m", "messages": [user("go")]}, 200),
        "/v1beta/models/g:countTokens": ({"contents": [{"parts": [{"text": "go"}]}]}, 200),
        "/v1/responses/input_tokens": ({"model": "m", "input": "go"}, 200),
        "/v1/embeddings": ({"model": "m", "input": "go"}, 404),
        "/v1beta/models/g:embedContent": ({"content": {"parts": [{"text": "go"}]}}, 404),
        "/v1/responses/compact": ({"model": "m", "input": "go"}, 404),
        "/v1/audio/speech": ({"model": "m", "input": "go"}, 404),
    }
    for path, (body, status) in asked.items():
        response = await proxy.client.post(f"{proxy.base()}{path}", json=body)
        assert response.status_code == status, (path, response.text)
        assert "error" in orjson.loads(response.content) or status == 200
    assert await proxy.events() == [] and proxy.engine.journal == []


async def test_items_that_name_another_server_s_memory_are_used_as_they_came(proxy: Kit) -> None:
    """`store: false` and a replayed reasoning item: no look-up, no refusal; a reference without a body is refused."""
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": "go"},
        {"type": "reasoning", "id": "rs_abc", "summary": [{"type": "summary_text", "text": "Elsewhere thought."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "done"},
    ]
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    body = {"model": "m", "store": False, "input": items, "tools": tools}
    response = await proxy.client.post(f"{proxy.base()}/v1/responses", json=body)
    assert response.status_code == 200, response.text
    shown = proxy.engine.tokenizer.decode(proxy.engine.journal[0].prompt, skip_special_tokens=False)
    assert "Elsewhere thought." in shown and '"a": 1' in shown
    unknown = {"model": "m", "input": "go", "previous_response_id": "resp_unheard-of"}
    refused = await proxy.client.post(f"{proxy.base()}/v1/responses", json=unknown)
    assert refused.status_code == 404 and refused.json()["error"]["param"] == "previous_response_id"
    assert len(await _events(proxy)) == 1 and not await proxy.of(CompletionUndelivered)
