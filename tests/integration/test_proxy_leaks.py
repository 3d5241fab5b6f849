"""Clients that leave at any byte of an answer: each call ends on the log, and nothing is left behind.

`make fuzz` leaves at every one.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from pathlib import Path
from typing import Any

import orjson
import pytest
from proxy_engine import Say, ScriptedEngine
from proxy_kit import TASK, Kit, kit, nothing_left, session_key, user

from polar_common.bus import Bus
from polar_common.events import CompletionAborted, CompletionCaptured, CompletionRejected
from polar_common.keys import SessionKey
from polar_common.nats_server import NatsServer

pytestmark = pytest.mark.nats

AT_ONCE = 8
SLACK = 2 * AT_ONCE
"""Connections to the engine that are kept for later, both ends of them in this process."""
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "stream": True, "messages": [user("go")]},
    "/v1/messages": {"model": "m", "stream": True, "max_tokens": 99, "messages": [user("go")]},
    "/v1/responses": {"model": "m", "stream": True, "input": "go"},
    "/v1beta/models/g:streamGenerateContent?alt=sse": {"contents": [{"role": "user", "parts": [{"text": "go"}]}]},
}


def held() -> tuple[int, int]:
    """Open files and tasks of this process."""
    return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())


async def left_after(proxy: Kit, key: SessionKey, path: str, count: int, how: int) -> int:
    """Read `count` bytes of an answer and leave: by a reset, in order, or with one half. What was read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    # Each its own request: an equal one would be answered with what its forerunner didn't get.
    body = orjson.dumps(STREAMS[path]).replace(b'"go"', b'"go %d"' % count)
    target = f"{proxy.base(key)[len(proxy.url) :]}{path}"
    head = f"POST {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    got = b""
    while len(got) < count and (piece := await asyncio.wait_for(reader.read(count - len(got)), 30)):
        got += piece
    assert got.startswith(b"HTTP/1.1 200"[:count]), got
    if how == 1:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif how == 2 and len(got) == count:
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return len(got)


@pytest.mark.parametrize("apart", [41, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
async def test_a_stream_left_at_any_byte_ends_on_the_log_and_holds_nothing(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, apart: int
) -> None:
    engine = ScriptedEngine(model_dir)
    await engine.start()
    try:
        # Calls are held until their callers' absence is seen: here far more of them than one session may have.
        limits = {"proxy_session_rate": 1e6, "proxy_session_concurrency": 1_000}
        async with kit(model_dir, nats_server.url, bus, tmp_path, engine, **limits) as proxy:
            gate, before = asyncio.Semaphore(AT_ONCE), (0, 0)

            async def one(key: SessionKey, path: str, count: int) -> int:
                async with gate:
                    return await left_after(proxy, key, path, count, count // apart % 3)

            for number, path in enumerate(STREAMS, 1):
                key = session_key(f"{TASK}-{number}", calls=10**9)
                engine.script = lambda heard: Say("some few words", chunk=1, delay_s=0.015)
                whole = await one(key, path, 1 << 20)
                cuts = range(0, whole, apart)
                await asyncio.gather(*(one(key, path, count) for count in cuts))
                await nothing_left(proxy)
                before = before if number > 1 else held()
                ended = await proxy.of(CompletionCaptured, key), await proxy.of(CompletionAborted, key)
                names = [e.completion for events in ended for e in events]
                refused = await proxy.of(CompletionRejected, key)
                assert not refused, [(r.status, r.reason) for r in refused]
                assert len(names) == len(set(names)) == len(cuts) + 1 and all(ended), path
                assert {e.reason for e in ended[1]} == {"client_gone"}
            after = held()
            assert after[0] <= before[0] + SLACK and after[1] <= before[1] + SLACK, (before, after)
    finally:
        await engine.stop()
