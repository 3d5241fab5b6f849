"""Plain ASGI: session keys, routes, bodies within bounds. The provider-specific part is the dialects', the rest
`service.py`'s."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qsl, unquote

import orjson
import structlog

from polar_common.errors import PolarError, RequestError
from polar_common.keys import SessionKey, verify
from polar_proxy import dialects
from polar_proxy.dialects.base import Dialect, Route

from .admission import Refused
from .doctor import diagnose
from .exchange import Exchange, Message
from .metrics import METRICS
from .nesting import too_deep
from .service import ProxyService

__all__ = ["ProxyApp"]

_KEYS = 4096
_log = structlog.get_logger(__name__)
_JSON = {"content-type": "application/json"}
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ProxyApp:
    """The ASGI application."""

    def __init__(self, service: ProxyService) -> None:
        self._service = service
        self._settings = service.settings
        self._secrets = service.settings.secrets
        self._keys: dict[str, SessionKey] = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # Closing before accepting is answered as 403: clients then fall back to HTTP.
            await receive()
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        path: str = scope["path"]
        exchange = Exchange(receive, send, self._settings.proxy_stall_s)
        if path in ("/health", "/metrics") or path.startswith("/internal/"):
            await self._own(exchange, scope, headers)
            return
        token = ""
        if path.startswith("/s/"):
            token, slash, rest = path[3:].partition("/")
            path = slash + rest
        query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        dialect, route = dialects.route(scope["method"], path or "/", query, headers)
        try:
            await self._routed(exchange, receive, dialect, route, headers, query, token)
        except PolarError as error:
            await self._refused(exchange, dialect, error)
        except Exception as error:
            _log.exception("a request failed", path=path)
            await self._refused(exchange, dialect, RequestError(f"internal error: {type(error).__name__}", status=500))

    async def _refused(self, exchange: Exchange, dialect: Dialect, error: PolarError) -> None:
        status, told, body = dialect.error(error)
        METRICS.rejected.labels(str(status)).inc()
        if not exchange.started:
            await exchange.answer(status, told, body)

    async def _routed(
        self, exchange: Exchange, receive: Receive, dialect: Dialect, route: Route, headers: Mapping[str, str],
        query: Mapping[str, str], token: str,
    ) -> None:  # fmt: skip
        if route.kind == "hello":
            await exchange.answer(200, _JSON, b"{}")
            return
        if route.kind == "upgrade":
            raise RequestError("this endpoint speaks plain HTTP", status=426, kind="upgrade_required")
        key = self._key(token, headers, query)
        if route.kind == "unknown":
            raise RequestError("no such endpoint", status=404, kind="not_found_error")
        if route.kind in ("list_models", "get_model"):
            await exchange.answer(200, _JSON, self._service.models(dialect, route, key))
            return
        try:
            body = await self._body(receive, headers)
        except RequestError as error:
            await self._service.refuse(exchange, dialect, key, error)
            return
        if route.kind == "count_tokens":
            await exchange.answer(200, _JSON, await self._service.count(dialect, route, key, headers, body))
            return
        await self._service.generate(exchange, dialect, route, key, headers, body)

    def _key(self, token: str, headers: Mapping[str, str], query: Mapping[str, str]) -> SessionKey:
        """From the path, else from the headers in which providers' clients carry API keys. Raises RequestError 401."""
        bearer = headers.get("authorization", "")
        told = (
            unquote(token),
            bearer[7:].strip() if bearer[:7].lower() == "bearer " else "",
            headers.get("x-api-key", ""),
            headers.get("x-goog-api-key", ""),
            query.get("key", ""),
        )
        for candidate in told:
            if candidate and (key := self._verified(candidate)) is not None:
                return key
        raise RequestError("unknown or expired session key", status=401, kind="authentication_error")

    def _verified(self, token: str) -> SessionKey | None:
        known = self._keys.get(token)
        if known is not None:
            return known if known.expires > time.time() else None
        key = verify(token, self._secrets)
        if key is not None:
            if len(self._keys) >= _KEYS:
                del self._keys[next(iter(self._keys))]
            self._keys[token] = key
        return key

    async def _body(self, receive: Receive, headers: Mapping[str, str]) -> bytes:
        """The whole body. Raises RequestError: 413 too large, 408 too slow, 400 nested too deeply or compressed."""
        limit = self._settings.proxy_body_limit
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        if headers.get("content-encoding", "identity") != "identity":
            raise RequestError("send the body uncompressed", status=415)
        if getattr(getattr(receive, "__self__", None), "more_body", True):
            try:
                async with asyncio.timeout(self._settings.proxy_request_s):
                    message = await receive()
                    body: bytes = message.get("body", b"")
                    if message.get("more_body"):
                        body = await self._rest(receive, body, limit)
            except TimeoutError:
                raise RequestError("the body didn't arrive in time", status=408, kind="timeout_error") from None
        else:
            # uvicorn has it already, as nearly always: then there is nothing to wait for.
            message = await receive()
            body = message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if message.get("type") == "http.disconnect":
            raise RequestError("the client went away", status=400)
        if too_deep(body, self._settings.proxy_nesting):
            raise Refused(f"nested deeper than {self._settings.proxy_nesting} levels", 400, "nesting")
        return body

    async def _rest(self, receive: Receive, body: bytes, limit: int) -> bytes:
        parts, size = [body], len(body)
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError("the client went away", status=400)
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    # -- for people and machines of the house

    async def _own(self, exchange: Exchange, scope: Message, headers: Mapping[str, str]) -> None:
        path, service = scope["path"], self._service
        if path == "/health":
            ready = service.seals.ready
            told = {
                "ready": ready,
                "sessions": len(service.sessions),
                "running": service.count_running,
                "engines": {r.engine.replica: r.healthy for r in service.pool.replicas},
            }
            await exchange.answer(200 if ready else 503, _JSON, orjson.dumps(told))
            return
        if not self._trusted(scope, headers):
            await exchange.answer(403, _JSON, b'{"error":"loopback or token only"}')
            return
        if path == "/metrics":
            METRICS.sessions.set(len(service.sessions))
            METRICS.running.set(service.count_running)
            await exchange.answer(200, {"content-type": "text/plain; version=0.0.4"}, METRICS.text())
        elif path == "/internal/doctor":
            checks = await diagnose(service)
            await exchange.answer(200, _JSON, orjson.dumps([c.__dict__ for c in checks]))
        else:
            await exchange.answer(404, _JSON, b'{"error":"not found"}')

    def _trusted(self, scope: Message, headers: Mapping[str, str]) -> bool:
        """With a house token: who shows it. Without one: TCP clients on loopback, never the sandboxes' socket."""
        token = self._settings.token.get_secret_value()
        if token:
            return hmac.compare_digest(headers.get("authorization", ""), f"Bearer {token}")
        client = scope.get("client")
        return client is not None and client[0] in ("127.0.0.1", "::1")


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the body has more than {limit} bytes", status=413, kind="request_too_large")
