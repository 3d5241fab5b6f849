"""Every limit of the proxy: refused with its status in the provider's shape, counted, recorded, and nothing is held."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from proxy_engine import Say
from proxy_kit import TASK, Kit, kit, session_key, user

from polar_common.bus import Bus
from polar_common.events import CompletionAborted, CompletionRejected
from polar_common.nats_server import NatsServer
from polar_proxy.metrics import METRICS

pytestmark = pytest.mark.nats

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": [user("go")]},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": [user("go")]},
    "/v1/responses": {"model": "m", "input": "go"},
    "/v1beta/models/g:generateContent": {"contents": [{"role": "user", "parts": [{"text": "go"}]}]},
}


def counted(reason: str) -> float:
    return METRICS.registry.get_sample_value("polar_proxy_rejected_total", {"reason": reason}) or 0.0


def left() -> float:
    return METRICS.registry.get_sample_value("polar_proxy_aborted_total", {"reason": "client_gone"}) or 0.0


def in_shape(path: str, status: int, body: bytes) -> bool:
    """Whether an error is this provider's."""
    told = orjson.loads(body)
    error = told["error"]
    if path.startswith("/v1beta"):
        return bool(error["code"] == status and error["status"] and error["message"])
    if path == "/v1/messages":
        return bool(told["type"] == "error" and error["type"] and error["message"])
    return bool({"message", "type", "param", "code"} <= error.keys())


async def over(proxy: Kit, path: str, name: str, number: int) -> httpx.Response:
    """One request that goes beyond the limit `name`, from a session of its own."""
    key = session_key(f"{TASK}-{number}", **({"calls": 1} if name == "calls_limit" else {}))
    if name == "tokens_limit":
        key = session_key(f"{TASK}-{number}", total_tokens=1)
    url = f"{proxy.base(key)}{path}"
    if name in ("calls_limit", "tokens_limit", "session_rate"):
        assert (await proxy.client.post(url, json=ASKED[path])).status_code == 200
    if name in ("session_concurrency", "busy"):
        hold = asyncio.Event()
        proxy.engine.say(Say(hold=hold))
        running = asyncio.ensure_future(proxy.client.post(url, json=ASKED[path]))
        while not proxy.proxy.service or not proxy.proxy.service.count_running:
            await asyncio.sleep(0.01)
        try:
            return await proxy.client.post(url, json=ASKED[path])
        finally:
            hold.set()
            assert (await running).status_code == 200
    body = orjson.dumps(ASKED[path])
    if name == "too_large":
        body = orjson.dumps({**ASKED[path], "x": "y" * 5000})
    if name == "nesting":
        body = orjson.dumps({**ASKED[path], "x": "Y"}).replace(b'"Y"', b"[" * 300 + b"]" * 300)
    return await proxy.client.post(url, content=body)


LIMITS: dict[str, tuple[int, dict[str, Any]]] = {
    "calls_limit": (403, {}),
    "tokens_limit": (403, {}),
    "session_rate": (429, {"proxy_session_rate": 0.1}),
    "session_concurrency": (429, {"proxy_session_concurrency": 1}),
    "busy": (429, {"proxy_concurrency": 1}),
    "too_large": (413, {"proxy_body_limit": 4000}),
    "nesting": (400, {}),
    "context_full": (400, {"proxy_context_window": 4}),
}


@pytest.mark.parametrize("name", LIMITS)
async def test_a_limit_is_told_counted_and_recorded(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, name: str
) -> None:
    status, options = LIMITS[name]
    async with kit(model_dir, nats_server.url, bus, tmp_path, **options) as proxy:
        for number, path in enumerate(ASKED):
            before = counted(name)
            response = await over(proxy, path, name, number)
            assert response.status_code == status, response.text
            assert in_shape(path, status, response.content)
            assert ("retry-after" in response.headers) == (status == 429)
            assert counted(name) == before + 1
            key = session_key(f"{TASK}-{number}")
            assert [e.reason for e in await proxy.eventually(CompletionRejected, 1, key=key)] == [name]
        assert proxy.proxy.service is not None and proxy.proxy.service.count_running == 0


