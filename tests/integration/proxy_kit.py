"""A whole proxy on loopback for tests: real log, scripted engine, real renderer, real HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
from proxy_engine import Say, ScriptedEngine

from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.events import (
    CompletionAborted,
    CompletionCaptured,
    CompletionRejected,
    CompletionUndelivered,
    Event,
    SessionSealed,
)
from polar_common.keys import SessionKey, sign
from polar_common.task_spec import SamplingSpec
from polar_common.tasks import cancel_and_wait, spawn
from polar_proxy.app import Proxy
from polar_proxy.settings import ProxySettings
from polar_render.records import ResolvedCompletion, blobs_needed, resolve_session

SECRET = "test-secret"
TASK = "s1-abcdefghij0123456789"


def session_key(session: str = f"{TASK}-0", attempt: int = 1, **more: Any) -> SessionKey:
    return SessionKey(
        session=session, task=TASK, run="run", attempt=attempt, model="policy", expires=int(time.time()) + 3600, **more
    )


@dataclass
class Kit:
    """One proxy instance and a client."""

    proxy: Proxy
    engine: ScriptedEngine
    bus: Bus
    url: str
    client: httpx.AsyncClient
    key: SessionKey = field(default_factory=session_key)

    def base(self, key: SessionKey | None = None) -> str:
        return f"{self.url}/s/{sign(key or self.key, SECRET.encode())}"

    async def chat(
        self,
        messages: list[dict[str, Any]],
        key: SessionKey | None = None,
        headers: dict[str, str] | None = None,
        **body: Any,
    ) -> httpx.Response:
        """One Chat Completions call."""
        url = f"{self.base(key)}/v1/chat/completions"
        return await self.client.post(url, json={"model": "gpt-x", "messages": messages, **body}, headers=headers)

    async def told(self, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
        """The assistant message of a call, streamed or not."""
        response = await self.chat(messages, **body)
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            return dict(response.json()["choices"][0]["message"])
        return streamed(response.text)

    async def events(self, key: SessionKey | None = None, completions: bool = True) -> list[Event]:
        stored = await self.bus.read_session((key or self.key).session)
        return [s.event for s in stored if ".completion." in s.subject]

    async def captured(self, key: SessionKey | None = None) -> list[ResolvedCompletion]:
        """The session's completions, resolved from the log."""
        events = [e for e in await self.events(key) if isinstance(e, CompletionCaptured)]
        blobs = Blobs(self.bus, "s1")
        bodies = {r.sha256: await blobs.get(r) for r in blobs_needed(events)}
        return list(resolve_session(events, bodies).values())

    async def of(self, kind: type[Event], key: SessionKey | None = None) -> list[Any]:
        return [e for e in await self.events(key) if isinstance(e, kind)]

    async def eventually(self, kind: type[Event], count: int = 1, key: SessionKey | None = None) -> list[Any]:
        """Wait up to five seconds for so many events of a kind."""
        for _ in range(250):
            found = await self.of(kind, key)
            if len(found) >= count:
                return found
            await asyncio.sleep(0.02)
        raise AssertionError(f"{len(found)} of {count} {kind.__name__}")

    async def seal(self, key: SessionKey | None = None) -> None:
        k = key or self.key
        await self.bus.once(
            SessionSealed(session=k.session, attempt=k.attempt, run=k.run, task=k.task, reason="exited")
        )

    async def agrees(self, key: SessionKey | None = None) -> list[ResolvedCompletion]:
        """The log and the engine's journal tell the same ids, call by call."""
        resolved = await self.captured(key)
        heard = {h.request_id: h for h in self.engine.journal}
        for item in resolved:
            np.testing.assert_array_equal(item.prompt, heard[item.completion].prompt)
            np.testing.assert_array_equal(item.sampled, heard[item.completion].sampled)
        return resolved


async def nothing_left(proxy: Kit) -> None:
    """No slot, no call, no replica's place is held; the next call is served."""
    service = proxy.proxy.service
    assert service is not None
    for _ in range(100):
        if not service.count_running:
            break
        await asyncio.sleep(0.05)
    assert service.count_running == 0 and not service.running and len(service.sweeper) == 0
    assert [r.running for r in service.pool.replicas] == [0]
    assert all(not s.index.live and not s.running for s in service.sessions.values())
    proxy.engine.script = lambda heard: Say()
    assert (await proxy.chat([user("go")])).status_code == 200


def streamed(text: str) -> dict[str, Any]:
    """The assistant message that a Chat stream's deltas add up to."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    assert text.rstrip().endswith("data: [DONE]"), text[-500:]
    for line in text.split("\n"):
        if not line.startswith("data: {"):
            continue
        chunk = orjson.loads(line[6:])
        assert "error" not in chunk, line
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            if delta.get("reasoning_content"):
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
                if part.get("id"):
                    call["id"] = part["id"]
                call["function"]["name"] += part.get("function", {}).get("name") or ""
                call["function"]["arguments"] += part.get("function", {}).get("arguments") or ""
            if choice.get("finish_reason"):
                message["finish_reason"] = choice["finish_reason"]
    if calls:
        message["tool_calls"] = [calls[i] for i in sorted(calls)]
    return message


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def settings(model_dir: Path, bus_url: str, data: Path, *urls: str, **more: Any) -> ProxySettings:
    # Refusals are waited for where they are tested.
    chosen: dict[str, Any] = {"proxy_engines": urls, "log_level": "warning", "proxy_wait_s": 0} | more
    return ProxySettings(data=data, nats=bus_url, secret=SECRET, proxy_model_dir=model_dir, **chosen)


@asynccontextmanager
async def running(proxy: Proxy) -> AsyncIterator[str]:
    """A proxy's base URL while it runs in this loop."""
    task = spawn(proxy.run(), name="proxy")
    try:
        while "port" not in proxy.house.facts or not (proxy.service and proxy.service.seals.ready):
            assert not task.done(), task.exception()
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{proxy.house.facts['port']}"
        async with httpx.AsyncClient() as client:
            for _ in range(200):
                try:
                    if (await client.get(f"{url}/health")).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.01)
        yield url
    finally:
        proxy.house.stop.set()
        try:
            await asyncio.wait_for(asyncio.shield(task), 15)
        finally:
            await cancel_and_wait(task)


@asynccontextmanager
async def kit(
    model_dir: Path, nats_url: str, bus: Bus, data: Path, engine: ScriptedEngine | None = None, **more: Any
) -> AsyncIterator[Kit]:
    """A proxy with one scripted engine (made here unless given)."""
    made = engine or ScriptedEngine(model_dir)
    if not made.url:
        await made.start()
    proxy = Proxy(settings(model_dir, nats_url, data, made.url, **more))
    try:
        async with running(proxy) as url, httpx.AsyncClient(timeout=30) as client:
            yield Kit(proxy, made, bus, url, client)
    finally:
        if engine is None:
            await made.stop()


__all__ = [
    "SECRET", "TASK", "CompletionAborted", "CompletionCaptured", "CompletionRejected", "CompletionUndelivered", "Kit",
    "SamplingSpec", "kit", "nothing_left", "running", "session_key", "settings", "streamed", "user",
]  # fmt: skip
