"""What goes wrong around a call: clients that leave, retries, seals, sick engines, limits. Each ends on the log."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxy_engine import Say
from proxy_kit import (
    CompletionAborted,
    CompletionRejected,
    CompletionUndelivered,
    Kit,
    SamplingSpec,
    kit,
    session_key,
    streamed,
    user,
)

from polar_common.bus import Bus
from polar_common.keys import sign
from polar_common.nats_server import NatsServer

pytestmark = pytest.mark.nats


async def leave(kit: Kit, after_s: float, **body: Any) -> None:
    """A call whose client goes away."""
    task = asyncio.ensure_future(kit.chat([user("go")], **body))
    await asyncio.sleep(after_s)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
        await task


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_generation_within_a_second(proxy: Kit, stream: bool) -> None:
    proxy.engine.say(Say("one two three four five six seven", delay_s=0.3 if stream else 30, chunk=1))
    await leave(proxy, 0.5, stream=stream)
    left = time.monotonic()
    event = (await proxy.eventually(CompletionAborted))[0]
    while not proxy.engine.journal[0].aborted and time.monotonic() - left < 1:
        await asyncio.sleep(0.01)
    assert proxy.engine.journal[0].aborted
    assert event.reason == "client_gone" and event.completion == proxy.engine.journal[0].request_id
    assert (event.sampled is not None) == stream
    assert await proxy.captured() == []
    assert proxy.proxy.service is not None and proxy.proxy.service.count_running == 0


async def test_a_retry_of_an_aborted_call_is_sampled_anew(proxy: Kit) -> None:
    proxy.engine.say(Say("lost", delay_s=30), Say("again"))
    await leave(proxy, 0.2)
    message = await proxy.told([user("go")])
    assert message["content"] == "again"
    assert len(await proxy.eventually(CompletionAborted)) == 1
    assert [r.event.completion for r in await proxy.agrees()] == [proxy.engine.journal[1].request_id]


@pytest.mark.parametrize("again", [False, True])
async def test_an_answer_nobody_received_is_given_to_the_retry_in_the_form_it_asks_for(proxy: Kit, again: bool) -> None:
    """The client goes away just when the answer is being committed."""
    assert proxy.proxy.service is not None
    publisher = proxy.proxy.service.publisher
    real = publisher.captured
    entered = asyncio.Event()

    async def slow(session: Any, item: Any) -> None:
        entered.set()
        await asyncio.sleep(0.3)
        await real(session, item)

    publisher.captured = slow  # type: ignore[method-assign]
    proxy.engine.say(Say("precious", seed=5))
    task = asyncio.ensure_future(proxy.chat([user("go")], stream=not again))
    await entered.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
        await task
    await asyncio.sleep(0.1)
    message = await proxy.told([user("go")], stream=again)
    assert message["content"] == "precious"
    assert len(proxy.engine.journal) == 1
    assert len(await proxy.eventually(CompletionUndelivered)) == 1
    assert len(await proxy.captured()) == 1
    # Once replayed it counts as delivered: the next identical request is a sample of its own.
    proxy.engine.say("fresh")
    assert (await proxy.told([user("go")], stream=again))["content"] == "fresh"
    assert (await proxy.captured())[-1].event.delivered


async def test_a_marked_retry_gets_the_same_bytes_and_an_unmarked_repeat_a_new_sample(proxy: Kit) -> None:
    proxy.engine.say("first", "second")
    one = await proxy.chat([user("go")])
    retried = await proxy.chat([user("go")], headers={"x-stainless-retry-count": "1"})
    assert retried.content == one.content
    repeated = await proxy.chat([user("go")], headers={"x-stainless-retry-count": "0"})
    assert repeated.json()["choices"][0]["message"]["content"] == "second"
    restreamed = await proxy.chat([user("go")], headers={"x-stainless-retry-count": "1"}, stream=True)
    assert streamed(restreamed.text)["content"] == "second"
    assert len(await proxy.agrees()) == 2


async def test_a_sealed_key_is_refused_and_its_running_calls_end(proxy: Kit) -> None:
    proxy.engine.say("ok", Say("slow", delay_s=30))
    await proxy.told([user("go")])
    running = asyncio.ensure_future(proxy.chat([user("wait")]))
    await asyncio.sleep(0.2)
    await proxy.seal()
    response = await asyncio.wait_for(running, 5)
    assert response.status_code == 409 and response.json()["error"]["code"] == "session_sealed"
    assert (await proxy.eventually(CompletionAborted))[0].reason == "sealed"
    late = await proxy.chat([user("late")])
    assert late.status_code == 409 and late.headers["x-should-retry"] == "false"
    assert (await proxy.eventually(CompletionRejected))[0].reason == "sealed"
    other = await proxy.chat([user("go")], key=session_key(attempt=2))
    assert other.status_code == 200


async def test_a_seal_in_mid_stream_is_told_inside_the_stream(proxy: Kit) -> None:
    proxy.engine.say(Say("one two three four five six", delay_s=0.2, chunk=1))
    running = asyncio.ensure_future(proxy.chat([user("go")], stream=True))
    await asyncio.sleep(0.5)
    await proxy.seal()
    response = await asyncio.wait_for(running, 5)
    assert "session_sealed" in response.text and "[DONE]" not in response.text
    assert await proxy.captured() == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("say", "status", "kind"),
    [
        (Say(status=429, headers={"retry-after": "7"}), 429, "rate_limit_error"),
        (Say(status=500), 500, "server_error"),
        (Say(status=400, error="bad sampling"), 400, "invalid_request_error"),
        (Say(status=400, error="This model's maximum context length is 9 tokens"), 400, "invalid_request_error"),
    ],
)
async def test_errors_of_the_engine_reach_the_harness_in_its_shape(
    proxy: Kit, stream: bool, say: Say, status: int, kind: str
) -> None:
    proxy.engine.say(say)
    response = await proxy.chat([user("go")], stream=stream)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == kind
    if status == 429:
        assert response.headers["retry-after"] == "7"
    if "maximum" in say.error:
        assert error["code"] == "context_length_exceeded"
    reason = "context_full" if "maximum" in say.error else "engine_error"
    assert (await proxy.eventually(CompletionAborted))[0].reason == reason
    assert await proxy.captured() == []


async def test_a_stream_that_breaks_off_is_an_error_in_the_stream_and_no_completion(proxy: Kit) -> None:
    proxy.engine.say(Say("one two three four five six", chunk=1, cut=4, delay_s=0.01))
    response = await proxy.chat([user("go")], stream=True)
    assert response.status_code == 200 and '"error"' in response.text and "[DONE]" not in response.text
    event = (await proxy.eventually(CompletionAborted))[0]
    assert event.reason == "engine_error" and event.sampled is not None and event.sampled.n == 4
    proxy.engine.say("whole")
    assert (await proxy.told([user("go")]))["content"] == "whole"


@pytest.mark.parametrize(
    ("bad", "reason", "at"),
    [
        ([-0.5, None, -0.7], "invalid_logprobs", 1),
        ([float("-inf"), -0.1, -0.7], "invalid_logprobs", 0),
        ([-0.5, -0.1, 3.0], "invalid_logprobs", 2),
        ([-0.5, -0.1], "length_mismatch", None),
        (None, "no_logprobs", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_unusable_log_probs_are_recorded_and_the_harness_is_served(
    proxy: Kit, bad: list[float | None] | None, reason: str, at: int | None, stream: bool
) -> None:
    def edit(body: dict[str, Any]) -> None:
        choice = body["choices"][0]
        if bad is None:
            choice["logprobs"] = None
            return
        content = [{"token_id": 5, "logprob": "-inf" if v == float("-inf") else v} for v in bad]
        for entry in content:
            if entry["logprob"] == "-inf":
                entry["logprob"] = -1e400
        choice["logprobs"] = {"content": content}

    # JSON has no infinity; engines write null or a huge number.
    if bad is not None:
        bad = [None if v == float("-inf") else v for v in bad]
    proxy.engine.say(Say(ids=[50, 51], edit=edit))
    assert (await proxy.told([user("go")], stream=stream))["content"]
    event = (await proxy.agrees())[0].event
    assert event.untrainable == reason and event.untrainable_at == at


async def test_an_engine_that_saw_other_ids_is_found_out(proxy: Kit) -> None:
    def edit(body: dict[str, Any]) -> None:
        body["prompt_token_ids"] = [*body["prompt_token_ids"][:-1], 7]

    proxy.engine.say(Say("ok", edit=edit))
    await proxy.told([user("go")])
    event = (await proxy.captured())[0].event
    assert event.untrainable == "engine_retokenised" and event.context_exact is False


async def test_greedy_and_penalised_sampling_is_untrainable_where_the_harness_decides(proxy: Kit) -> None:
    key = session_key(sampling=SamplingSpec(mode="follow"))
    for body, reason in (
        ({"temperature": 0.0}, "greedy"),
        ({"frequency_penalty": 0.5}, "penalties"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"temperature": 0.7, "top_p": 0.9}, ""),
    ):
        assert (await proxy.chat([user(f"go {reason}")], key=key, **body)).status_code == 200
        event = (await proxy.captured(key))[-1].event
        assert event.untrainable == reason
    assert event.sampling.temperature == 0.7 and event.sampling.top_p == 0.9


async def test_unknown_and_expired_keys_are_401_and_leave_nothing(proxy: Kit) -> None:
    for token in ("nobody", sign(session_key(), b"other"), sign(session_key(), b"test-secret")[:-1]):
        response = await proxy.client.post(
            f"{proxy.url}/s/{token}/v1/chat/completions", json={"model": "m", "messages": [user("go")]}
        )
        assert response.status_code == 401, token
    assert proxy.engine.journal == [] and await proxy.events() == []


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "x-goog-api-key"])
async def test_the_key_is_taken_from_the_header_where_the_path_has_none(proxy: Kit, header: str) -> None:
    token = sign(proxy.key, b"test-secret")
    value = f"Bearer {token}" if header == "authorization" else token
    response = await proxy.client.post(
        f"{proxy.url}/v1/chat/completions", json={"model": "m", "messages": [user("go")]}, headers={header: value}
    )
    assert response.status_code == 200
    assert len(await proxy.captured()) == 1


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b'{"model":"m","messages":5}', "messages"),
        (b"not json", ""),
        (b'{"messages":[{"role":"user","content":"x"}]}', "model"),
        (b'{"model":"m","messages":[{"role":"user","content":[{"type":"tune"}]}]}', "messages[0].content[0].type"),
        (b'{"model":"m","messages":[' + b"[" * 5000 + b"]" * 5000 + b"]}", ""),
    ],
)
async def test_malformed_requests_are_400_with_the_path_and_leak_no_slot(proxy: Kit, body: bytes, path: str) -> None:
    for _ in range(3):
        response = await proxy.client.post(f"{proxy.base()}/v1/chat/completions", content=body)
        assert response.status_code == 400, response.text
        assert path in response.json()["error"]["message"]
    assert proxy.proxy.service is not None and proxy.proxy.service.count_running == 0
    wanted = "nesting" if b"[[[" in body else "malformed"
    assert {e.reason for e in await proxy.eventually(CompletionRejected, 3)} == {wanted}
    assert (await proxy.chat([user("go")])).status_code == 200


async def test_limits_of_a_session(model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path) -> None:
    async with kit(
        model_dir, nats_server.url, bus, tmp_path, proxy_session_concurrency=2, proxy_body_limit=5000
    ) as proxy:
        calls = session_key(calls=2)
        assert [(await proxy.chat([user("go")], key=calls)).status_code for _ in range(3)] == [200, 200, 403]
        tokens = session_key(session="s1-abcdefghij0123456789-1", total_tokens=5)
        assert [(await proxy.chat([user("go")], key=tokens)).status_code for _ in range(3)] == [200, 200, 403]
        wide = session_key(session="s1-abcdefghij0123456789-2")
        proxy.engine.say(*(Say("slow", delay_s=0.5) for _ in range(2)))
        slow = [asyncio.ensure_future(proxy.chat([user("go")], key=wide)) for _ in range(2)]
        await asyncio.sleep(0.2)
        refused = await proxy.chat([user("go")], key=wide)
        assert refused.status_code == 429 and refused.headers["retry-after"]
        assert [r.status_code for r in await asyncio.gather(*slow)] == [200, 200]
        large = await proxy.chat([user("x" * 6000)], key=wide)
        assert large.status_code == 413
        reasons = [e.reason for e in await proxy.eventually(CompletionRejected, 2, key=wide)]
        assert sorted(reasons) == ["session_concurrency", "too_large"]


async def test_max_tokens_is_clamped_to_the_window_and_overflow_is_the_providers_own(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    async with kit(model_dir, nats_server.url, bus, tmp_path, proxy_context_window=100) as proxy:
        await proxy.told([user("go")], max_tokens=5000)
        one = (await proxy.captured())[0]
        assert one.event.sampling.max_tokens == 100 - len(one.prompt)
        assert one.event.sampling_asked["max_tokens"] == 5000
        response = await proxy.chat([user("many words " * 100)])
        assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"


async def test_slow_senders_are_cut_off_and_hold_nothing(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    async with kit(model_dir, nats_server.url, bus, tmp_path, proxy_request_s=0.4, proxy_header_limit=2048) as proxy:
        port = int(proxy.url.rpartition(":")[2])
        path = proxy.base()[len(proxy.url) :]

        async def send(*pieces: bytes, pause: float) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(pause)
            answer = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            return answer

        head = f"POST {path}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n".encode()
        assert b" 408 " in await send(head[:20], head[20:], pause=0.1)
        assert b" 431 " in await send(head + b"x-long: " + b"y" * 4000, pause=0)
        assert b" 431 " in await send(head + b"x-long: " + b"y" * 4000 + b"\r\n\r\n", pause=0)
        slow = head + b"connection: close\r\ncontent-length: 100\r\n\r\n"
        assert b" 408 " in await send(slow, b"{", b'"', pause=0.1)
        assert proxy.proxy.service is not None and proxy.proxy.service.count_running == 0
        assert (await proxy.chat([user("go")])).status_code == 200
