"""Wiring of analytics: projectors for both streams, the query endpoint, the page."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from polar_common.catalogue import Catalogue
from polar_common.errors import BlobError, ConfigError, PolarError, RequestError
from polar_common.service import Service, serve_http
from polar_common.subjects import EVENTS, trace_filter
from polar_common.topology import TRACES, events_stream
from polar_render import load_renderer, profile_for

from .handlers import Archive, Projector
from .settings import AnalyticsSettings
from .store import Store
from .tracing import as_numbers, session_tokens
from .views import VIEWS

__all__ = ["make_app", "run"]

TraceReader = Callable[[str, str], Awaitable[list[dict[str, Any]]]]
_WEB = Path(__file__).parent / "web"
_LIMIT = 100_000
_log = structlog.get_logger(__name__)


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value, default=str), status, media_type="application/json")


def _error(error: PolarError) -> Response:
    status = error.status if isinstance(error, RequestError) else 500
    where = error.path if isinstance(error, RequestError) else ""
    return _json({"error": {"message": str(error), "where": where}}, status)


class _Http:
    """The HTTP side: everything but `/health` needs the token, by header, or by the cookie that `/?token=` sets."""

    def __init__(self, store: Store, projectors: list[Projector], token: str, traces: TraceReader | None) -> None:
        self._store = store
        self._traces = traces
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

    async def traces(self, request: Request) -> Response:
        if not self._allowed(request):
            return _error(RequestError("a token is needed: Authorization: Bearer …", 401))
        build = request.query_params.get("build", "live")
        try:
            found = [] if self._traces is None else await self._traces(request.path_params["session"], build)
        except PolarError as error:
            return _error(error)
        return _json({"traces": found})

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


def make_app(store: Store, projectors: list[Projector], token: str, traces: TraceReader | None = None) -> Starlette:
    """The ASGI application. `traces(session, build)` reads a session's traces, token by token."""
    http = _Http(store, projectors, token, traces)
    return Starlette(
        routes=[
            Route("/health", http.health),
            Route("/metrics", http.metrics),
            Route("/v1/query", http.query, methods=["POST"]),
            Route("/v1/views", http.views),
            Route("/v1/traces/{session}", http.traces),
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
        for stream, subject, archive in (*await _events(Catalogue(service.bus)), (TRACES, trace_filter(), None)):
            projector = Projector(
                service.bus,
                store,
                stream,
                subject,
                batch=settings.analytics_batch,
                linger_s=settings.analytics_linger_s,
                archive=archive,
            )
            projectors.append(projector)
            service.background(f"project:{stream}", _runner(projector, service.stop, archive))
        decode, tokenizer_hash = await asyncio.to_thread(_decoder, settings)

        async def traces(session: str, build: str) -> list[dict[str, Any]]:
            return await session_tokens(service.bus, session, build, decode, tokenizer_hash)

        app = make_app(store, projectors, settings.token.get_secret_value(), traces)
        service.background("http", await serve_http(app, service, host=settings.host, port=settings.port))

    try:
        await service.run(setup)
    finally:
        await store.close()


async def _events(catalogue: Catalogue) -> list[tuple[str, str, Archive | None]]:
    """Stream and subject of every segment, and its archive where it was dropped: tables that are made anew have all
    that there ever was.
    """
    found: list[tuple[str, str, Archive | None]] = []
    for segment in await catalogue.segments():
        archive = None
        if await catalogue.has(segment, "dropped"):
            fact = (await catalogue.facts(segment))["dropped"]
            archive = Archive(Path(fact["archive"]), int(fact["last"]))
        found.append((events_stream(segment), EVENTS, archive))
    return found


def _decoder(settings: AnalyticsSettings) -> tuple[Callable[[Sequence[int]], list[str]], str]:
    """Token ids to text with the model's tokenizer, and its hash; without one, ids are shown as numbers."""
    if settings.analytics_model_dir is None:
        return as_numbers, ""
    renderer = load_renderer(profile_for(settings.analytics_model_dir))
    return renderer.decode_tokens, renderer.provenance.tokenizer_hash


def _runner(projector: Projector, stop: asyncio.Event, archive: Archive | None) -> Callable[[], Awaitable[None]]:
    async def work() -> None:
        try:
            await projector.run(stop)
        except (ConfigError, BlobError, OSError) as error:
            if archive is None:
                raise
            where = str(archive.directory)
            _log.error("the tables lack a dropped segment: its archive isn't there", archive=where, error=str(error))
        # An archive has an end; the service goes on.
        await stop.wait()

    return work
