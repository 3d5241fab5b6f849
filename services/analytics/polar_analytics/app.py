"""Wiring of analytics: projectors for both streams, the query endpoint, the page."""

from __future__ import annotations

import asyncio
import hmac
from pathlib import Path

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from polar_common.errors import PolarError, RequestError
from polar_common.service import Service, serve_http
from polar_common.subjects import EVENTS, trace_filter
from polar_common.topology import TRACES, events_stream

from .handlers import Projector
from .settings import AnalyticsSettings
from .store import Store
from .views import VIEWS

__all__ = ["make_app", "run"]

_WEB = Path(__file__).parent / "web"
_LIMIT = 100_000


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value, default=str), status, media_type="application/json")


def _error(error: PolarError) -> Response:
    status = error.status if isinstance(error, RequestError) else 500
    where = error.path if isinstance(error, RequestError) else ""
    return _json({"error": {"message": str(error), "where": where}}, status)


class _Http:
    """The HTTP side: everything but `/health` needs the token, by header, or by the cookie that `/?token=` sets."""

    def __init__(self, store: Store, projectors: list[Projector], token: str) -> None:
        self._store = store
        self._projectors = projectors
        self._token = token

    def _allowed(self, request: Request) -> bool:
        if not self._token:
            return True
        shown = request.headers.get("authorization", "").removeprefix("Bearer ")
        shown = shown or request.cookies.get("polar", "") or request.query_params.get("token", "")
        return hmac.compare_digest(shown.encode(), self._token.encode())

    async def health(self, request: Request) -> Response:
        facts = [
            {"stream": p._stream, "position": p.position, "caught_up": p.caught_up.is_set()} for p in self._projectors
        ]
        return _json({"ok": True, "projections": facts})

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def query(self, request: Request) -> Response:
        if not self._allowed(request):
            return _error(RequestError("a token is needed: Authorization: Bearer …", 401))
        body = await request.body()
        try:
            if len(body) > _LIMIT:
                raise RequestError("too long", 413, "sql")
            value = orjson.loads(body)
            if not isinstance(value, dict) or not isinstance(value.get("sql"), str):
                raise RequestError("needs a string", 400, "sql")
            answer = await self._store.query(value["sql"])
        except orjson.JSONDecodeError as error:
            return _error(RequestError(f"not JSON: {error}", 400))
        except PolarError as error:
            return _error(error)
        return _json({"columns": answer.columns, "rows": answer.rows})

    async def views(self, request: Request) -> Response:
        if not self._allowed(request):
            return _error(RequestError("a token is needed: Authorization: Bearer …", 401))
        return _json([{"name": v.name, "title": v.title, "about": v.about} for v in VIEWS])

    async def page(self, request: Request) -> Response:
        if not self._allowed(request):
            return Response("Open the address that `polar status` shows, with its token.", 401)
        if "token" in request.query_params:
            answer = RedirectResponse(request.url.remove_query_params("token"))
            answer.set_cookie("polar", self._token, httponly=True, samesite="strict")
            return answer
        name = request.path_params.get("name") or "index.html"
        file = _WEB / name
        if file.parent != _WEB or file.suffix not in (".html", ".js", ".css") or not file.is_file():
            return _error(RequestError("no such page", 404))
        return FileResponse(file, headers={"Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'"})


def make_app(store: Store, projectors: list[Projector], token: str) -> Starlette:
    """The ASGI application."""
    http = _Http(store, projectors, token)
    return Starlette(
        routes=[
            Route("/health", http.health),
            Route("/metrics", http.metrics),
            Route("/v1/query", http.query, methods=["POST"]),
            Route("/v1/views", http.views),
            Route("/", http.page),
            Route("/{name}", http.page),
        ]
    )


def run(argv: list[str] | None = None) -> None:
    """Entry point of `polar run-service analytics`."""
    settings = AnalyticsSettings()
    asyncio.run(_run(settings))


async def _run(settings: AnalyticsSettings) -> None:
    service = Service("analytics", settings)
    path = settings.analytics_chdb or settings.data / "chdb"
    store = Store(
        path, settings.analytics_clickhouse, max_rows=settings.analytics_max_rows, max_s=settings.analytics_query_s
    )

    async def setup() -> None:
        await store.open()
        projectors = []
        for stream, subject in ((events_stream(settings.segment), EVENTS), (TRACES, trace_filter())):
            projector = Projector(
                service.bus,
                store,
                stream,
                subject,
                batch=settings.analytics_batch,
                linger_s=settings.analytics_linger_s,
            )
            projectors.append(projector)
            service.background(f"project:{stream}", _runner(projector, service.stop))
        app = make_app(store, projectors, settings.token.get_secret_value())
        service.background("http", await serve_http(app, service, host=settings.host, port=settings.port))

    try:
        await service.run(setup)
    finally:
        await store.close()


def _runner(projector: Projector, stop: asyncio.Event):  # type: ignore[no-untyped-def]
    async def work() -> None:
        await projector.run(stop)

    return work
