"""Wiring of the proxy: engines, renderer, seals, HTTP on TCP and on a Unix socket."""

from __future__ import annotations

import asyncio
import gc
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from polar_common.errors import ConfigError
from polar_common.ids import token
from polar_common.service import Service, serve_http
from polar_common.tasks import cancel_and_wait, spawn
from polar_render import ModelProfile, load_renderer, profile_for
from polar_render.base import Renderer

from .asgi import ProxyApp
from .engines.base import Engine
from .engines.chat import VllmChatEngine
from .engines.pool import Pool
from .engines.sglang import SglangEngine
from .engines.vllm import VllmEngine
from .exchange import Sweeper
from .protocol import BoundedProtocol
from .publish import Publisher
from .seals import Seals
from .service import ProxyService, Renderers
from .sessions import Sessions
from .settings import ProxySettings
from .weights import Weights

__all__ = ["Proxy", "run"]

_FIRST_PROBE_S = 20.0


_ADAPTERS: dict[str, type[VllmEngine] | type[SglangEngine]] = {
    "vllm": VllmEngine,
    "sglang": SglangEngine,
    "vllm_chat": VllmChatEngine,
}


def engines(settings: ProxySettings) -> list[Engine]:
    """One adapter per replica. Its name is made from its address, so that all instances call it the same."""
    adapter = _ADAPTERS[settings.proxy_engine_kind]
    secret = settings.proxy_engine_token.get_secret_value()
    return [
        adapter(
            url, settings.proxy_model, replica_name(url), logprob_kind=settings.proxy_logprob_kind,
            idle_s=settings.proxy_engine_idle_s, token=secret,
        )
        for url in settings.proxy_engines
    ]  # fmt: skip


def replica_name(url: str) -> str:
    """A subject token for an engine's address."""
    parts = urlsplit(url)
    return token(re.sub(r"[^A-Za-z0-9]+", "-", f"{parts.netloc}{parts.path}").strip("-"))


def profile(settings: ProxySettings) -> ModelProfile:
    """Raises ConfigError if there is no model directory."""
    if settings.proxy_model_dir is None:
        raise ConfigError("name the directory with the policy's tokenizer and chat template", "POLAR_PROXY_MODEL_DIR")
    found = profile_for(settings.proxy_model_dir, model=settings.proxy_model)
    changed: dict[str, object] = {}
    if settings.proxy_template:
        changed["template"] = settings.proxy_template
    if settings.proxy_renderer != "auto":
        changed["renderer"] = settings.proxy_renderer
    if settings.proxy_stop_tokens:
        changed["stop_tokens"] = settings.proxy_stop_tokens
    return replace(found, **changed)  # type: ignore[arg-type]


class Proxy:
    """One proxy process. Tests pass their own engines and renderer."""

    def __init__(
        self, settings: ProxySettings, *, made: list[Engine] | None = None, renderer: Renderer | None = None
    ) -> None:
        self.settings = settings
        self.house = Service("proxy", settings)
        self._made = made
        self._renderer = renderer
        self.service: ProxyService | None = None
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Until stopped."""
        try:
            await self.house.run(self._setup)
        finally:
            if self.service is not None:
                await self.service.pool.close()

    async def _setup(self) -> None:
        settings, bus = self.settings, self.house.bus
        window, renderers = self._renderers()
        pool = Pool(self._made if self._made is not None else engines(settings))
        # Ready without its engines too: it says so, and they may come later.
        await asyncio.wait({spawn(pool.probe(), name="first probe")}, timeout=_FIRST_PROBE_S)
        sessions = Sessions(bus, {"keep": renderers.keep, "follow": renderers.follow}, settings.proxy_sessions)
        service: ProxyService
        seals = Seals(bus, settings.segment, lambda s, a: service.sealed(s, a))
        sweeper = Sweeper()
        service = ProxyService(settings, renderers, pool, sessions, seals, Publisher(bus, sessions), sweeper, window)
        self.service = service
        following = spawn(seals.run(), name="seals")
        sweeping = spawn(sweeper.run(), name="sweeper")
        watching = spawn(pool.watch(settings.proxy_health_s), name="engines")
        weights = Weights(bus, pool, settings.segment, drain=settings.proxy_drain)
        knowing = spawn(weights.follow(), name="policies")
        for replica in pool.replicas:
            self.house.background(f"weights-{replica.engine.replica}", partial(weights.work, replica, self.house.stop))
            self.house.background(f"kept-{replica.engine.replica}", partial(weights.keep, replica, self.house.stop))
        self.house.background("followers", lambda: self._while(following, sweeping, watching, knowing))
        while not (seals.caught_up and weights.caught_up.is_set()) and not (following.done() or knowing.done()):
            await asyncio.sleep(0.01)
        _settle_memory()
        await self._listen(ProxyApp(service))

    async def _while(self, *tasks: asyncio.Task[None]) -> None:
        """Until the service stops; a failure of one of the tasks is the service's."""
        stopping = spawn(_wait(self.house.stop), name="stopping")
        done, _ = await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        await cancel_and_wait(stopping, *tasks)
        for task in done - {stopping}:
            task.result()

    def _renderers(self) -> tuple[int, Renderers]:
        if self._renderer is not None:
            return 0, Renderers(self._renderer, self._renderer)
        found = profile(self.settings)
        keep = load_renderer(replace(found, thinking="keep"))
        follow = load_renderer(replace(found, thinking="follow"))
        return found.context_window, Renderers(keep, follow)

    async def _listen(self, app: ProxyApp) -> None:
        settings = self.settings
        http = BoundedProtocol.bounded(settings.proxy_header_limit, settings.proxy_request_s)
        options: dict[str, Any] = {"http": http, "loop": "none", "ws": "none", "proxy_headers": False}
        tcp = await serve_http(app, self.house, host=settings.host, port=settings.port, **options)
        self.house.background("http", tcp)
        path = settings.socket_path
        path.parent.mkdir(parents=True, exist_ok=True)
        uds = await serve_http(app, self.house, host="", port=0, uds=str(path), **options)
        self.house.background("socket", uds)
        self.house.facts["socket"] = str(Path(path).absolute())


def _settle_memory() -> None:
    """Vocabulary and code live for ever: the collector needn't walk them again and again under load."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def run(argv: list[str] | None = None) -> None:
    """Entry point of `polar run-service proxy`."""
    uvloop.run(Proxy(ProxySettings()).run())
