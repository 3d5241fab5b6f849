"""Continuous batching: one thread that owns the model, its key-value buffers and every live request.

Each step takes one decode token of every running choice and a bounded piece of the prompts still to be read, so that a
long prompt slows the others down but never stops them. Everything else that touches the model (abort, pause, swap of
weights) is a command carried out between two steps, so it takes effect within one step and never inside one.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from polar_engine.choice import Call, Choice
from polar_engine.prefix import PrefixCache, common_prefix
from polar_engine.sampling import Sampler, score_row
from polar_engine.text import TextStream

if TYPE_CHECKING:
    from polar_engine.forward import Chunk, Model, Weights
    from polar_engine.kv import KvBuffer

__all__ = ["Limits", "Scheduler"]

T = TypeVar("T")
_log = structlog.get_logger(__name__)
# A request waits for another one's prompt to be read only where it saves more than this many tokens.
_WORTH_WAITING = 32
# Room for this much of an answer is taken with the prompt; a longer one grows its buffer.
_FIRST_ROOM = 128


@dataclass(frozen=True)
class Limits:
    """`kv_bytes` bounds running requests and prefix cache together; chunks are prompt tokens a step."""

    max_batch: int = 16
    kv_bytes: int = 4 << 30
    chunk_alone: int = 256
    chunk_beside_decodes: int = 64


class Scheduler:
    """See the module. `text(call)` makes a choice's decoder, or None where its text isn't needed."""

    def __init__(
        self,
        model: Model,
        version: str,
        ends: frozenset[int],
        text: Callable[[Call], TextStream | None],
        limits: Limits | None = None,
    ) -> None:
        self.model = model
        self.version = version
        self.limits = limits or Limits()
        self.steps = 0
        self._ends = ends
        self._text = text
        self._cache: PrefixCache[KvBuffer] = PrefixCache(self.limits.kv_bytes)
        self._waiting: deque[Choice[KvBuffer]] = deque()
        self._running: list[Choice[KvBuffer]] = []
        self._frozen = False
        self._idle_waiters: list[Future[None]] = []
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="polar-engine", daemon=True)

    # ---- from any thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Abort what runs and end the thread."""

        def closing() -> None:
            self._abort_where(lambda call: True)
            self._closing = True

        self._commands.put(closing)
        self._thread.join()

    def submit(self, call: Call) -> None:
        """Queue a request; everything about it comes through `call.deliver`."""
        self._commands.put(lambda: self._enqueue(call))

    def abort(self, request_ids: Sequence[str]) -> Future[int]:
        """End requests where they stand, with what they have; how many there were."""
        wanted = frozenset(request_ids)
        return self._command(lambda: self._abort_where(lambda call: call.request_id in wanted))

    def abort_all(self) -> Future[int]:
        """End all requests where they stand."""
        return self._command(lambda: self._abort_where(lambda call: True))

    def freeze(self, frozen: bool) -> Future[None]:
        """Stop stepping, or go on, with every request kept as it is."""
        return self._command(lambda: setattr(self, "_frozen", frozen))

    def idle(self) -> Future[None]:
        """Done as soon as no request is left."""
        waiter: Future[None] = Future()
        self._commands.put(lambda: self._idle_waiters.append(waiter))
        return waiter

    def swap(self, weights: Weights, version: str | None) -> Future[None]:
        """Use other weights from the next step on; `version` None keeps the label. ConfigError for another shape."""
        return self._command(lambda: self._swap(weights, version))

    def relabel(self, version: str) -> Future[None]:
        """Call the present weights `version` from the next token on."""
        return self._command(lambda: self._relabel(version))

    def clear_cache(self) -> Future[None]:
        """Forget all prefixes."""
        return self._command(self._cache.clear)

    def _command(self, action: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def act() -> None:
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

        self._commands.put(act)
        return future

    # ---- on the scheduler's thread ---------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception as error:
                # A request that breaks the scheduler must not leave the others waiting for ever.
                self._fail([*self._running, *self._waiting], error)

    def _turn(self) -> None:
        self._obey()
        if self._closing or self._frozen:
            return
        self._admit()
        if self._running:
            self._step()

    def _obey(self) -> None:
        """Carry out commands; wait for one where there is nothing else to do."""
        if not self._running and not self._waiting:
            for waiter in self._idle_waiters:
                waiter.set_result(None)
            self._idle_waiters.clear()
        idle = self._frozen or not (self._running or self._waiting)
        while True:
            try:
                action = self._commands.get(block=idle)
            except queue.Empty:
                return
            action()
            idle = False

    def _enqueue(self, call: Call) -> None:
        prompt = np.asarray(call.prompt, dtype=np.int32)
        stops = self._ends | call.params.stop_token_ids
        for index in range(call.choices):
            sampler = Sampler(call.params, index, call.prompt, stops)
            self._waiting.append(Choice(call, index, prompt, sampler, self._ends, self._text(call)))

    def _abort_where(self, wanted: Callable[[Call], bool]) -> int:
        ids = set()
        for seq in [s for s in (*self._running, *self._waiting) if wanted(s.call)]:
            ids.add(seq.call.request_id)
            self._retire(seq)
            seq.deliver(seq.finish("abort"))
        return len(ids)

    def _swap(self, weights: Weights, version: str | None) -> None:
        self.model.swap(weights)
        self._cache.clear()
        for seq in self._running:
            seq.kv_mixed = seq.kv_mixed or bool(seq.buffer and seq.buffer.length)
        if version is not None:
            self.version = version

    def _relabel(self, version: str) -> None:
        self._cache.clear()
        self.version = version

    def _admit(self) -> None:
        for seq in list(self._waiting):
            if len(self._running) >= self.limits.max_batch or not self._fits(seq):
                return
            if self._sooner_by_waiting(seq):
                continue
            self._waiting.remove(seq)
            room = len(seq.prompt) + min(seq.call.params.max_tokens, _FIRST_ROOM)
            if seq.scores_prompt:
                seq.buffer = self.model.new_buffer(room)
                seq.buffer.claimed = True
            else:
                seq.buffer = self._cache.acquire(seq.prompt, seq.call.salt, self.model.new_buffer, room)
            seq.cached = seq.buffer.length
            self._running.append(seq)
            self._bound_cache()

    def _need(self, seq: Choice[KvBuffer]) -> int:
        return (len(seq.prompt) + seq.call.params.max_tokens) * self.model.weights.kv.bytes_per_token

    def _reserved(self) -> int:
        return sum(self._need(seq) for seq in self._running)

    def _bound_cache(self) -> None:
        """The cache gets what the running requests leave."""
        self._cache.limit = max(0, self.limits.kv_bytes - self._reserved())
        self._cache.shrink(self._cache.limit)

    def _fits(self, seq: Choice[KvBuffer]) -> bool:
        """Whether there is memory for it; one request alone always runs."""
        return not self._running or self._reserved() + self._need(seq) <= self.limits.kv_bytes

    def _sooner_by_waiting(self, seq: Choice[KvBuffer]) -> bool:
        """Whether a running request is just reading a prompt that this one shares more of than the cache holds."""
        shared = [
            common_prefix(other.prompt, seq.prompt)
            for other in self._running
            if other.prefilling and other.call.salt == seq.call.salt and not other.kv_mixed
        ]
        if not shared or max(shared) <= _WORTH_WAITING:
            return False
        if seq.held[0] != self._cache.generation:
            seq.held = (self._cache.generation, self._cache.match(seq.prompt, seq.call.salt))
        return max(shared) > seq.held[1] + _WORTH_WAITING

    def _plan(self) -> list[tuple[Choice[KvBuffer], int]]:
        """Which choices take part in the next step, with how many tokens each."""
        decodes = [(seq, 1) for seq in self._running if not seq.prefilling]
        budget = self.limits.chunk_beside_decodes if decodes else self.limits.chunk_alone
        prompts = []
        for seq in self._running:
            if seq.prefilling and (take := min(seq.pending, budget)) > 0:
                prompts.append((seq, take))
                budget -= take
        return decodes + prompts

    def _step(self) -> None:
        from polar_engine.forward import Chunk

        plan = self._plan()
        chunks: list[Chunk] = []
        for seq, count in plan:
            assert seq.buffer is not None
            wanted = count if seq.scores_prompt and seq.prefilling else int(count == seq.pending)
            chunks.append(Chunk(seq.buffer, seq.next_tokens(count), wanted))
        try:
            logits = self.model.step(chunks)
        except Exception as error:
            self._fail([seq for seq, _ in plan], error)
            return
        self.steps += 1
        row = 0
        for (seq, _), chunk in zip(plan, chunks, strict=True):
            self._advance(seq, logits[row : row + chunk.wanted])
            row += chunk.wanted

    def _fail(self, sequences: list[Choice[KvBuffer]], error: Exception) -> None:
        _log.error("step failed", error=repr(error), requests=[s.call.request_id for s in sequences])
        for seq in sequences:
            # Its buffer may be half written: it must not be continued by anybody.
            seq.kv_mixed = True
            self._retire(seq)
            seq.deliver(seq.finish("error", message=str(error)))

    def _advance(self, seq: Choice[KvBuffer], logits: npt.NDArray[np.float32]) -> None:
        """Sample from the last row where the prompt is all read; score the prompt's rows where that was asked for."""
        if seq.prefilling and seq.scores_prompt:
            self._score_prompt(seq, logits)
        if seq.pending or not len(logits):
            return
        if seq.prefilling and not seq.kv_mixed:
            assert seq.buffer is not None
            self._cache.insert(seq.prompt, seq.call.salt, seq.buffer)
        try:
            sampled = seq.sampler.sample(logits[-1])
        except FloatingPointError as error:
            self._fail([seq], error)
            return
        finish = seq.accept(sampled, self.version)
        if finish is not None:
            self._retire(seq)
        seq.deliver(finish)

    def _score_prompt(self, seq: Choice[KvBuffer], logits: npt.NDArray[np.float32]) -> None:
        first = len(seq.prompt_scores)
        for row, token in zip(logits, seq.prompt[first + 1 : first + 1 + len(logits)], strict=False):
            scores = row.astype(np.float64)
            scores -= scores.max()
            scores -= np.log(np.exp(scores).sum())
            seq.prompt_scores.append(score_row(scores, int(token), seq.call.params.prompt_logprobs).top)

    def _retire(self, seq: Choice[KvBuffer]) -> None:
        """Take a choice out; what it computed stays for those that continue it."""
        if seq.buffer is None:
            self._waiting.remove(seq)
            return
        self._running.remove(seq)
        buffer, seq.buffer, computed = seq.buffer, None, seq.computed()
        buffer.claimed = False
        self._bound_cache()
        if not seq.kv_mixed:
            self._cache.insert(computed, seq.call.salt, buffer)
