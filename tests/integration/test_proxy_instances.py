"""Any instance serves any session: two take turns, one starts anew, and neither loses the thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from proxy_engine import Say, ScriptedEngine
from proxy_kit import Kit, kit, session_key, user

from polar_common.bus import Bus
from polar_common.nats_server import NatsServer
from polar_proxy.app import replica_name

pytestmark = pytest.mark.nats


@pytest.fixture
async def engine(model_dir: Path) -> AsyncIterator[ScriptedEngine]:
    made = ScriptedEngine(model_dir)
    await made.start()
    yield made
    await made.stop()


def assistant(message: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in message.items() if k in ("role", "content", "tool_calls")}


async def test_two_instances_take_turns_in_one_conversation(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, engine: ScriptedEngine
) -> None:
    async with AsyncExitStack() as stack:
        kits = [
            await stack.enter_async_context(
                kit(model_dir, nats_server.url, bus, tmp_path / str(n), engine, instance=f"p{n}")
            )
            for n in range(2)
        ]
        messages: list[dict[str, Any]] = []
        for turn in range(7):
            engine.say(
                Say(
                    f"<think>\nhm {turn}\n</think>\n\nanswer {turn}",
                    seed=turn,
                    finish="length" if turn == 3 else "stop",
                )
            )
            messages.append(user(f"question {turn}"))
            # Mostly alternating, with two in a row at one instance.
            message = await kits[(turn + turn // 4) % 2].told(messages, stream=bool(turn % 2))
            messages.append(assistant(message))
        resolved = await kits[0].agrees()
    assert [r.event.chain_class for r in resolved] == ["root"] + ["continued"] * 6
    assert {r.event.producer for r in resolved} == {"proxy/p0", "proxy/p1"}
    for before, after in pairwise(resolved):
        assert after.event.parent == before.completion
        assert after.prompt[: before.context_length].tolist() == before.context.tolist()


async def test_a_restarted_proxy_goes_on_where_the_log_ends(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, engine: ScriptedEngine
) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    call = '<tool_call>\n{"name":  "look", "arguments": {"at":  1}}\n</tool_call>'
    for turn in range(40):
        engine.say(Say(call if turn % 3 == 0 else f"answer {turn}", seed=turn))
    for life in range(4):
        async with kit(model_dir, nats_server.url, bus, tmp_path, engine, instance=f"life{life}") as proxy:
            for turn in range(10):
                messages.append(user(f"question {life} {turn}"))
                message = await proxy.told(messages, tools=tools)
                messages.append(assistant(message))
                for one in message.get("tool_calls") or ():
                    messages.append({"role": "tool", "tool_call_id": one["id"], "content": "seen"})
            resolved = await proxy.agrees()
    assert len(resolved) == 40
    assert [r.event.chain_class for r in resolved] == ["root"] + ["continued"] * 39
    assert sum(1 for r in resolved if r.event.prompt.via) == 1
    assert sum(r.event.prompt.new.n + r.event.sampled.n for r in resolved) == resolved[-1].context_length
    assert [r.event.head.at for r in resolved[1:]] == [resolved[0].completion] * 39


async def test_a_retry_at_another_instance_gets_the_recorded_answer_once(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.say("recorded", "new")
    async with kit(model_dir, nats_server.url, bus, tmp_path / "a", engine) as one:
        first = await one.chat([user("go")])
    async with kit(model_dir, nats_server.url, bus, tmp_path / "b", engine) as two:
        # Whether the first answer was delivered isn't known here.
        again = await two.chat([user("go")])
        assert again.content == first.content
        assert (await two.told([user("go")]))["content"] == "new"
        assert len(await two.agrees()) == 2


async def test_ids_that_name_a_response_expand_to_its_conversation(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.say(Say("first answer", seed=1), Say("second answer", seed=2), Say("third", seed=3))

    async def respond(proxy: Kit, text: str, previous: str | None) -> httpx.Response:
        body = {"model": "m", "instructions": "Be brief.", "input": text, "previous_response_id": previous}
        return await proxy.client.post(f"{proxy.base()}/v1/responses", json=body)

    async with kit(model_dir, nats_server.url, bus, tmp_path / "a", engine) as proxy:
        one = (await respond(proxy, "first question", None)).json()
        two = (await respond(proxy, "second question", one["id"])).json()
    async with kit(model_dir, nats_server.url, bus, tmp_path / "b", engine) as proxy:
        three = (await respond(proxy, "third question", two["id"])).json()
        assert three["status"] == "completed"
        resolved = await proxy.agrees()
        assert [r.event.chain_class for r in resolved] == ["root", "continued", "continued"]
        unknown = await respond(proxy, "x", "resp_" + "0" * 32)
        assert unknown.status_code in (400, 404)
        other = session_key(session="s1-abcdefghij0123456789-9")
        elsewhere = await proxy.client.post(
            f"{proxy.base(other)}/v1/responses", json={"model": "m", "input": "x", "previous_response_id": three["id"]}
        )
        assert elsewhere.status_code in (400, 404)


async def test_questions_beside_generation(proxy: Kit, tmp_path: Path) -> None:
    counted = await proxy.client.post(
        f"{proxy.base()}/v1/messages/count_tokens?beta=true",
        json={"model": "m", "messages": [user("how many tokens is this?")]},
    )
    assert counted.status_code == 200 and counted.json()["input_tokens"] > 10
    listed = await proxy.client.get(f"{proxy.base()}/v1/models")
    assert "policy" in [m["id"] for m in listed.json()["data"]]
    one = await proxy.client.get(f"{proxy.base()}/v1/models/gpt-unheard-of")
    assert one.status_code == 200
    assert (await proxy.client.get(f"{proxy.base()}/v1/responses")).status_code == 426
    assert (await proxy.client.post(f"{proxy.base()}/v1/embeddings", json={})).status_code == 404
    assert (await proxy.client.head(f"{proxy.base()}/api/hello")).status_code == 200
    assert await proxy.events() == [] and proxy.engine.journal == []
    health = (await proxy.client.get(f"{proxy.url}/health")).json()
    assert health["ready"] is True and health["engines"] == {replica_name(proxy.engine.url): True}
    await proxy.told([user("go")])
    metrics = (await proxy.client.get(f"{proxy.url}/metrics")).text
    assert 'polar_proxy_completions_total{chain="root",dialect="openai_chat",untrainable="no"}' in metrics
    found = (await proxy.client.get(f"{proxy.url}/internal/doctor")).json()
    name = replica_name(proxy.engine.url)
    told = {(f["area"], f["name"]): f["status"] for f in found}
    assert told["engine", name] == "ok" and told["context", "exact"] == "ok" and told["log", "seals"] == "ok"
    assert told["engine", f"{name}: log-probs"] == "ok"


async def test_the_unix_socket_serves_the_same(proxy: Kit) -> None:
    transport = httpx.AsyncHTTPTransport(uds=str(proxy.proxy.settings.socket_path))
    async with httpx.AsyncClient(transport=transport) as client:
        path = proxy.base()[len(proxy.url) :]
        body = {"model": "m", "messages": [user("go")], "stream": True}
        response = await client.post(f"http://proxy{path}/v1/chat/completions", json=body)
        assert response.status_code == 200 and response.text.endswith("[DONE]\n\n")
        assert (await client.get("http://proxy/internal/doctor")).status_code == 403
    assert len(await proxy.captured()) == 1


async def test_sick_replicas_leave_and_come_back(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, engine: ScriptedEngine
) -> None:
    other = ScriptedEngine(model_dir)
    await other.start()
    try:
        async with kit(
            model_dir,
            nats_server.url,
            bus,
            tmp_path,
            engine,
            proxy_engines=(engine.url, other.url),
            proxy_health_s=0.05,
        ) as proxy:
            keys = [session_key(session=f"s1-abcdefghij0123456789-{n}") for n in range(6)]
            await asyncio.gather(*(proxy.chat([user("go")], key=k) for k in keys))
            assert engine.journal and other.journal
            stays = engine if engine.journal[0].request_id in {
                r.completion for r in await proxy.captured(keys[0])
            } else other  # fmt: skip
            before = len(stays.journal)
            await proxy.chat([user("go"), {"role": "assistant", "content": "ok"}, user("on")], key=keys[0])
            assert len(stays.journal) == before + 1
            engine.down = True
            await asyncio.sleep(0.4)
            seen = len(engine.journal)
            assert {(await proxy.chat([user("go")], key=k)).status_code for k in keys} == {200}
            assert len(engine.journal) == seen
            other.down = True
            await asyncio.sleep(0.4)
            refused = await proxy.chat([user("go")], key=keys[0])
            assert refused.status_code == 503 and orjson.loads(refused.content)["error"]
            engine.down = other.down = False
            await asyncio.sleep(0.4)
            assert (await proxy.chat([user("go")], key=keys[0])).status_code == 200
    finally:
        await other.stop()
