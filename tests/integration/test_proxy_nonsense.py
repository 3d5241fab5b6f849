"""An engine that answers nonsense: the harness is served where there is an answer, and nothing is called trainable that
isn't."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from proxy_engine import Heard, Say, ScriptedEngine
from proxy_kit import Kit, kit, user

from polar_common.bus import Bus
from polar_common.events import CompletionAborted, CompletionCaptured
from polar_common.nats_server import NatsServer

pytestmark = pytest.mark.nats


class RawEngine(ScriptedEngine):
    """Answers generations with bytes of the test's own: `raw(heard)`; a stream goes on until `more` is set."""

    raw: Any = None
    ends = True

    async def _said(self, request: web.Request, heard: Heard, say: Say) -> web.StreamResponse:
        body = self._answer(heard, say)
        if not heard.body.get("stream"):
            return web.Response(body=self.raw(body), content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + self.raw(body) + b"\n\n")
        while not self.ends:
            await response.write(b": ping\n\n")
            await asyncio.sleep(0.05)
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def raw(model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path) -> AsyncIterator[Kit]:
    engine = RawEngine(model_dir)
    await engine.start()
    async with kit(model_dir, nats_server.url, bus, tmp_path, engine) as made:
        yield made
    await engine.stop()


def values(*told: bytes) -> Any:
    """The answer with these log-probs, written as they stand."""

    def edit(body: dict[str, Any]) -> bytes:
        body["choices"][0]["logprobs"] = {"content": "HERE"}
        content = b",".join(b'{"token_id":5,"logprob":' + v + b"}" for v in told)
        return orjson.dumps(body).replace(b'"HERE"', b"[" + content + b"]")

    return edit


VALUES = [b"NaN", b"-Infinity", b"null", b"-9999.0", b"-1e39", b'"x"', b"{}"]
"""Log-probs that are none."""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_log_prob_that_is_none_is_found_however_it_is_written(raw: Kit, stream: bool) -> None:
    for value in VALUES:
        raw.engine.raw = values(b"-0.5", value, b"-0.1")  # type: ignore[attr-defined]
        raw.engine.say(Say(ids=[50, 51]))
        assert (await raw.told([user(f"go {value!r}")], stream=stream))["content"]
    found = await raw.of(CompletionCaptured)
    assert [(e.untrainable, e.untrainable_at) for e in found] == [("invalid_logprobs", 1)] * len(VALUES)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_entry_without_a_log_prob_is_one_that_is_missing(proxy: Kit, stream: bool) -> None:
    for entry in (None, {}, 5):

        def edit(body: dict[str, Any], entry: Any = entry) -> None:
            body["choices"][0]["logprobs"]["content"][1] = entry

        proxy.engine.say(Say(ids=[50, 51], edit=edit))
        assert (await proxy.told([user(f"go {entry}")], stream=stream))["content"]
    found = await proxy.of(CompletionCaptured)
    assert [(e.untrainable, e.untrainable_at) for e in found] == [("invalid_logprobs", 1)] * 3


async def test_a_sample_that_ended_is_taken_though_its_stream_does_not(
    raw: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polar_proxy.engines.wire._REST_S", 0.5)
    raw.engine.raw, raw.engine.ends = orjson.dumps, False  # type: ignore[attr-defined]
    raw.engine.say(Say(ids=[50, 51]))
    async with asyncio.timeout(15):
        assert (await raw.told([user("go")], stream=True))["content"]
    (event,) = await raw.of(CompletionCaptured)
    assert event.untrainable == ""
    assert raw.proxy.service is not None and raw.proxy.service.count_running == 0


def _said(**choice: Any) -> bytes:
    return orjson.dumps({"choices": [{"token_ids": [5, 6], "finish_reason": "stop"} | choice]})


NO_ANSWERS = [
    b'{"error":"boom"}', b'{"error":{"message":"boom","code":"x"}}', b"[]", b"5", b"<html>", b"", b"null",
    b'{"choices":5}', b'{"choices":[]}', _said(token_ids=["a"]), _said(token_ids=[1.5]), _said(token_ids=[-1]),
    _said(token_ids=[1 << 40]), _said(token_ids=[True]), _said(token_ids="abc"), _said(finish_reason="cosmic"),
    _said(index=1),
    orjson.dumps({"choices": [{"index": i, "token_ids": [5], "finish_reason": "stop"} for i in (0, 1)]}),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_no_answer_is_an_error_of_the_engine(raw: Kit, stream: bool) -> None:
    """Never a completion, never an error of ours, and no slot stays taken."""
    for body in NO_ANSWERS:
        raw.engine.raw = lambda _, body=body: body  # type: ignore[attr-defined]
        response = await raw.chat([user(f"go {body!r}")], stream=stream)
        assert response.status_code in (500, 502) or (stream and '"error"' in response.text), body
        assert "internal error" not in response.text, body
    found = await raw.eventually(CompletionAborted, len(NO_ANSWERS))
    assert {e.reason for e in found} == {"engine_error"} and await raw.of(CompletionCaptured) == []
    assert raw.proxy.service is not None and raw.proxy.service.count_running == 0


@pytest.mark.parametrize(("lost", "stream"), [("prompt", False), ("usage", False), ("usage", True)])
async def test_a_chat_engine_that_leaves_out_ids_is_not_trained(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, lost: str, stream: bool
) -> None:
    def edit(body: dict[str, Any]) -> None:
        if lost == "prompt":
            body["prompt_token_ids"] = None
        else:
            body["choices"][0]["token_ids"] = body["choices"][0]["logprobs"] = body["usage"] = None

    engine = ScriptedEngine(model_dir)
    await engine.start()
    async with kit(model_dir, nats_server.url, bus, tmp_path, engine, proxy_engine_kind="vllm_chat") as proxy:
        proxy.engine.say(Say("I am heard", edit=edit))
        assert (await proxy.told([user("go")], stream=stream))["content"] == "I am heard"
        assert [e.untrainable for e in await proxy.of(CompletionCaptured)] == ["no_token_ids"]
    await engine.stop()


async def test_an_answer_of_many_megabytes_is_read_to_its_end(raw: Kit) -> None:
    raw.engine.raw = lambda body: orjson.dumps(body | {"padding": "x" * (9 << 20)})  # type: ignore[attr-defined]
    async with asyncio.timeout(20):
        assert (await raw.told([user("go")]))["content"] == "ok"
