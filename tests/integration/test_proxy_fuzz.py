"""Broken requests by the thousand: each is served or refused in its provider's shape, and none leaves anything behind.

`make fuzz` runs the long form.
"""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from mutations import Broken, broken, whole
from proxy_engine import Heard, Say, ScriptedEngine
from proxy_kit import TASK, Kit, kit, nothing_left, session_key

from polar_common.bus import Bus
from polar_common.nats_server import NatsServer
from polar_proxy.dialects import route

pytestmark = pytest.mark.nats

MARK = re.compile(r"markof[a-h]\b")
MARKS = [f"markof{letter}" for letter in "abcdefgh"]
ENDS = {
    "anthropic": (b"event: message_stop", b"event: error"),
    "openai_chat": (b"data: [DONE]", b'"error"'),
    "openai_responses": (b"event: response.completed", b"event: response.incomplete", b"event: response.failed"),
    "google": (b'"finishReason"', b'"error"'),
}


@dataclass
class Seen:
    """What came back."""

    served: int = 0
    refused: int = 0
    marked: int = 0
    faults: list[str] = field(default_factory=list)


def shaped(name: str, told: Any) -> bool:
    """Whether an error looks like the provider's."""
    if name == "google" and isinstance(told, list) and len(told) == 1:
        told = told[0]
    if not isinstance(told, dict) or not isinstance(told.get("error"), dict):
        return False
    error = told["error"]
    if not error.get("message"):
        return False
    if name == "anthropic":
        return told.get("type") == "error" and isinstance(error.get("type"), str)
    if name == "google":
        return isinstance(error.get("code"), int) and isinstance(error.get("status"), str)
    return isinstance(error.get("type"), str) and {"param", "code"} <= error.keys()


def judge(request: Broken, status: int, content: bytes, kind: str, mark: str, seen: Seen) -> None:
    """Add what an answer says to `seen`."""
    name = route("POST", request.path, {}, request.headers)[0].name
    others = set(MARK.findall(content.decode("utf-8", "replace"))) - {mark}
    wrong = ""
    if others:
        wrong = f"told {mark} of {others}"
    elif status == 200:
        seen.served += 1
        seen.marked += mark.encode() in content
        if "event-stream" in kind and not any(end in content[-4000:] for end in ENDS[name]):
            wrong = "a stream without an end"
    elif 400 <= status < 500:
        seen.refused += 1
        if not shaped(name, orjson.loads(content)):
            wrong = "another shape"
    else:
        wrong = "a fault of ours"
    if wrong:
        seen.faults.append(f"{wrong}: {status} {content[:300]!r} for {request}"[:3000])


async def attack(proxy: Kit, count: int, seed: int) -> Seen:
    """Send `count` broken requests from eight sessions at a time, each its own."""
    seen = Seen()

    async def one(number: int) -> None:
        rng = random.Random(f"{seed}.{number}")
        mark, requests = MARKS[number], whole(MARKS[number])
        key = session_key(f"{TASK}-{number}", calls=10**9)
        for _ in range(count // len(MARKS)):
            request = broken(rng.choice(requests), rng)
            url = f"{proxy.base(key)}{request.path}" + (f"?{request.query}" if request.query else "")
            try:
                response = await proxy.client.post(url, content=request.body, headers=request.headers, timeout=60)
            except httpx.HTTPError as error:
                seen.faults.append(f"{error!r} for {request}"[:3000])
                continue
            kind = response.headers.get("content-type", "")
            judge(request, response.status_code, response.content, kind, mark, seen)

    await asyncio.gather(*(one(n) for n in range(len(MARKS))))
    return seen


def echo(engine: ScriptedEngine) -> Any:
    """Says whose marks the prompt holds."""

    def script(heard: Heard) -> Say:
        marks = set(MARK.findall(engine.tokenizer.decode(heard.prompt)))
        engine.journal.clear()
        return Say(" ".join(sorted(marks)) or "ok", seed=len(heard.prompt))

    return script


@pytest.mark.parametrize("count", [800, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
async def test_broken_requests_are_answered_in_shape_and_leave_nothing_behind(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, count: int
) -> None:
    engine = ScriptedEngine(model_dir)
    engine.script = echo(engine)
    await engine.start()
    try:
        async with kit(model_dir, nats_server.url, bus, tmp_path, engine, proxy_session_rate=1e6) as proxy:
            seen = await attack(proxy, count, seed=count)
            assert not seen.faults, "\n\n".join(seen.faults[:10])
            # Else nothing would be shown by that nothing of others' came back.
            assert seen.served > count // 5 and seen.refused > count // 20 and seen.marked > count // 10, seen
            await nothing_left(proxy)
    finally:
        await engine.stop()


def trouble(rng: random.Random) -> Any:
    """An engine that refuses, breaks off, or takes its time."""

    def script(heard: Heard) -> Say:
        kind = rng.random()
        if kind < 0.2:
            return Say(status=rng.choice((400, 429, 500, 503)), headers={"retry-after": "1"})
        cut = rng.randrange(8) if kind < 0.4 else None
        return Say("some words that take a while", chunk=1, cut=cut, delay_s=0.02 if kind > 0.7 else 0.0)

    return script


async def test_an_engine_in_trouble_and_clients_that_leave_hold_nothing(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """A 5xx is the engine's own then; whatever ends a call, its slot and its replica's place are free again."""
    engine, statuses = ScriptedEngine(model_dir), set[int]()
    engine.script = trouble(random.Random(1))
    await engine.start()
    try:
        async with kit(model_dir, nats_server.url, bus, tmp_path, engine, proxy_session_rate=1e6) as proxy:

            async def one(number: int) -> None:
                rng, requests = random.Random(number), whole(MARKS[number])
                key = session_key(f"{TASK}-{number}", calls=10**9)
                for _ in range(50):
                    request = rng.choice(requests)
                    url = f"{proxy.base(key)}{request.path}?{request.query}"
                    patience = rng.choice((0.02, 0.1, 60, 60))
                    try:
                        answer = await proxy.client.post(
                            url, content=request.body, headers=request.headers, timeout=patience
                        )
                    except httpx.TimeoutException:
                        assert patience < 1
                        continue
                    statuses.add(answer.status_code)

            await asyncio.gather(*(one(n) for n in range(len(MARKS))))
            assert {200, 400, 429} <= statuses and statuses <= {200, 400, 429, 500, 502, 503}
            await nothing_left(proxy)
    finally:
        await engine.stop()
