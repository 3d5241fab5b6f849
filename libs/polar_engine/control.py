"""The engine's control routes: abort, pause, weights, prefix cache, load, tokenizer. Loopback only, as in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, StrictBool, StrictInt
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polar_common.errors import RequestError
from polar_engine.host import EngineHost
from polar_engine.replies import json_reply, read_object
from polar_engine.requests import validated

__all__ = ["control_routes"]

Handler = Callable[[EngineHost, Request], Coroutine[Any, Any, Any]]


class _Abort(BaseModel):
    request_ids: list[str]


class _Update(BaseModel):
    path: Annotated[str, Field(min_length=1)]
    version: Annotated[str, Field(min_length=1, max_length=256)]


class _Rpc(BaseModel):
    method: str


class _Relabel(BaseModel):
    new_version: Annotated[str, Field(min_length=1, max_length=256)]


class _Tokenize(BaseModel):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool = True
    return_token_strs: StrictBool = False


class _Detokenize(BaseModel):
    model: str | None = None
    tokens: list[StrictInt]


def control_routes(host: EngineHost) -> list[Route]:
    """All control routes of one engine."""
    table: list[tuple[str, str, Handler]] = [
        ("POST", "/abort_requests", _abort),
        ("POST", "/inference/v1/abort_requests", _abort),
        ("POST", "/pause", _pause),
        ("POST", "/resume", _resume),
        ("GET", "/is_paused", _is_paused),
        ("POST", "/update_weights", _update_weights),
        ("POST", "/collective_rpc", _collective_rpc),
        ("POST", "/update_weight_version", _update_weight_version),
        ("GET", "/weight_info", _weight_info),
        ("POST", "/reset_prefix_cache", _reset_prefix_cache),
        ("GET", "/load", _load),
        ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
    ]
    return [Route(path, _bound(host, handler), methods=[method]) for method, path, handler in table]


def _bound(host: EngineHost, handler: Handler) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def endpoint(request: Request) -> Response:
        return json_reply(await handler(host, request))

    return endpoint


async def _abort(host: EngineHost, request: Request) -> Any:
    asked = validated(_Abort, await read_object(request))
    return {"status": "aborted", "aborted": await host.abort(asked.request_ids)}


async def _pause(host: EngineHost, request: Request) -> Any:
    mode = request.query_params.get("mode", "abort")
    if mode not in ("abort", "wait", "keep"):
        raise RequestError("mode is abort, wait or keep", path="mode")
    await host.pause(mode, request.query_params.get("clear_cache", "true").lower() != "false")
    return {"status": "paused"}


async def _resume(host: EngineHost, _: Request) -> Any:
    await host.resume()
    return {"status": "resumed"}


async def _is_paused(host: EngineHost, _: Request) -> Any:
    return {"is_paused": host.paused is not None}


async def _update_weights(host: EngineHost, request: Request) -> Any:
    asked = validated(_Update, await read_object(request))
    await host.update_weights(Path(asked.path), asked.version)
    return {"success": True, "version": asked.version, "weights_sha256": host.model.weights_sha256}


async def _collective_rpc(host: EngineHost, request: Request) -> Any:
    body = await read_object(request)
    asked = validated(_Rpc, body)
    arguments = body.get("kwargs")
    path = arguments.get("weights_path") if isinstance(arguments, dict) else None
    if asked.method != "reload_weights":
        raise RequestError(f"`{asked.method}` isn't known here; reload_weights is", path="method")
    if not isinstance(path, str):
        raise RequestError("a directory is needed", path="kwargs.weights_path")
    await host.update_weights(Path(path), None)
    return {"results": [None]}


async def _update_weight_version(host: EngineHost, request: Request) -> Any:
    asked = validated(_Relabel, await read_object(request))
    await host.relabel(asked.new_version)
    return {"success": True, "new_version": asked.new_version}


async def _weight_info(host: EngineHost, _: Request) -> Any:
    return {
        "weight_version": host.scheduler.version,
        "weights_sha256": host.model.weights_sha256,
        "dtype": host.settings.dtype,
    }


async def _reset_prefix_cache(host: EngineHost, _: Request) -> Any:
    await host.clear_cache()
    return {"success": True}


async def _load(host: EngineHost, _: Request) -> Any:
    return {"server_load": host.load_count}


async def _tokenize(host: EngineHost, request: Request) -> Any:
    asked = validated(_Tokenize, await read_object(request))
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("give either prompt or messages", path="prompt")
    if asked.messages is not None:
        text = host.render(asked.messages, asked.tools, asked.add_generation_prompt)
    else:
        text = asked.prompt or ""
    # A template writes its special tokens itself.
    special = asked.messages is None if asked.add_special_tokens is None else asked.add_special_tokens
    encoding = host.tokenizer.encode(text, add_special_tokens=special)
    return {
        "count": len(encoding.ids),
        "max_model_len": host.served.max_model_len,
        "tokens": encoding.ids,
        "token_strs": encoding.tokens if asked.return_token_strs else None,
    }


async def _detokenize(host: EngineHost, request: Request) -> Any:
    asked = validated(_Detokenize, await read_object(request))
    for place, token in enumerate(asked.tokens):
        if not 0 <= token < host.served.vocab:
            raise RequestError(f"token id {token} is out of vocabulary", path=f"tokens[{place}]")
    return {"prompt": host.tokenizer.decode(asked.tokens, skip_special_tokens=False)}
