"""One generation call that reaches an engine: n samples, streamed or whole, captured before anything actionable.

`service.py` decides that a call is made and with which prompt; here it is run. Whatever happens, each sample ends on
the log: captured (then perhaps undelivered), or aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from polar_common.errors import BusError, EngineDown, EngineError, EngineOverflow, PolarError, RequestError
from polar_common.events import SamplingUsed
from polar_common.ids import new_id
from polar_common.tasks import cancel_and_wait, spawn
from polar_proxy.dialects.base import Dialect, Encoder, Frame, Minted, Reply, Usage
from polar_render.base import AnswerEvent, Renderer
from polar_render.messages import Json, text_of

from .capture import CallFacts, Captured, build, reply_of
from .context.nodes import Live
from .context.prompt import Plan
from .engines.base import Chunk, GenerateRequest
from .engines.pool import Replica
from .exchange import Exchange
from .headers import stream_headers, whole_headers
from .metrics import METRICS
from .publish import Publisher, Reason
from .refusal import tell
from .sample import Sample, Sampling
from .sessions import Session

__all__ = ["Call", "Choice", "new_choice"]

_log = structlog.get_logger(__name__)
_LONG = 16_384
"""Prompt ids from which on an event is built off the loop."""


@dataclass(slots=True, eq=False)
class Choice:
    """One sample under way."""

    live: Live
    used: SamplingUsed
    request: GenerateRequest
    sampling: Sampling
    sample: Sample | None = None
    captured: Captured | None = None
    ttft: float = 0.0
    settled: bool = False


@dataclass(slots=True, eq=False)
class Call:
    """Everything one call needs. `interrupted` is why it was stopped from outside."""

    session: Session
    dialect: Dialect
    plan: Plan
    renderer: Renderer
    replica: Replica
    exchange: Exchange
    publisher: Publisher
    engine: bytes
    keepalive_s: float
    choices: list[Choice] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.monotonic)
    interrupted: Reason | None = None
    policy_seq: int = 0
    swaps: int = 0
    """The replica's `swaps` at the start."""
    committing: bool = False
    """What comes goes onto the log, a sample or its failure: nothing may interrupt that."""
    encoder: Encoder | None = None
    """Of the stream that has been begun: an error in it goes on with its numbers and ids."""

    # -- from outside

    def interrupt(self, reason: Reason) -> None:
        """The caller is gone or the key is sealed: stop sampling. A sample that is being committed is kept."""
        if reason == "client_gone":
            for choice in self.choices:
                choice.live.gone = True
        if self.interrupted is None and not self.committing and self.exchange.task is not None:
            self.interrupted = reason
            self.exchange.task.cancel()

    # -- the flow

    async def run(self) -> None:
        """Ask, capture, answer. Errors of the engine or the log are answered in the provider's shape."""
        self.replica.enter()
        try:
            if self.plan.request.stream:
                await self._streamed()
            else:
                await self._whole()
        except asyncio.CancelledError:
            if self.interrupted is None:
                await self._abort("cancelled", "the proxy is stopping")
                raise
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            await self._stopped(self.interrupted)
        except PolarError as error:
            await self._failed(error)
        except Exception as error:
            # Ours to mend; the harness may try again, and the call is on the log.
            _log.exception("a call failed", session=self.session.key.session)
            await self._failed(EngineDown(f"internal error: {type(error).__name__}", 500))
        finally:
            self.replica.leave()

    async def _whole(self) -> None:
        if len(self.choices) == 1:
            self.choices[0].sampling.take(await self.replica.engine.complete(self.choices[0].request))
        else:
            asked = [
                spawn(self.replica.engine.complete(c.request), name=f"choice:{c.live.completion}") for c in self.choices
            ]
            try:
                for choice, chunk in zip(self.choices, await asyncio.gather(*asked), strict=True):
                    choice.sampling.take(chunk)
            finally:
                await cancel_and_wait(*asked)
        for choice in self.choices:
            choice.sample, _ = choice.sampling.finish(fed=False)
            choice.ttft = time.monotonic() - self.clock
        await self._commit()
        body = self.dialect.encode(self._replies(), self.plan.request)
        await self.exchange.answer(200, whole_headers(self.choices[0].live.completion), body)
        await self._delivered()

    async def _streamed(self) -> None:
        minted = [Minted(c.live.completion, int(self.started)) for c in self.choices]
        encoder = self.encoder = self.dialect.encoder(self.plan.request, minted)
        outlet = _Outlet(self.exchange, stream_headers(self.plan.request, minted[0].completion))
        usage = Usage(len(self.plan.prompt))
        opened = False
        async with aclosing(self._chunks()) as chunks:
            async for number, chunk in chunks:
                frames = [] if opened else encoder.start(usage)
                opened = True
                if number < 0:
                    await outlet.put(frames, encoder.keepalive())
                    continue
                choice = self.choices[number]
                if chunk.ids and not choice.ttft:
                    choice.ttft = time.monotonic() - self.clock
                    METRICS.first_token.observe(choice.ttft)
                for event in choice.sampling.feed(chunk):
                    frames += encoder.feed(event, number)
                await outlet.put(frames)
        frames = self._ended(encoder)
        await outlet.put(frames)
        await self._commit()
        closing: list[Frame] = []
        for number, reply in enumerate(self._replies()):
            closing += encoder.finish(reply, number)
        closing += encoder.end(self._usage())
        await outlet.close(closing)
        await self._delivered()

    def _ended(self, encoder: Encoder) -> list[Frame]:
        """The last events of each choice."""
        frames: list[Frame] = []
        for number, choice in enumerate(self.choices):
            events: list[AnswerEvent]
            choice.sample, events = choice.sampling.finish(fed=True)
            for event in events:
                frames += encoder.feed(event, number)
        return frames

    async def _chunks(self) -> AsyncGenerator[tuple[int, Chunk]]:
        """Chunks of all choices by number; number -1 where nothing came for a while."""
        queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(maxsize=64)
        engine = self.replica.engine
        if len(self.choices) == 1:
            # The common case needs no queue once the first token is there.
            async with aclosing(engine.stream(self.choices[0].request)) as stream:
                first = spawn(_next(stream), name="first")
                try:
                    while not (await asyncio.wait({first}, timeout=self.keepalive_s))[0]:
                        yield -1, Chunk()
                finally:
                    await cancel_and_wait(first)
                if isinstance(told := first.result(), EngineError):
                    raise told
                yield 0, told
                async for chunk in stream:
                    yield 0, chunk
            return

        async def pump(number: int, choice: Choice) -> None:
            try:
                async with aclosing(engine.stream(choice.request)) as stream:
                    async for chunk in stream:
                        await queue.put((number, chunk))
                await queue.put((number, None))
            except EngineError as error:
                await queue.put((number, error))

        pumps = [spawn(pump(n, c), name=f"choice:{c.live.completion}") for n, c in enumerate(self.choices)]
        left = len(pumps)
        try:
            while left:
                try:
                    async with asyncio.timeout(self.keepalive_s):
                        number, item = await queue.get()
                except TimeoutError:
                    yield -1, Chunk()
                    continue
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield number, item
        finally:
            await cancel_and_wait(*pumps)

    # -- the log

    async def _commit(self) -> None:
        """All samples onto the log. Nothing may interrupt this: the answer belongs to the harness from here on."""
        self.committing = True
        now = time.monotonic() - self.clock
        delivered = tuple(self.session.delivered[:64])
        first = self.choices[0].live.completion
        for number, choice in enumerate(self.choices):
            choice.live.committing = True
            assert choice.sample is not None and self.replica.capabilities is not None
            if not choice.sample.versions and self.replica.swapped(self.swaps):
                choice.sample.kv_mixed = True
            facts = CallFacts(
                completion=choice.live.completion, key=self.session.key, producer=self.publisher.producer,
                used=choice.used, engine=self.engine,
                capabilities=self.replica.capabilities, policy_seq=self._policy(choice.sample),
                salt=choice.request.cache_salt, started=self.started, ttft=choice.ttft, duration=now, choice=number,
                parallel_of=first if number else "", constrained=choice.request.guide is not None,
                delivered=delivered if not number else (),
            )  # fmt: skip
            make = partial(build, self.session.index, self.plan, choice.sample, facts, self.renderer)
            choice.captured = await asyncio.to_thread(make) if len(self.plan.prompt) > _LONG else make()
        if len(self.choices) == 1:
            await self._put(self.choices[0])
        else:
            await asyncio.gather(*(self._put(c) for c in self.choices))

    def _policy(self, sample: Sample) -> int:
        """Of the oldest weights that sampled: the engine's own word where its version is known here."""
        if sample.versions:
            return self.replica.seq(sample.versions[0].version, self.policy_seq)
        return self.policy_seq

    async def _put(self, choice: Choice) -> None:
        assert choice.captured is not None
        await self.publisher.captured(self.session, choice.captured)
        choice.settled = True
        METRICS.captured(choice.captured)

    def _replies(self) -> list[Reply]:
        tokens = self.plan.request.sampling.logprobs
        return [reply_of(c.captured.node, c.sample, self.renderer, tokens=tokens) for c in self.choices if c.captured]

    def _usage(self) -> Usage:
        """Over all choices; the prompt is counted once."""
        each = [c.captured.node.usage for c in self.choices if c.captured is not None]
        return replace(
            each[0],
            completion_tokens=sum(u.completion_tokens for u in each),
            reasoning_tokens=sum(u.reasoning_tokens for u in each),
        )

    async def _delivered(self) -> None:
        """Whether the harness has its answer, as far as its connection tells."""
        gone = self.exchange.gone
        for choice in self.choices:
            if choice.captured is None:
                continue
            node = choice.captured.node
            node.delivery = "undelivered" if gone else "delivered"
            if gone:
                await self.publisher.undelivered(self.session, node.completion, "the connection was closed")
                METRICS.undelivered.inc()
            else:
                self.session.delivered.append(node.completion)

    # -- bad ends

    async def _stopped(self, reason: Reason) -> None:
        await self._abort(reason, "")
        if reason == "sealed":
            await self._tell(RequestError("this session has ended", status=409, kind="conflict_error"))

    async def _failed(self, error: PolarError) -> None:
        if isinstance(error, BusError):
            error = EngineDown("the log doesn't answer; nothing was recorded", 503, 1.0)
            await self._tell(error)
            return
        self.committing = True
        await self._abort("context_full" if isinstance(error, EngineOverflow) else "engine_error", str(error))
        METRICS.errors.labels("engine").inc()
        if not self.exchange.gone:
            self.session.index.rejected[self.plan.request.raw_hash] += 1
        await self._tell(error)

    async def _abort(self, reason: Reason, detail: str) -> None:
        for choice in self.choices:
            if choice.settled:
                continue
            choice.settled = True
            await self.publisher.aborted(
                self.session, self.plan.request, choice.live.completion, reason, detail=detail,
                prompt_tokens=len(self.plan.prompt), ids=choice.sampling.ids, logprobs=choice.sampling.logprobs,
                started=self.started, duration=time.monotonic() - self.clock,
            )  # fmt: skip
            METRICS.aborted.labels(reason).inc()

    async def _tell(self, error: PolarError) -> None:
        """The error in the provider's shape: as a status while nothing was sent, else inside the stream."""
        minted = [Minted(c.live.completion, int(self.started)) for c in self.choices]
        begun = self.encoder if self.exchange.started else None
        await tell(self.exchange, self.dialect, error, self.plan.request, minted, begun)

    def settle(self) -> None:
        """The call is over, however it ended: who waits for its outcome may look again."""
        for choice in self.choices:
            self.session.index.live.pop(choice.live.completion, None)
        self.session.settle()


