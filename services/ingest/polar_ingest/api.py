"""The HTTP edge: routes, authentication, errors in one shape. What the routes are is told by `endpoints.py`."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import nats.errors
import orjson
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, Counter, generate_latest
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polar_common.bus import Bus
from polar_common.errors import BusError, ConfigError, PolarError, RequestError

from .body import read_body
from .endpoints import ENDPOINTS
from .intake import DEFAULT_RUN
from .openapi import openapi
from .reads import Reads
from .scheduler import Scheduler
from .settings import IngestSettings
from .submit import Intake
from .views import CancelView

__all__ = ["Api", "check_exposure"]

_OPEN = ("/health", "/ready")
_REASON_LIMIT = 16_000
_log = structlog.get_logger(__name__)
_requests = Counter("polar_ingest_requests", "HTTP requests", ["route", "status"])
Handler = Callable[[Request], Awaitable[Response]]


def check_exposure(host: str, token: str) -> None:
    """Refuse to listen where others can reach us without asking them for a token. Raises ConfigError."""
    if not token and not _loopback(host):
        raise ConfigError(f"listening on {host} needs a token (POLAR_TOKEN)", "host")


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Api:
    """The application of one ingest instance."""

    def __init__(self, bus: Bus, scheduler: Scheduler, settings: IngestSettings) -> None:
        self._bus = bus
        self._scheduler = scheduler
        self._settings = settings
        self._token = settings.token.get_secret_value().encode()
        self._intake = Intake(bus, scheduler, settings)
        self._reads = Reads(bus, scheduler, settings)

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [Route(e.path, self._guarded(e.path, getattr(self, e.name)), methods=[e.method]) for e in ENDPOINTS]
        return Starlette(routes=routes, exception_handlers={HTTPException: self._unrouted})

    def _guarded(self, path: str, handler: Handler) -> Handler:
        async def call(request: Request) -> Response:
            try:
                self._check_caller(request, path)
                response = await handler(request)
            except PolarError as error:
                response = self._refusal(error)
            except nats.errors.Error as error:
                response = self._refusal(BusError(repr(error)))
            _requests.labels(path, response.status_code).inc()
            return response

        return call

    def _check_caller(self, request: Request, path: str) -> None:
        """Bearer token where one is set; without one, only what comes from this machine and no foreign web page."""
        if path in _OPEN:
            return
        if self._token:
            scheme, _, shown = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), self._token):
                raise RequestError("a bearer token is required", 401, "authorization")
            return
        # A page in the user's browser could otherwise submit tasks, by a simple request or a rebound name.
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            raise RequestError("requests of other sites' pages need a token", 403, "origin")
        if not _loopback(request.url.hostname or ""):
            raise RequestError("without a token, only loopback names are answered", 403, "host")

    def _refusal(self, error: PolarError) -> Response:
        headers: dict[str, str] = {}
        if isinstance(error, RequestError):
            status, where = error.status, error.path
            message = str(error).removeprefix(f"{where}: ") if where else str(error)
        elif isinstance(error, BusError):
            _log.warning("request failed at the log", error=repr(error))
            status, where, message = 503, "", f"the log isn't available: {error}"
        else:
            _log.error("request failed", error=repr(error))
            status, where, message = 500, "", str(error)
        if status in (429, 503):
            headers["retry-after"] = str(self._settings.ingest_retry_after_s)
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse({"error": {"message": message, "where": where}}, status, headers)

    async def _unrouted(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        message = f"nothing answers {request.method} {request.url.path}"
        return JSONResponse({"error": {"message": message, "where": "path"}}, status)

    # -- endpoints

    async def submit_tasks(self, request: Request) -> Response:
        if not self._bus.nc.is_connected or not self._scheduler.ready:
            raise RequestError("the log hasn't been read to its end, or doesn't answer", 503)
        body = await read_body(request, self._settings.ingest_body_limit)
        return _answer(await self._intake.submit(body, _run_of(request)), 202)

    async def get_task(self, request: Request) -> Response:
        return _answer(await self._reads.task(request.path_params["task"], _run_of(request)))

    async def get_session(self, request: Request) -> Response:
        return _answer(await self._reads.session(request.path_params["session"]))

    async def get_run(self, request: Request) -> Response:
        self._check_folded()
        return _answer(self._reads.run(request.path_params["run"]))

    async def cancel_task(self, request: Request) -> Response:
        self._check_folded()
        accepted = await self._reads.accepted(request.path_params["task"], _run_of(request))
        world = self._scheduler.world
        found = [world.sessions[s] for s in accepted.sessions if s in world.sessions]
        done = await self._intake.cancel(found, await self._reason(request))
        return _answer(CancelView(requested=done.requested, sessions=len(accepted.sessions)))

    async def cancel_session(self, request: Request) -> Response:
        self._check_folded()
        name = request.path_params["session"]
        session = self._scheduler.world.sessions.get(name)
        reason = await self._reason(request)
        if session is None:
            await self._reads.ended_session(name)
        return _answer(
            await self._intake.cancel([session], reason) if session is not None else CancelView(requested=0, sessions=1)
        )

    async def cancel_run(self, request: Request) -> Response:
        self._check_folded()
        run = request.path_params["run"]
        reason = await self._reason(request)
        counts = self._reads.run(run)
        done = await self._intake.cancel(self._scheduler.world.live_sessions(run), reason)
        return _answer(CancelView(requested=done.requested, sessions=counts.sessions))

    async def health(self, request: Request) -> Response:
        short = self._scheduler.headroom.short
        return JSONResponse({"status": "full" if short else "ok", "detail": short})

    async def ready(self, request: Request) -> Response:
        connected, folded = self._bus.nc.is_connected, self._scheduler.ready
        fine = connected and folded
        return JSONResponse({"ready": fine, "connected": connected, "folded": folded}, 200 if fine else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def openapi_document(self, request: Request) -> Response:
        return JSONResponse(openapi())

    def _check_folded(self) -> None:
        if not self._scheduler.ready:
            raise RequestError("the log hasn't been read to its end, or doesn't answer", 503)

    async def _reason(self, request: Request) -> str:
        """`{"reason": "…"}`, or no body at all."""
        body = await read_body(request, _REASON_LIMIT)
        if not body.strip():
            return ""
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"not JSON: {error}", path="body") from error
        if not isinstance(value, dict) or not isinstance(value.get("reason", ""), str):
            raise RequestError("must be a string", path="reason")
        for key in value:
            if key != "reason":
                raise RequestError("unknown field", path=key)
        return str(value.get("reason", ""))[:2000]


def _run_of(request: Request) -> str:
    return request.query_params.get("run", DEFAULT_RUN)


def _answer(view: BaseModel, status: int = 200) -> Response:
    return Response(view.model_dump_json(), status, media_type="application/json")
