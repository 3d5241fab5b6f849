"""Teacher-forced log-probs in fp32, by the plain library: no code of the engine that is being checked. Needs torch.

Sequences of like length go through together, padded on the right (causal attention never looks there), in chunks over
a key-value cache; logits are made for wanted places alone, so that memory stays bounded whatever the lengths.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from polar_common.errors import ConfigError
from polar_train.groups import Ids

from .scope import Want

__all__ = ["Item", "Recomputer"]

Floats = npt.NDArray[np.float64]
_BATCH_TOKENS = 8192
"""Padded ids whose keys and values are held at a time; a longer sequence goes alone."""
_LOGITS = 1 << 25
"""Logits held at a time, in numbers: 128 MB."""
_SCORED = 1 << 21
"""Logits scored at a time, as float64, of which truncation makes several copies."""
_CHUNK = 1024
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A sequence, and the stretches of it whose log-probs are wanted, in order."""

    ids: Ids
    wants: tuple[Want, ...]

    @property
    def length(self) -> int:
        """Ids to be read: the last wanted one is predicted, not read."""
        return max((w.stop - 1 for w in self.wants), default=0)


class Recomputer:
    """One model in fp32. Raises ConfigError where the directory can't be loaded as a causal language model."""

    def __init__(self, path: Path, *, batch_tokens: int = _BATCH_TOKENS, chunk: int = _CHUNK) -> None:
        self.path = path
        self._batch_tokens = batch_tokens
        transformers_logging.disable_progress_bar()
        try:
            network = AutoModelForCausalLM.from_pretrained(
                str(path), dtype=torch.float32, local_files_only=True, use_safetensors=True
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ConfigError(f"`{path}` can't be loaded: {error}", "model") from error
        self._network: Any = network.eval().requires_grad_(False)
        self.vocab = int(network.config.vocab_size)
        self._positions = int(getattr(network.config, "max_position_embeddings", 0) or 0)
        # Releases of transformers 5 differ in what they call it; it is filled in place.
        known = inspect.signature(self._network.forward).parameters
        self._cache = "cache" if "cache" in known else "past_key_values"
        self._rows = min(chunk, max(16, _LOGITS // self.vocab))

    def refuses(self, ids: Ids) -> str:
        """Why a sequence can't be run: `beyond_vocabulary`, `too_long`; "" where it can."""
        if int(ids.max(initial=0)) >= self.vocab:
            return "beyond_vocabulary"
        return "too_long" if self._positions and len(ids) > self._positions else ""

    def logprobs(
        self,
        items: Sequence[Item],
        on_done: Callable[[int], None] | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> list[list[Floats]]:
        """Per item and want: float64[stop - start], under the want's own sampling; -inf outside its kept set, NaN for
        a sequence's first id, which nothing predicts. `on_done` is told the items finished; `on_step` is
        called every second or so, and may raise to end it."""
        found: list[list[Floats]] = [[np.full(w.stop - w.start, np.nan) for w in item.wants] for item in items]
        with torch.inference_mode():
            for batch in self._batches(items):
                self._run([items[i] for i in batch], [found[i] for i in batch], on_step or _nothing)
                if on_done is not None:
                    on_done(len(batch))
        return found

    def _batches(self, items: Sequence[Item]) -> Iterator[list[int]]:
        order = sorted((i for i, item in enumerate(items) if item.length > 0), key=lambda i: items[i].length)
        batch: list[int] = []
        for i in order:
            if batch and (len(batch) + 1) * items[i].length > self._batch_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _run(self, items: Sequence[Item], out: Sequence[list[Floats]], on_step: Callable[[], None]) -> None:
        width = max(item.length for item in items)
        tokens = torch.zeros((len(items), width), dtype=torch.long)
        for row, item in enumerate(items):
            tokens[row, : item.length] = torch.from_numpy(item.ids[: item.length].astype(np.int64))
        step = max(1, self._rows // len(items))
        cache = DynamicCache(config=self._network.config)
        for begin in range(0, width, step):
            on_step()
            end = min(begin + step, width)
            needed = _needed(items, begin, end)
            # A model has to be asked for one row at least.
            keep = torch.tensor(needed or [0], dtype=torch.long)
            answer = self._network(
                input_ids=tokens[:, begin:end], use_cache=True, logits_to_keep=keep, **{self._cache: cache}
            )
            places = {at: n for n, at in enumerate(needed)}
            for row, item in enumerate(items):
                for want, into in zip(item.wants, out[row], strict=True):
                    _take(answer.logits[row], places, begin, end, item.ids, want, into)


def _nothing() -> None:
    pass


def _needed(items: Sequence[Item], begin: int, end: int) -> list[int]:
    """Offsets in [begin, end) whose logits some item wants: the one at place p predicts id p + 1."""
    found: set[int] = set()
    for item in items:
        for want in item.wants:
            found.update(range(max(want.start - 1, begin), min(want.stop - 1, end)))
    return [at - begin for at in sorted(found)]


def _take(logits: Any, places: dict[int, int], begin: int, end: int, ids: Ids, want: Want, into: Floats) -> None:
    first, last = max(want.start - 1, begin), min(want.stop - 1, end)
    if last <= first:
        return
    step = max(1, _SCORED // logits.shape[-1])
    for at in range(first, last, step):
        stop = min(at + step, last)
        rows = torch.tensor([places[p - begin] for p in range(at, stop)])
        targets = torch.from_numpy(ids[at + 1 : stop + 1].astype(np.int64))
        into[at + 1 - want.start : stop + 1 - want.start] = _score(logits[rows], targets, want).numpy()


def _score(logits: Any, targets: Any, want: Want) -> Any:
    """float64[m]: log-probs of `targets` [m] under `logits` [m, vocab], temperature and truncation applied."""
    scores = logits.double()
    if want.temperature >= _GREEDY_BELOW:
        scores = scores / want.temperature
    if want.truncated:
        scores = _cut(scores, want)
    return scores.gather(1, targets[:, None])[:, 0] - scores.logsumexp(1)


def _cut(scores: Any, want: Want) -> Any:
    """-inf outside the kept set, in vLLM's order: min_p, top_k, top_p."""
    if want.min_p > 0.0:
        floor = scores.max(1, keepdim=True).values + math.log(want.min_p)
        scores = scores.masked_fill(scores < floor, -math.inf)
    if 0 < want.top_k < scores.shape[1]:
        least = scores.topk(want.top_k, dim=1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    if want.top_p < 1.0:
        ordered, order = scores.sort(dim=1, descending=True, stable=True)
        chances = ordered.softmax(1)
        behind = chances.cumsum(1) - chances >= want.top_p
        # The likeliest one always stays.
        behind[:, 0] = False
        scores = scores.masked_fill(torch.zeros_like(behind).scatter(1, order, behind), -math.inf)
    return scores
