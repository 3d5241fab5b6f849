"""HTTP of the local engine: vLLM's token endpoint and the few control routes that Polar uses.

A client that goes away aborts its generation within one step, streamed or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from polar_common import __version__
from polar_common.errors import ConfigError, EngineBusy, RequestError
from polar_common.tasks import cancel_and_wait, spawn
from polar_engine.answers import Answer, chunk, error_body, usage_chunk
from polar_engine.control import control_routes
from polar_engine.host import EngineHost, Running
from polar_engine.replies import json_reply, read_object
from polar_engine.requests import parse_generate

__all__ = ["create_app"]


def create_app(host: EngineHost) -> Starlette:
    """The ASGI application around a loaded engine."""

    async def generate(request: Request) -> Response:
        return await _generate(host, request)

    async def health(_: Request) -> Response:
        return Response(status_code=200 if host.scheduler.alive else 503)

    async def models(_: Request) -> Response:
        return json_reply({"object": "list", "data": [_model_card(host)]})

    async def version(_: Request) -> Response:
        return json_reply({"version": __version__, "engine": "polar"})

    routes = [
        Route("/inference/v1/generate", generate, methods=["POST"]),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/v1/models", models),
        Route("/version", version),
        *control_routes(host),
    ]
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        RequestError: _refused,
        ConfigError: _misconfigured,
        EngineBusy: _busy,
        404: _unknown,
        405: _unknown,
        Exception: _broken,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


async def _refused(_: Request, error: RequestError) -> Response:
    return json_reply(error_body(str(error), error.status, error.path, error.kind), error.status)


async def _misconfigured(_: Request, error: ConfigError) -> Response:
    return json_reply(error_body(str(error), 400, error.where), 400)


async def _busy(_: Request, error: EngineBusy) -> Response:
    after = {"retry-after": str(max(1, round(error.retry_after or 1)))}
    return json_reply(error_body(str(error), error.status, kind="ServiceUnavailableError"), error.status, after)


async def _unknown(request: Request, error: Any) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return json_reply(error_body(message, error.status_code, kind="NotFoundError"), error.status_code)


async def _broken(request: Request, error: Exception) -> Response:
    return json_reply(error_body(f"{request.url.path} failed: {error!r}", 500), 500)


def _model_card(host: EngineHost) -> dict[str, Any]:
    name = host.served.name
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": host.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": not host.settings.no_logprobs,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": host.created,
        "owned_by": "polar",
        "root": str(host.model.path),
        "parent": None,
        "max_model_len": host.served.max_model_len,
        "permission": [permission],
    }


async def _generate(host: EngineHost, request: Request) -> Response:
    asked = parse_generate(await read_object(request), host.served)
    answer = Answer(asked, host.served.name, int(time.time()), host.tokenizer, not host.settings.no_logprobs)
    running = host.open(asked)
    if asked.stream:
        return _EventStream(running, answer)
    collecting = spawn(_collect(running, answer), name=f"collect {asked.request_id}")
    leaving = spawn(_gone(request), name=f"watch {asked.request_id}")
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        running.close()
        await cancel_and_wait(collecting, leaving)
    if not answer.done:
        # Nobody reads this any more.
        return Response(status_code=499)
    if answer.failed is not None:
        return json_reply(error_body(f"generation failed: {answer.failed}", 500), 500)
    return json_reply(answer.body())


async def _collect(running: Running, answer: Answer) -> None:
    async for delta in running.deltas():
        answer.add(delta)


async def _gone(request: Request) -> None:
    """Return when the client has closed the connection."""
    with contextlib.suppress(ClientDisconnect):
        while (await request.receive())["type"] != "http.disconnect":
            pass


class _EventStream(StreamingResponse):
    """The answer as server-sent events. Whatever ends the response ends the generation, even before its first event."""

    def __init__(self, running: Running, answer: Answer) -> None:
        super().__init__(_events(running, answer), media_type="text/event-stream")
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.close()


async def _events(running: Running, answer: Answer) -> AsyncIterator[bytes]:
    first = True
    async for delta in running.deltas():
        answer.add(delta)
        if delta.finish is not None and delta.finish.reason == "error":
            yield _event(error_body(f"generation failed: {delta.finish.message}", 500))
            continue
        yield _event(chunk(answer, delta, first))
        first = False
    if answer.request.include_usage:
        yield _event(usage_chunk(answer))
    yield b"data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
