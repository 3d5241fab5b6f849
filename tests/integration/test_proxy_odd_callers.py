"""Callers in odd order: some ask for ever, some go away twice, some retry beside a sibling or leave as a call fails."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxy_engine import Say
from proxy_kit import Kit, kit, session_key, user

from polar_common.bus import Bus
from polar_common.events import (
    CompletionAborted,
    CompletionCaptured,
    CompletionRejected,
    CompletionUndelivered,
    PolicyPublished,
)
from polar_common.nats_server import NatsServer
from polar_common.task_spec import SamplingSpec

pytestmark = pytest.mark.nats
RETRY = {"x-stainless-retry-count": "1"}


@pytest.mark.parametrize("why", ["malformed", "sealed"])
async def test_refusals_before_the_session_is_known_are_bounded_on_the_log_too(
    proxy: Kit, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polar_proxy.publish._REJECTIONS", 5)
    if why == "sealed":
        await proxy.seal()
        await asyncio.sleep(0.2)
    messages: Any = [user("go")] if why == "sealed" else 5
    for _ in range(12):
        assert (await proxy.chat(messages)).status_code == (409 if why == "sealed" else 400)
    await asyncio.sleep(0.2)
    assert [e.reason for e in await proxy.of(CompletionRejected)] == [why] * 5


async def test_a_call_that_is_to_be_made_again_costs_nothing(proxy: Kit) -> None:
    """A harness that waits for new weights would else have used its calls up before it made one."""
    assert proxy.proxy.service is not None
    (replica,) = proxy.proxy.service.pool.replicas
    key = session_key(calls=1)
    replica.draining = True
    for _ in range(3):
        assert (await proxy.chat([user("go")], key=key)).status_code == 429
    replica.draining = False
    assert (await proxy.chat([user("go")], key=key)).status_code == 200
    assert (await proxy.chat([user("on")], key=key)).status_code == 403


async def test_an_answer_that_reached_nobody_twice_is_still_given(proxy: Kit) -> None:
    assert proxy.proxy.service is not None
    publisher = proxy.proxy.service.publisher
    real, entered = publisher.captured, asyncio.Event()

    async def slow(session: Any, item: Any) -> None:
        entered.set()
        await asyncio.sleep(0.5)
        await real(session, item)

    publisher.captured = slow  # type: ignore[method-assign]
    proxy.engine.say(Say("precious"), Say("another"))
    # The second one comes while the answer is being committed, waits for it, and leaves as well.
    for _ in range(2):
        waiting = asyncio.ensure_future(proxy.chat([user("go")]))
        await entered.wait()
        await asyncio.sleep(0.05)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
            await waiting
        await asyncio.sleep(0.1)
    await proxy.eventually(CompletionUndelivered)
    assert (await proxy.told([user("go")]))["content"] == "precious"
    assert len(await proxy.captured()) == 1


@pytest.mark.parametrize("early", [True, False])
async def test_the_retry_of_a_failed_call_is_no_retry_of_its_equal_sibling(proxy: Kit, early: bool) -> None:
    """Two samples of one request: one is served, before or after the other failed; the other is tried again."""
    hold = asyncio.Event()
    proxy.engine.say(Say("first", hold=hold), Say(status=500), "second")
    sibling = asyncio.ensure_future(proxy.told([user("go")]))
    while not proxy.engine.journal:
        await asyncio.sleep(0.01)
    if early:
        hold.set()
        await sibling
    assert (await proxy.chat([user("go")])).status_code == 500
    hold.set()
    assert (await sibling)["content"] == "first"
    again = await proxy.chat([user("go")], headers=RETRY)
    assert again.json()["choices"][0]["message"]["content"] == "second"
    assert len(await proxy.captured()) == 2


@pytest.mark.parametrize("restarted", [False, True])
async def test_the_retry_of_a_failed_call_is_sampled_once(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, proxy: Kit, restarted: bool
) -> None:
    """Its answer is then given again like any other; that an earlier try failed is over and done with."""
    proxy.engine.say(Say(status=500), "first", "second")
    assert (await proxy.chat([user("go")])).status_code == 500
    said = await proxy.chat([user("go")], headers=RETRY)
    if restarted:
        async with kit(model_dir, nats_server.url, bus, tmp_path / "b", proxy.engine, instance="b") as other:
            again = await other.chat([user("go")], headers=RETRY)
    else:
        again = await proxy.chat([user("go")], headers=RETRY)
    assert said.content == again.content and b"first" in said.content
    assert len(await proxy.captured()) == 1


async def test_a_caller_that_leaves_as_its_call_fails_leaves_the_record(proxy: Kit) -> None:
    assert proxy.proxy.service is not None
    publisher = proxy.proxy.service.publisher
    real, entered = publisher.aborted, asyncio.Event()

    async def slow(*args: Any, **more: Any) -> None:
        entered.set()
        await asyncio.sleep(0.4)
        await real(*args, **more)

    publisher.aborted = slow  # type: ignore[method-assign]
    proxy.engine.say(Say(status=500))
    task = asyncio.ensure_future(proxy.chat([user("go")]))
    await entered.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
        await task
    (event,) = await proxy.eventually(CompletionAborted)
    assert event.reason == "engine_error"
    assert proxy.proxy.service.count_running == 0


async def test_an_engine_that_tells_no_versions_is_not_taken_at_its_word_over_a_swap(proxy: Kit) -> None:
    """The weights changed under a call, and nobody can say where."""

    def edit(body: dict[str, Any]) -> None:
        body["choices"][0]["weight_versions"] = None

    proxy.engine.say(
        Say("one two three four five six seven", delay_s=0.15, chunk=1, edit=edit), Say("after", edit=edit)
    )
    running = asyncio.ensure_future(proxy.told([user("go")], stream=True))
    await asyncio.sleep(0.3)
    await proxy.bus.once(
        PolicyPublished(
            segment="s1", version="step-1", policy_seq=1, model="policy", weights="/w", weights_hash="ab" * 32
        )
    )
    await running
    await proxy.told([user("later")])
    swapped, after = await proxy.of(CompletionCaptured)
    assert swapped.kv_mixed and swapped.policy_seq == 0
    assert not after.kv_mixed and after.policy_seq == 1


@pytest.mark.parametrize(("context", "begin"), [("native", "I began "), ("exact", "I began "), ("exact", "")])
async def test_a_begun_turn_is_known_to_another_instance(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, proxy: Kit, context: Any, begin: str
) -> None:
    key = session_key(sampling=SamplingSpec(context=context))
    proxy.engine.say("and said", "more")
    begun = [user("go"), {"role": "assistant", "content": begin}]
    said = (await proxy.chat(begun, key=key)).json()["choices"][0]["message"]["content"]
    whole = [user("go"), {"role": "assistant", "content": f"{begin}{said}"}, user("on")]
    async with kit(model_dir, nats_server.url, bus, tmp_path / "b", proxy.engine, instance="b") as other:
        assert (await other.chat(whole, key=key)).status_code == 200
        one, two = await other.captured(key)
    assert two.event.parent == one.completion


@pytest.mark.parametrize("name", ["messages", "tools"])
async def test_template_arguments_are_no_way_past_the_request(proxy: Kit, name: str) -> None:
    """The record would say that the model was shown what the request holds."""
    response = await proxy.chat([user("go")], chat_template_kwargs={name: [{"role": "user", "content": "else"}]})
    assert response.status_code == 400 and response.json()["error"]["param"] == f"chat_template_kwargs.{name}"
    assert proxy.engine.journal == []


async def test_a_new_session_is_served_though_all_places_are_taken(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    async with kit(model_dir, nats_server.url, bus, tmp_path, proxy_sessions=1) as proxy:
        hold = asyncio.Event()
        proxy.engine.say(Say("slow", hold=hold), "quick")
        running = asyncio.ensure_future(proxy.told([user("go")]))
        await asyncio.sleep(0.2)
        other = await proxy.chat([user("go")], key=session_key(f"{proxy.key.task}-1"))
        hold.set()
        assert other.status_code == 200, other.text
        assert (await running)["content"] == "slow"


async def test_an_item_that_is_not_shown_makes_the_context_unfaithful(proxy: Kit) -> None:
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": "go"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "message", "role": "user", "content": "on"},
    ]
    response = await proxy.client.post(f"{proxy.base()}/v1/responses", json={"model": "m", "input": items})
    assert response.status_code == 200, response.text
    (event,) = await proxy.of(CompletionCaptured)
    assert event.dropped and not event.context_faithful
