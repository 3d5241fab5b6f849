"""What becomes of a generation request: refused, answered from the record, or sampled in its context.

Everything a harness can ask passes here once its key is known. `call.py` runs what reaches an engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from polar_common.errors import EngineBusy, PolarError, RequestError
from polar_common.events import EngineFacts
from polar_common.ids import segment_of
from polar_common.keys import SessionKey
from polar_proxy.dialects.base import ChatRequest, Dialect, Route, completion_of
from polar_proxy.dialects.faults import fault
from polar_render.base import Head, Renderer
from polar_render.canonical import head_key
from polar_render.messages import Text

from .admission import Refused, admit
from .call import Call, new_choice
from .capture import engine_json
from .context.prompt import Plan, head_of, plan, plan_native
from .context.retry import Decision, decide
from .counting import prompt_length
from .demand import NOTHING, demand_of, without_hidden
from .engines.pool import Pool, Replica
from .exchange import Exchange, Sweeper
from .metrics import METRICS
from .pictures import ImageFormat, pictures_of, refusal, replaced, shown
from .publish import Publisher
from .refusal import reason_of, tell
from .replay import earlier, replay
from .sampling import max_tokens, sampling_used
from .seals import Seals
from .sessions import Session, Sessions
from .settings import ProxySettings

__all__ = ["ProxyService", "Renderers"]


@dataclass(frozen=True, slots=True)
class Renderers:
    """One renderer per way of treating thinking."""

    keep: Renderer
    follow: Renderer

    def by(self, thinking: str) -> Renderer:
        return self.keep if thinking == "keep" else self.follow


class ProxyService:
    """The proxy of one policy model."""

    def __init__(
        self, settings: ProxySettings, renderers: Renderers, pool: Pool, sessions: Sessions, seals: Seals,
        publisher: Publisher, sweeper: Sweeper, window: int,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.renderers = renderers
        self.pool = pool
        self.sessions = sessions
        self.seals = seals
        self.publisher = publisher
        self.sweeper = sweeper
        self.model_window = window
        self.image_format = ImageFormat.of(settings.proxy_model_dir)
        self.running: dict[tuple[str, int], set[Call]] = {}
        self._count = 0
        self._facts: dict[tuple[object, ...], bytes] = {}
        self.draining = False

    @property
    def window(self) -> int:
        """Context window in tokens, 0 if unknown."""
        # An engine may be told to go beyond what its model's files say; what it reports is what it takes.
        windows = (self.settings.proxy_context_window, self.pool.window or self.model_window)
        return min((w for w in windows if w), default=0)

    def sealed(self, session: str, attempt: int) -> None:
        """An attempt was sealed: end its calls and forget it."""
        for call in list(self.running.get((session, attempt), ())):
            call.interrupt("sealed")
        if (session, attempt) not in self.running:
            self.sessions.forget(session, attempt)

    # -- generation

    async def generate(
        self,
        exchange: Exchange,
        dialect: Dialect,
        route: Route,
        key: SessionKey,
        headers: Mapping[str, str],
        body: bytes,
    ) -> None:
        """Answer one generation request. Refusals are recorded; errors are answered in the provider's shape."""
        session: Session | None = None
        request: ChatRequest | None = None
        try:
            self._open(key)
            request = await self._parse(dialect, route, headers, body)
            if self.draining:
                raise EngineBusy("the proxy is draining", 429, 1.0)
            session = await self.sessions.get(key)
            admit(session, self.settings, self._count)
            self._check(request, key)
            session.index.calls += request.sampling.n
            session.running += 1
            self._count += 1
            try:
                await self._admitted(exchange, dialect, session, request)
            except PolarError as error:
                if fault(error).status in (429, 503):
                    # It reached no engine, and is to be made again.
                    session.index.calls -= request.sampling.n
                raise
            finally:
                session.running -= 1
                self._count -= 1
        except PolarError as error:
            await self._refuse(exchange, dialect, key, session, request, error)

    def _open(self, key: SessionKey) -> None:
        """Raises RequestError for a sealed attempt, or while seals can't be known."""
        if not self.seals.ready:
            raise RequestError("the proxy isn't in touch with the log", status=503, kind="unavailable")
        if self.seals.sealed(key.session, key.attempt):
            raise RequestError("this session has ended", status=409, kind="conflict_error")

    async def _parse(self, dialect: Dialect, route: Route, headers: Mapping[str, str], body: bytes) -> ChatRequest:
        if len(body) > self.settings.proxy_thread_bytes:
            return await asyncio.to_thread(dialect.parse, route, headers, body)
        return dialect.parse(route, headers, body)

    def _check(self, request: ChatRequest, key: SessionKey) -> None:
        found = self.pool.capabilities
        if self.settings.proxy_unknown_model == "refuse" and request.model not in (key.model, found and found.model):
            raise RequestError(f"the model {request.model!r} isn't served here", status=404, path="model")
        if request.sampling.n > self.settings.proxy_choices:
            raise RequestError(f"at most {self.settings.proxy_choices}", path="n")
        if request.stream and request.sampling.n > 1 and request.dialect != "openai_chat":
            raise RequestError("one choice per stream", path="n")

    async def _admitted(self, exchange: Exchange, dialect: Dialect, session: Session, request: ChatRequest) -> None:
        name = (session.key.session, session.key.attempt)

        def over() -> bool:
            return exchange.gone or self.draining or self.seals.sealed(*name)

        await self.pool.there(self.settings.proxy_wait_s, over)
        request = without_hidden(await self._expanded(session, request))
        renderer = self.renderers.by(session.key.sampling.thinking)
        decision = await self._decide(session, request)
        if decision.action == "replay":
            session.index.calls -= request.sampling.n
            node = session.index.nodes[decision.completion]
            await replay(exchange, dialect, session, request, node, renderer)
            return
        request, noted, urls = await self._images(session, request)
        made = await self._plan(session, request, renderer)
        if noted:
            made = replace(made, dropped=noted, additions=(*made.additions, "image_placeholder"))
        if made.native is not None and any(pictures_of(request.messages)):
            made = replace(made, native=replace(made.native, images=urls), pictures=self.image_format)
        replica = self.pool.pick(f"{session.key.session}.{session.key.attempt}.{request.hints.agent}")
        call = self._call(exchange, dialect, session, made, renderer, replica)
        self.running.setdefault(name, set()).add(call)
        self.sweeper.add(exchange, lambda: call.interrupt("client_gone"))
        try:
            if self.seals.sealed(*name):
                raise RequestError("this session has ended", status=409, kind="conflict_error")
            await call.run()
        finally:
            call.settle()
            self.sweeper.remove(exchange)
            self._over(name, call)

    def _over(self, name: tuple[str, int], call: Call) -> None:
        calls = self.running.get(name)
        if calls is not None:
            calls.discard(call)
            if not calls:
                del self.running[name]
                if self.seals.sealed(*name):
                    self.sessions.forget(*name)

    def _call(
        self, exchange: Exchange, dialect: Dialect, session: Session, made: Plan, renderer: Renderer, replica: Replica
    ) -> Call:
        request, key, capabilities = made.request, session.key, replica.capabilities
        assert capabilities is not None
        tokens = max_tokens(
            request.sampling.max_tokens, _cap(session), self.window, len(made.prompt),
            self.settings.proxy_max_tokens,
        )  # fmt: skip
        demand = demand_of(request, guides=capabilities.guides)
        guide = demand.form or (request.response_format if capabilities.guides else None)
        lost = ["tool_choice"] if demand.by == "dropped" else []
        if request.response_format is not None and guide is not request.response_format:
            lost.append("response_format")
        if demand is not NOTHING or lost:
            made = replace(made, demand=demand, dropped=(*made.dropped, *lost))
        call = Call(
            session, dialect, made, renderer, replica, exchange, self.publisher, self._engine(replica, renderer),
            self.settings.proxy_keepalive_s, policy_seq=replica.policy_seq, swaps=replica.swaps,
        )  # fmt: skip
        repeat = len(session.index.by_hash.get(request.raw_hash, ())) + session.index.aborted[request.raw_hash]
        for number in range(request.sampling.n):
            used = sampling_used(
                key.sampling, request.sampling, tokens=tokens, session=key.session, request_hash=request.raw_hash,
                repeat=repeat, choice=number,
            )  # fmt: skip
            choice = new_choice(made, renderer, used, replica.version, guide)
            call.choices.append(choice)
            session.index.live[choice.live.completion] = choice.live
        return call

    def _engine(self, replica: Replica, renderer: Renderer) -> bytes:
        found, told = replica.capabilities, renderer.provenance
        assert found is not None
        name = (replica.engine.replica, replica.weights_hash, id(found), id(renderer))
        known = self._facts.get(name)
        if known is not None:
            return known
        if len(self._facts) > 1000:
            self._facts.clear()
        facts = EngineFacts(
            name=found.engine, replica=replica.engine.replica, model=found.model, weights_hash=replica.weights_hash,
            dtype=found.dtype, logprob_kind=found.logprobs, tokenizer_hash=told.tokenizer_hash,
            template_hash=told.template_hash, renderer=told.renderer, renderer_version=told.renderer_version,
            vocab_size=told.vocab_size, end_of_turn=renderer.stop_ids,
        )  # fmt: skip
        made = self._facts[name] = engine_json(facts)
        return made

    # -- context

    async def _plan(self, session: Session, request: ChatRequest, renderer: Renderer) -> Plan:
        """The prompt. Before it is concluded that nothing is continued, the log is asked for what others captured."""
        head = head_of(request)
        key = head_key(head)
        made = await self._make(session, request, renderer, head, key)
        if _doubtful(made) and await self.sessions.refresh(session):
            made = await self._make(session, request, renderer, head, key)
        return made

    async def _make(self, session: Session, request: ChatRequest, renderer: Renderer, head: Head, key: bytes) -> Plan:
        how = session.key.sampling
        found = self.pool.capabilities
        ids_in = found is None or found.ids_in
        if how.context == "native" or not ids_in:
            make = partial(plan_native, session.index, request, renderer, head, key, ids_in=ids_in)
        else:
            make = partial(plan, session.index, request, renderer, head, key, keep=how.thinking == "keep")
        size = sum(len(p.text) for m in request.messages for p in m.parts if isinstance(p, Text))
        if size > self.settings.proxy_thread_bytes:
            return await asyncio.to_thread(make)
        return make()

    async def _expanded(self, session: Session, request: ChatRequest) -> ChatRequest:
        """The conversation that `previous_response_id` names, before the new input."""
        told = request.hints.previous_response
        if not told:
            return request
        node = session.index.nodes.get(completion_of(told))
        if node is None and await self.sessions.refresh(session):
            node = session.index.nodes.get(completion_of(told))
        if node is None:
            raise RequestError(f"{told!r} isn't a response of this session", status=404, path="previous_response_id")
        before = node.conversation()
        fresh = list(request.messages)
        if fresh and fresh[0].role in ("system", "developer"):
            kept = [m for m in before if m.role not in ("system", "developer")]
            leading = [m for m in fresh if m.role in ("system", "developer")]
            before = leading + kept if leading != before[: len(leading)] else before
            fresh = fresh[len(leading) :]
        return replace(request, messages=(*before, *fresh))

    async def _images(
        self, session: Session, request: ChatRequest
    ) -> tuple[ChatRequest, tuple[str, ...], Mapping[str, str]]:
        """The request as the engine can take it, what was dropped for that, and data URLs by the pictures' hashes.

        Images that the engine can't see become a placeholder, if that's wanted; else they're refused.
        """
        if not any(pictures_of(request.messages)):
            return request, (), {}
        found = self.pool.capabilities
        if found is not None and found.images:
            store = self.sessions.blobs(segment_of(session.key.session))
            addresses = self.settings.proxy_image_urls == "engine"
            seen = await shown(request, session.index.pictures, store, addresses=addresses)
            return seen.request, (), seen.urls
        if self.settings.proxy_images == "refuse":
            raise refusal(request, "the model takes no images")
        return *replaced(request), {}

    async def _decide(self, session: Session, request: ChatRequest) -> Decision:
        """Whether the request is a retry. A marked one may be of a call that another instance captured."""
        marked = request.hints.retry > 0
        if marked:
            await self.sessions.refresh(session)
        while True:
            known = earlier(session.index, request.raw_hash)
            decision = decide(known, marked=marked, rejected=session.index.rejected[request.raw_hash])
            if decision.action != "wait":
                break
            settled = session.settled
            await settled.wait()
        if decision.consumed:
            session.index.rejected[request.raw_hash] -= 1
        return decision

    # -- refusals

    @property
    def count_running(self) -> int:
        """Generation calls under way."""
        return self._count

    async def refuse(self, exchange: Exchange, dialect: Dialect, key: SessionKey, error: PolarError) -> None:
        """Answer and record a refusal of a request that wasn't even read."""
        await self._refuse(exchange, dialect, key, None, None, error)

    async def _refuse(
        self, exchange: Exchange, dialect: Dialect, key: SessionKey, session: Session | None,
        request: ChatRequest | None, error: PolarError,
    ) -> None:  # fmt: skip
        status = fault(error).status
        reason = error.reason if isinstance(error, Refused) else reason_of(error, status)
        METRICS.rejected.labels(reason).inc()
        if session is not None and request is not None and status in (429, 503):
            session.index.rejected[request.raw_hash] += 1
        if not exchange.started:
            await tell(exchange, dialect, error, request)
        await self.publisher.rejected(key, dialect.name, status, reason, str(error))

    # -- other questions

    async def count(
        self, dialect: Dialect, route: Route, key: SessionKey, headers: Mapping[str, str], body: bytes
    ) -> bytes:
        """Tokens that a request would be prompted with. Nothing is recorded; what would be refused is refused."""
        self._open(key)
        request = await self._parse(dialect, route, headers, body)
        session = await self.sessions.get(key)
        request, _, urls = await self._images(session, without_hidden(await self._expanded(session, request)))
        renderer = self.renderers.by(key.sampling.thinking)
        head = head_of(request)
        made = await self._make(session, request, renderer, head, head_key(head))
        if made.native is None or not any(pictures_of(request.messages)):
            return dialect.count(len(made.prompt))
        admit(session, self.settings, self._count)
        session.running += 1
        self._count += 1
        try:
            replica = self.pool.pick(f"{key.session}.{key.attempt}.{request.hints.agent}")
            return dialect.count(await prompt_length(replica, replace(made.native, images=urls)))
        finally:
            session.running -= 1
            self._count -= 1

    def models(self, dialect: Dialect, route: Route, key: SessionKey) -> bytes:
        """The listing. An unknown name is the policy's too, unless that is refused."""
        capabilities = self.pool.capabilities
        names = list(dict.fromkeys([key.model, *([capabilities.model] if capabilities else [])]))
        if route.model and route.model not in names and self.settings.proxy_unknown_model == "serve":
            names.append(route.model)
        return dialect.models(names, self.window, route)

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new and wait for what runs."""
        self.draining = True
        deadline = time.monotonic() + timeout_s
        while self._count and time.monotonic() < deadline:
            await asyncio.sleep(0.02)


def _cap(session: Session) -> int | None:
    """Tokens that one call may still sample, None without a limit."""
    key = session.key
    left = None if key.total_tokens is None else max(1, key.total_tokens - session.index.tokens)
    return min((n for n in (key.max_tokens_per_call, left) if n is not None), default=None)


def _doubtful(made: Plan) -> bool:
    """Whether another instance may know a call that this request continues, or a longer one."""
    if made.parent is None:
        return True
    new = made.request.messages[made.parent.position + 1 :]
    return any(m.role == "assistant" for m in (new[:-1] if made.request.prefill else new))
