"""The engine as its HTTP routes see it: requests in, deltas out, and who may come in while it is paused or full.

Lives on the event loop; the scheduler's thread hands over what it sampled by `call_soon_threadsafe`. Needs torch only
when a host is made by `load`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError

from polar_common.errors import ConfigError, EngineBusy, RequestError
from polar_engine.choice import Call, Delta
from polar_engine.models import ModelDir, weights_hash
from polar_engine.requests import GenerateRequest, Served
from polar_engine.scheduler import Scheduler
from polar_engine.settings import EngineSettings
from polar_engine.text import TextStream

__all__ = ["EngineHost", "Running", "text_stream"]

T = TypeVar("T")
# A paused or full engine doesn't know for how long; a client that asks once a second is no burden.
RETRY_AFTER_S = 1.0


class Running:
    """A submitted request: iterate over its deltas. Closing it early aborts the generation."""

    def __init__(self, host: EngineHost, request: GenerateRequest, key: str) -> None:
        self._host = host
        self._request = request
        self.key = key
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self._left = request.n

    def put(self, delta: Delta) -> None:
        """Called on the event loop, delta by delta."""
        self._deltas.put_nowait(delta)

    async def deltas(self) -> AsyncIterator[Delta]:
        """Until every choice has ended."""
        while self._left:
            delta = await self._deltas.get()
            if delta.finish is not None:
                self._left -= 1
            yield delta

    def close(self) -> None:
        """Take the request off the books; what still runs is aborted within one step."""
        if self._left:
            self._host.scheduler.abort([self.key])
        self._host.forget(self)


class EngineHost:
    """One model, its scheduler, and the gate in front of it."""

    def __init__(
        self, settings: EngineSettings, model: ModelDir, served: Served, tokenizer: Any, scheduler: Scheduler
    ) -> None:
        """`tokenizer` is the model's `transformers` tokenizer."""
        self.settings = settings
        self.model = model
        self.served = served
        self.tokenizer = tokenizer.backend_tokenizer
        self.scheduler = scheduler
        self.created = int(time.time())
        self._templates = tokenizer
        self.paused: str | None = None
        self._live: dict[str, Running] = {}
        self._keys = itertools.count()
        self._updating = asyncio.Lock()

    @property
    def load_count(self) -> int:
        """Requests under way or waiting."""
        return len(self._live)

    def open(self, request: GenerateRequest) -> Running:
        """Start generating. Raises EngineBusy while paused or full; a kept pause takes requests in and holds them."""
        if self.paused in ("abort", "wait"):
            raise EngineBusy("the engine is paused", 503, RETRY_AFTER_S)
        if len(self._live) >= self.settings.max_waiting:
            raise EngineBusy("too many requests are waiting", 429, RETRY_AFTER_S)
        loop = asyncio.get_running_loop()
        # Clients may reuse a request id; the key under which the scheduler knows a request is used once.
        running = Running(self, request, f"{request.request_id}#{next(self._keys)}")

        def deliver(delta: Delta) -> None:
            # A loop that is closed has no client left to deliver to.
            if not loop.is_closed():
                loop.call_soon_threadsafe(running.put, delta)

        params = request.params
        call = Call(
            running.key,
            request.prompt,
            params,
            request.n,
            request.salt,
            deliver,
            every_token=request.stream,
            wants_text=request.as_text or bool(params.stop),
        )
        self._live[running.key] = running
        self.scheduler.submit(call)
        return running

    def forget(self, running: Running) -> None:
        """A request has left."""
        self._live.pop(running.key, None)

    async def abort(self, request_ids: list[str]) -> int:
        """Abort by the id a client chose or by the full one; how many requests were found."""
        wanted = {*request_ids, *(f"generate-tokens-{r}" for r in request_ids)}
        keys = [key for key in self._live if key.rpartition("#")[0] in wanted]
        return await _done(self.scheduler.abort(keys))

    async def pause(self, mode: str, clear_cache: bool) -> None:
        """`abort` what runs, `wait` for it to end, or `keep` it frozen where it stands."""
        self.paused = mode
        if mode == "abort":
            await _done(self.scheduler.abort_all())
        # Frozen requests would never end, so waiting for them thaws them first.
        await _done(self.scheduler.freeze(mode == "keep"))
        if mode == "wait":
            await _done(self.scheduler.idle())
        if clear_cache:
            await _done(self.scheduler.clear_cache())

    async def resume(self) -> None:
        """Take requests again, and go on with those that were kept."""
        self.paused = None
        await _done(self.scheduler.freeze(False))

    async def update_weights(self, path: Path, version: str | None) -> None:
        """Load other weights beside the present ones and swap them in between two steps. Raises ConfigError."""
        from polar_engine.forward import load_weights

        def load() -> tuple[Any, str]:
            if not path.is_dir():
                raise ConfigError(f"`{path}` isn't a directory", "path")
            return load_weights(path, self.settings.dtype), weights_hash(path)

        async with self._updating:
            weights, digest = await asyncio.to_thread(load)
            await _done(self.scheduler.swap(weights, version))
            self.model = ModelDir(self.model.name, path, digest, "update")

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool) -> str:
        """Messages by the model's own chat template. Raises RequestError where it has none or refuses them."""
        try:
            text = self._templates.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except (ValueError, TypeError, TemplateError) as error:
            raise RequestError(f"the chat template can't render this: {error}", path="messages") from error
        return str(text)

    async def relabel(self, version: str) -> None:
        """Give the present weights another version; the prefix cache starts anew."""
        await _done(self.scheduler.relabel(version))

    async def clear_cache(self) -> None:
        """Forget all kept prefixes."""
        await _done(self.scheduler.clear_cache())


def text_stream(tokenizer: Any, call: Call) -> TextStream | None:
    """A decoder for one choice of `call`, or None where nobody wants its text. `tokenizer` is a fast one."""
    params = call.params
    if not call.wants_text:
        return None
    return TextStream(
        tokenizer,
        params.stop,
        include_stop=params.include_stop_str_in_output,
        skip_special=params.skip_special_tokens,
    )


async def _done(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)