async def _sent(proxy: Kit, *pieces: bytes, pause: float = 0.0) -> tuple[int, bytes]:
    """Status and body of what comes back for these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(pause)
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body


@pytest.mark.parametrize("path", ASKED)
async def test_heads_and_bodies_that_trickle_or_swell_are_refused_in_shape(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, path: str
) -> None:
    async with kit(model_dir, nats_server.url, bus, tmp_path, proxy_request_s=0.7, proxy_header_limit=2048) as proxy:
        line = f"POST {proxy.base()[len(proxy.url) :]}{path} HTTP/1.1\r\nhost: x\r\n".encode()
        before = {reason: counted(reason) for reason in ("408", "431", "too_slow")}
        swollen = await _sent(proxy, line + b"x-long: " + b"y" * 4000)
        whole = await _sent(proxy, line + b"x-long: " + b"y" * 4000 + b"\r\n\r\n")
        trickling = await _sent(proxy, line[:-2], line[-2:], pause=0.1)
        announced = line + b"connection: close\r\ncontent-length: 100\r\n\r\n"
        body = await _sent(proxy, announced, b"{", b'"', pause=0.1)
        nothing = await _sent(proxy, announced)
        assert [s for s, _ in (swollen, whole, trickling, body, nothing)] == [431, 431, 408, 408, 408]
        assert all(in_shape(path, status, told) for status, told in (swollen, whole, trickling, body, nothing))
        rose = {reason: counted(reason) - start for reason, start in before.items()}
        assert rose == {"408": 1, "431": 2, "too_slow": 2}
        assert [e.reason for e in await proxy.eventually(CompletionRejected, 2)] == ["too_slow"] * 2
        assert proxy.proxy.service is not None and proxy.proxy.service.count_running == 0
        assert (await proxy.client.post(f"{proxy.base()}{path}", json=ASKED[path])).status_code == 200


async def test_a_body_that_comes_at_once_without_its_length_is_bounded_too(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    async with kit(model_dir, nats_server.url, bus, tmp_path, proxy_body_limit=4000) as proxy:
        line = f"POST {proxy.base()[len(proxy.url) :]}/v1/responses HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        body = orjson.dumps({**ASKED["/v1/responses"], "x": "y" * 5000})
        pieces = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        status, told = await _sent(proxy, line.encode() + b"transfer-encoding: chunked\r\n\r\n" + pieces)
        assert status == 413 and in_shape("/v1/responses", 413, told) and proxy.engine.journal == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_closes_its_half_is_gone_and_holds_nothing(proxy: Kit, stream: bool) -> None:
    """Agents that are killed leave half-open connections; nobody reads what would be sampled for them."""
    hold, before = asyncio.Event(), left()
    proxy.engine.say(Say(hold=hold))
    body = orjson.dumps({**ASKED["/v1/chat/completions"], "stream": stream})
    path = f"{proxy.base()[len(proxy.url) :]}/v1/chat/completions"
    loop, sock = asyncio.get_running_loop(), socket.socket()
    sock.setblocking(False)
    await loop.sock_connect(sock, ("127.0.0.1", int(proxy.url.rpartition(":")[2])))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(sock, head.encode() + body)
    service = proxy.proxy.service
    assert service is not None
    while not service.count_running:
        await asyncio.sleep(0.01)
    sock.shutdown(socket.SHUT_WR)
    (gone,) = await proxy.eventually(CompletionAborted)
    assert left() == before + 1
    assert gone.reason == "client_gone" and service.count_running == 0
    assert [r.running for r in service.pool.replicas] == [0]
    sock.close()
    hold.set()


async def test_unknown_keys_are_counted_and_in_shape(proxy: Kit) -> None:
    for path, body in ASKED.items():
        before = counted("401")
        response = await proxy.client.post(f"{proxy.url}/s/nobody{path}", json=body)
        assert response.status_code == 401 and in_shape(path, 401, response.content)
        assert counted("401") == before + 1
    assert await proxy.events() == [] and proxy.engine.journal == []
