"""An engine that follows a script instead of sampling: the same wire, real token ids, made-up log-probs. No torch.

It stands where a model would be in the way: for smoke runs of harnesses, load and crash tests. It journals what it was
asked and what it said, so that a test can count on its own; and it fails on demand, by call number: of all calls, or
(script flag `orders`) of those of a job that the prompt names.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import orjson
import structlog

from polar_common.errors import ConfigError, EngineBusy
from polar_engine.choice import Call, Choice, Delta, Finish
from polar_engine.host import EngineHost, Running, text_stream
from polar_engine.models import ModelDir
from polar_engine.requests import GenerateRequest, Served
from polar_engine.sampling import Sampled, Sampler
from polar_engine.script import Orders, Script, parse_faults, parse_script
from polar_engine.settings import EngineSettings

__all__ = ["ScriptedScheduler", "load_scripted"]

T = TypeVar("T")
_WORKERS = 64
_log = structlog.get_logger(__name__)


class Journal:
    """One JSON object a line: what was asked, what was said. Flushed line by line, so a kill loses nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("ab") if path else None
        self._lock = threading.Lock()

    def write(self, **facts: Any) -> None:
        if self._file is not None:
            with self._lock:
                self._file.write(orjson.dumps(facts) + b"\n")
                self._file.flush()


