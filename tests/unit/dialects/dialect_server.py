"""A loopback server made of dialects alone: scripted parts go out as real HTTP, for the official SDKs to read."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import uvicorn

from polar_common.errors import PolarError, RequestError
from polar_proxy.dialects import route
from polar_proxy.dialects.base import ChatRequest, Dialect, Finish, Frame, Minted, Reply, Usage, events_of
from polar_render.base import AnswerEvent, TextDelta, ThinkingDelta, ToolCallDelta
from polar_render.messages import Part, ToolCall


@dataclass
class Script:
    """What the next answers say. `error` refuses; `breaks` breaks a stream in its middle."""

    parts: Sequence[Part] = ()
    finish: Finish = "stop"
    usage: Usage = field(default_factory=lambda: Usage(11, 7, 4, 2))
    error: PolarError | None = None
    breaks: PolarError | None = None
    stop_sequence: str | None = None
    logprobs: tuple[float, ...] | None = None
    token_texts: tuple[str, ...] = ()
    requests: list[ChatRequest] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def _pieces(event: AnswerEvent) -> list[AnswerEvent]:
    """Deltas of three characters."""
    if isinstance(event, TextDelta | ThinkingDelta):
        return [type(event)(event.text[i : i + 3]) for i in range(0, len(event.text), 3)]
    if isinstance(event, ToolCallDelta):
        text = event.arguments
        return [ToolCallDelta(event.index, text[i : i + 3]) for i in range(0, len(text), 3)]
    return [event]


class DialectServer:
    """An ASGI application in a thread of its own, on a free port."""

    def __init__(self) -> None:
        self.script = Script()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            self._app, log_level="error", lifespan="off", ws="none", loop="asyncio", interface="asgi3"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self) -> DialectServer:
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self._server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self._socket.close()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = {key.decode().lower(): value.decode() for key, value in scope["headers"]}
        query = dict(parse_qsl(scope["query_string"].decode()))
        dialect, found = route(scope["method"], scope["path"], query, headers)
        self.script.lines.append(f"{scope['method']} {scope['path']} {found.dialect} {found.kind}")
        try:
            if self.script.error is not None:
                raise self.script.error
            if found.kind == "unknown":
                raise RequestError(f"no such endpoint: {scope['method']} {scope['path']}", status=404)
            if found.kind in ("list_models", "get_model"):
                await _answer(send, 200, {}, dialect.models(["m", "org/n"], 4096, found))
                return
            request = dialect.parse(found, headers, body)
            self.script.requests.append(request)
            if found.kind == "count_tokens":
                await _answer(send, 200, {}, dialect.count(1234))
            elif request.stream:
                await self._stream(send, dialect, request)
            else:
                await _answer(send, 200, {}, dialect.encode(self._replies(request), request))
        except PolarError as error:
            await _answer(send, *dialect.error(error))

    def _replies(self, request: ChatRequest) -> list[Reply]:
        script, out = self.script, []
        for choice in range(request.sampling.n):
            minted = Minted(f"c{choice}", 1700000000)
            parts: list[Part] = []
            for part in script.parts:
                if isinstance(part, ToolCall):
                    calls = sum(isinstance(p, ToolCall) for p in parts)
                    part = ToolCall(minted.tool_id(calls), part.name, part.arguments, part.namespace, part.custom)
                parts.append(part)
            out.append(
                Reply(
                    tuple(parts),
                    script.finish,
                    script.usage,
                    minted,
                    stop_sequence=script.stop_sequence,
                    logprobs=script.logprobs,
                    token_texts=script.token_texts,
                )
            )
        return out

    def _frames(self, dialect: Dialect, request: ChatRequest) -> list[Frame]:
        replies = self._replies(request)
        encoder = dialect.encoder(request, [reply.minted for reply in replies])
        frames = encoder.start(self.script.usage)
        for number, event in enumerate(piece for e in events_of(replies[0].parts) for piece in _pieces(e)):
            if self.script.breaks is not None and number == 2:
                return frames + encoder.fail(self.script.breaks)
            for choice in range(len(replies)):
                frames += encoder.feed(event, choice)
            frames.append(Frame(encoder.keepalive()))
        for choice, reply in enumerate(replies):
            frames += encoder.finish(reply, choice)
        return frames + encoder.end(self.script.usage)

    async def _stream(self, send: Any, dialect: Dialect, request: ChatRequest) -> None:
        kind = b"text/event-stream" if request.sse else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for frame in self._frames(dialect, request):
            await send({"type": "http.response.body", "body": frame.data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _answer(send: Any, status: int, headers: dict[str, str], body: bytes) -> None:
    sent = {"content-type": "application/json", **headers}
    pairs = [(key.encode(), value.encode()) for key, value in sent.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
