"""The least a recording proxy can do: plain ASGI, an aiohttp client, one JetStream acknowledgement per call.

It parses the request, forwards fixed ids to the engine, stores the raw answer and returns a minimal one. It renders
nothing, checks nothing and continues nothing: the floor that the real proxy's CPU time is compared with.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import uuid
from typing import Any

import aiohttp
import nats
import orjson
import uvicorn
import uvloop


class Bare:
    """The ASGI application."""

    def __init__(self, engine: str, js: Any, prompt: int) -> None:
        self.engine = engine
        self.js = js
        self.ids = list(range(100, 100 + prompt))
        self.session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        request = orjson.loads(body)
        if self.session is None:
            self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        stream = bool(request.get("stream"))
        asked = {
            "token_ids": self.ids, "request_id": uuid.uuid4().hex, "stream": stream, "return_token_ids": True,
            "sampling_params": {"max_tokens": 64, "temperature": 1.0, "logprobs": 0},
        }  # fmt: skip
        async with self.session.post(f"{self.engine}/inference/v1/generate", data=orjson.dumps(asked)) as response:
            if stream:
                await self._streamed(send, response)
                return
            answer = orjson.loads(await response.read())
        await self._keep(answer)
        text = " ".join(map(str, answer["choices"][0]["token_ids"]))
        told = orjson.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]})
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(told))]})
        await send({"type": "http.response.body", "body": told})

    async def _streamed(self, send: Any, response: aiohttp.ClientResponse) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        kept = []
        async for block in response.content.iter_any():
            kept.append(block)
            await send({"type": "http.response.body", "body": block, "more_body": True})
        await self._keep(
            [orjson.loads(line[6:]) for line in b"".join(kept).split(b"\n") if line.startswith(b"data: {")]
        )
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _keep(self, answer: Any) -> None:
        name = uuid.uuid4().hex
        await self.js.publish(f"polar.events.s1.bare.{name}", orjson.dumps(answer), headers={"Nats-Msg-Id": name})


async def serve() -> None:
    connection = await nats.connect(os.environ["BARE_NATS"])
    app = Bare(os.environ["BARE_ENGINE"], connection.jetstream(), int(os.environ.get("BARE_PROMPT", "512")))
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    print(sock.getsockname()[1], flush=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", loop="none"))
    await server.serve([sock])
    if app.session is not None:
        await app.session.close()
    await connection.close()


if __name__ == "__main__":
    uvloop.run(serve()) if sys.argv[1:] == [] else asyncio.run(serve())