class ScriptedScheduler:
    """Stands in for `scheduler.Scheduler`: same methods, answers from a script."""

    def __init__(self, script: Script, tokenizer: Any, settings: EngineSettings, ends: frozenset[int]) -> None:
        """`tokenizer` is a fast (`tokenizers`) one."""
        self._script = script
        self._tokenizer = tokenizer
        self._delay_s = settings.script_token_ms / 1000
        self._split = settings.script_split
        self._ends = ends
        self.version = settings.model_version
        self.journal = Journal(settings.journal)
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="script")
        self._aborted: set[str] = set()
        self._live: dict[str, Call] = {}
        self._lock = threading.Lock()
        self._running = threading.Event()
        self._running.set()
        self._pieces = _pieces(tokenizer)

    @property
    def alive(self) -> bool:
        return True

    def close(self) -> None:
        self.abort_all()
        self._running.set()
        self._pool.shutdown(cancel_futures=True)

    def submit(self, call: Call) -> None:
        with self._lock:
            self._live[call.request_id] = call
        self._pool.submit(self._answer, call)

    def abort(self, request_ids: Sequence[str]) -> Future[int]:
        with self._lock:
            known = [r for r in request_ids if r in self._live]
            self._aborted.update(known)
        return _done(len(known))

    def abort_all(self) -> Future[int]:
        return self.abort(list(self._live))

    def freeze(self, frozen: bool) -> Future[None]:
        (self._running.clear if frozen else self._running.set)()
        return _done(None)

    def idle(self) -> Future[None]:
        waiter: Future[None] = Future()

        def wait() -> None:
            while self._live:
                time.sleep(0.01)
            waiter.set_result(None)

        threading.Thread(target=wait, daemon=True).start()
        return waiter

    def swap(self, weights: object, version: str | None) -> Future[None]:
        self.version = version or self.version
        return _done(None)

    def relabel(self, version: str) -> Future[None]:
        self.version = version
        return _done(None)

    def clear_cache(self) -> Future[None]:
        return _done(None)

    def _answer(self, call: Call) -> None:
        try:
            for index in range(call.choices):
                self._choice(call, index)
        except Exception as error:
            _log.exception("script failed", request=call.request_id)
            call.deliver(Delta(0, (), finish=Finish("error", None, (), False, 0, repr(error))))
        finally:
            with self._lock:
                self._live.pop(call.request_id, None)
                self._aborted.discard(call.request_id)

    def _choice(self, call: Call, index: int) -> None:
        ids = self.answer(call.prompt, index)
        choice: Choice[Any] = Choice(
            call,
            index,
            np.asarray(call.prompt, dtype=np.int32),
            Sampler(call.params, index, call.prompt, self._ends),
            self._ends,
            text_stream(self._tokenizer, call),
        )
        finish = None
        for place, token in enumerate(ids):
            self._running.wait()
            if call.request_id in self._aborted:
                finish = choice.finish("abort")
            else:
                if self._delay_s:
                    time.sleep(self._delay_s)
                # Deterministic and distinct per place, so that a test can tell columns apart.
                finish = choice.accept(Sampled(token, -0.01 - 0.001 * (place % 100), 1), self.version)
            if finish is not None:
                break
            choice.deliver(None)
        finish = finish or choice.finish("length")
        self.journal.write(
            request=call.request_id.rpartition("#")[0],
            choice=index,
            prompt=list(call.prompt),
            sampled=choice.out,
            finish=finish.reason,
            at=time.time(),
        )
        choice.deliver(finish)

    def text_of(self, ids: Sequence[int]) -> str:
        """A prompt as text, control tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def orders(self, prompt: Sequence[int]) -> Orders:
        """What the prompt asks of the engine itself; orders that make no sense come up when it is answered."""
        try:
            return self._script.orders(self.text_of(prompt)) if "orders" in self._script.flags else Orders()
        except ValueError:
            return Orders()

    def answer(self, ids: Sequence[int], index: int) -> list[int]:
        """What choice `index` says to a prompt, its end of turn included. Raises ValueError for senseless orders."""
        prompt = self.text_of(ids)
        script = self._script.ordered(self._script.orders(prompt))
        text = script.answer(prompt)
        return self._ids(text, f"{len(ids)}/{index}/{text}", split=self._split or "split" in script.flags)

    def _ids(self, text: str, seed: str, *, split: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if split:
            rng = random.Random(seed)
            ids = [piece for i in ids for piece in self._splitted(i, rng)]
        return [*ids, min(self._ends)]

    def _splitted(self, token: int, rng: random.Random) -> list[int]:
        """The token, or (one time in three) two tokens that decode to the same text."""
        ways = self._pieces.get(token)
        return list(rng.choice(ways)) if ways and rng.random() < 0.34 else [token]


def _pieces(tokenizer: Any) -> dict[int, list[tuple[int, int]]]:
    """Ways to split a token in two others with the same text."""
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    ways = {}
    for text, token in vocab.items():
        found = [
            (vocab[text[:i]], vocab[text[i:]]) for i in range(1, len(text)) if text[:i] in vocab and text[i:] in vocab
        ]
        if found:
            ways[token] = found
    return ways


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


class ScriptedHost(EngineHost):
    """Adds faults by call number: `500@2` fails the second call, `429@3` refuses the third, `cut@4` breaks off after
    three tokens, `late@5` in the last quarter of the answer.

    A conversation's own faults count the calls of its job alone. Each fault is journaled with the call's id.
    """

    scripted: ScriptedScheduler
    faults: dict[int, str]
    calls: Counter[str]
    """By job; "" holds those that name none."""

    def open(self, request: GenerateRequest) -> Running:
        fault = self._fault(request)
        if fault:
            self.scripted.journal.write(request=request.request_id, fault=fault, at=time.time())
        if fault == "429":
            raise EngineBusy("scripted: busy", 429, 1.0)
        if fault == "500":
            raise EngineBusy("scripted: fault", 500, None)
        after = 3 if fault == "cut" else len(self.scripted.answer(request.prompt, 0)) * 3 // 4 if fault else 0
        running = super().open(request)
        if fault:
            _cut(running, after)
        return running

    def _fault(self, request: GenerateRequest) -> str:
        orders = self.scripted.orders(request.prompt)
        self.calls[orders.job] += 1
        return (orders.faults or self.faults).get(self.calls[orders.job], "")


def _cut(running: Running, after: int) -> None:
    deliver: Callable[[Delta], None] = running.put
    seen = 0

    def put(delta: Delta) -> None:
        nonlocal seen
        seen += len(delta.sampled)
        if seen > after:
            raise ConnectionResetError("scripted: cut")
        deliver(delta)

    def broken(delta: Delta) -> None:
        try:
            put(delta)
        except ConnectionResetError:
            deliver(Delta(delta.index, (), finish=Finish("error", None, (), False, 0, "scripted: cut")))

    running.put = broken  # type: ignore[method-assign]


def load_scripted(settings: EngineSettings) -> EngineHost:
    """A host that follows `settings.script`, with the tokenizer of `settings.model`. Raises ConfigError."""
    from transformers import AutoTokenizer

    from polar_engine.models import ensure_model

    try:
        script, faults = parse_script(settings.script), parse_faults(settings.faults)
    except ValueError as error:
        raise ConfigError(str(error), "script") from error
    model: ModelDir = ensure_model(settings.model, settings.cache)
    tokenizer = AutoTokenizer.from_pretrained(str(model.path), local_files_only=True)
    ends = frozenset({int(tokenizer.eos_token_id)})
    scheduler = ScriptedScheduler(script, tokenizer.backend_tokenizer, settings, ends)
    length = settings.max_model_len or 32768
    served = Served(settings.served_name or f"scripted-{model.name}", len(tokenizer), length)
    host = ScriptedHost(settings, model, served, tokenizer, cast(Any, scheduler))
    host.scripted, host.faults, host.calls = scheduler, faults, Counter()
    return host