async def _next(stream: AsyncIterator[Chunk]) -> Chunk | EngineError:
    """The first chunk, or why there is none: a refusal is told to the harness, and no fault of ours to log."""
    try:
        return await anext(stream)
    except EngineError as error:
        return error
    except StopAsyncIteration:
        return EngineDown("the engine's stream was empty")


class _Outlet:
    """Frames towards the harness: they flow until the first actionable one, and from there on wait for `close`."""

    def __init__(self, exchange: Exchange, headers: dict[str, str]) -> None:
        self._exchange = exchange
        self._headers = headers
        self._held: list[bytes] = []
        self._holding = False

    async def put(self, frames: list[Frame], extra: bytes = b"") -> None:
        out: list[bytes] = []
        for frame in frames:
            self._holding = self._holding or frame.actionable
            (self._held if self._holding else out).append(frame.data)
        if extra and not self._holding:
            out.append(extra)
        if out:
            await self._open()
            await self._exchange.send(b"".join(out))

    async def close(self, frames: list[Frame]) -> None:
        self._held += [f.data for f in frames]
        await self._open()
        await self._exchange.send(b"".join(self._held), more=False)

    async def _open(self) -> None:
        if not self._exchange.started:
            await self._exchange.start(200, self._headers)


def new_choice(
    plan: Plan, renderer: Renderer, used: SamplingUsed, salt: str, guide: dict[str, Json] | None
) -> Choice:  # fmt: skip
    """A sample to be made, with its completion id."""
    completion = new_id()
    request = GenerateRequest(
        request_id=completion, prompt=plan.prompt, sampling=used, stop_token_ids=renderer.stop_ids, cache_salt=salt,
        guide=guide, native=plan.native,
    )  # fmt: skip
    live = Live(completion, plan.request.raw_hash)
    begun = text_of(plan.request.messages[-1]) if plan.request.prefill else ""
    sampling = Sampling(renderer.parser(plan.head, prefill=begun), used.stop, plan.demand.tools)
    return Choice(live, used, request, sampling)
