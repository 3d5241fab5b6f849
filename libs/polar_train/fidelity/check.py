"""Recomputes the trained spans of a build's traces and compares them with what was recorded.

Window by window: spans are sorted by the weights that sampled them, each model reads each of its traces once, and the
differences are added up. One model is in memory at a time; the log is read on the event loop, models run on a thread.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from polar_common.bus import Bus
from polar_common.errors import ConfigError
from polar_common.traces import Span

from .policies import Policies
from .scope import Stretch, context_label, outside, stretches, want_of
from .source import Loaded, choose, windows
from .tally import Report, Worst

if TYPE_CHECKING:
    from .recompute import Recomputer

__all__ = ["Options", "check"]

Floats = npt.NDArray[np.float64]
Progress = Callable[[float, int], None]
_BEFORE, _AFTER = 24, 8


@dataclass(frozen=True, slots=True)
class Options:
    """What to check. `sample`: traces drawn at random (0: all); `worst`: places kept per kind of context."""

    build: str = "live"
    run: str = ""
    sessions: tuple[str, ...] = ()
    sample: int = 0
    seed: int = 0
    worst: int = 5
    threads: int = 1
    window_tokens: int = 1_000_000


@dataclass(slots=True, eq=False)
class _Task:
    """A trained span while it is recomputed: `values` float64[length]; `failed` says why some of it can't be."""

    trace: int
    loaded: Loaded
    span: Span
    values: Floats
    failed: str = ""
    work: list[tuple[Path, Stretch]] = field(default_factory=list)


async def check(bus: Bus, options: Options, policies: Policies, on_progress: Progress | None = None) -> Report:
    """Compare. `on_progress` is told traces done and all traces. Raises ConfigError without torch."""
    chosen = await choose(bus, options.build, options.run, options.sessions, options.sample, options.seed)
    report = Report(options.build, options.run, chosen.sessions, chosen.traces, keep=options.worst)
    checker = _Checker(report, policies, options.threads)
    async for window in windows(bus, chosen, options.window_tokens):

        def told(share: float, size: int = len(window)) -> None:
            if on_progress is not None:
                on_progress(report.checked + share * size, len(chosen.names))

        try:
            await asyncio.to_thread(checker.window, window, told)
        except asyncio.CancelledError:
            # Nobody can end a thread from outside, and the process would wait for it.
            checker.stopped = True
            raise
        report.checked += len(window)
    report.unreadable, report.details = chosen.unreadable, [*checker.details, *chosen.details]
    report.versions = {v: str(place.path or place.reason) for v, place in policies.used.items()}
    return report


class _Stopped(Exception):
    """Nobody waits for the numbers any more."""


class _Checker:
    """Not thread-safe: one window at a time."""

    def __init__(self, report: Report, policies: Policies, threads: int) -> None:
        self.details: list[str] = []
        self.stopped = False
        self._report = report
        self._policies = policies
        self._threads = threads
        self._model: Recomputer | None = None
        self._broken: dict[Path, str] = {}

    def window(self, window: Sequence[Loaded], told: Callable[[float], None]) -> None:
        tasks = [t for number, loaded in enumerate(window) for t in self._tasks(number, loaded)]
        jobs: dict[Path, list[tuple[_Task, Stretch]]] = defaultdict(list)
        for task in tasks:
            for path, stretch in task.work if not task.failed else ():
                jobs[path].append((task, stretch))
        loaded_now = self._model.path if self._model is not None else None
        for done, path in enumerate(sorted(jobs, key=lambda p: (p != loaded_now, str(p)))):
            self._recompute(path, jobs[path], partial(_part, told, done, len(jobs)))
        for task in tasks:
            self._judge(task)

    def _tasks(self, number: int, loaded: Loaded) -> list[_Task]:
        tasks = []
        # The provenance names the weights behind the last call: those of all where there were no others.
        versions = {part.version for span in loaded.spans for part in stretches(span)}
        recorded = loaded.provenance.weights_hash if len(versions) == 1 else ""
        for span in loaded.spans:
            trained = int(loaded.mask[span.start : span.start + span.length].sum())
            if not span.trained or not trained:
                continue
            self._report.spans += 1
            self._report.tokens += trained
            task = _Task(number, loaded, span, np.full(span.length, np.nan))
            for part in stretches(span):
                place = self._policies.find(part.version, recorded)
                if place.path is None:
                    task.failed = place.reason
                else:
                    task.work.append((place.path, part))
            tasks.append(task)
        return tasks

    def _recompute(self, path: Path, jobs: Sequence[tuple[_Task, Stretch]], told: Callable[[float], None]) -> None:
        model = self._load(path)
        if model is None:
            for task, _ in jobs:
                task.failed = "weights_unreadable"
            return
        from .recompute import Item

        by_trace: dict[int, list[tuple[_Task, Stretch]]] = defaultdict(list)
        for task, part in jobs:
            refused = model.refuses(task.loaded.ids)
            if refused:
                task.failed = refused
            else:
                by_trace[task.trace].append((task, part))
        groups = list(by_trace.values())
        items = [
            Item(group[0][0].loaded.ids, tuple(want_of(t.span, p, t.loaded.start + t.span.start) for t, p in group))
            for group in groups
        ]
        finished = 0

        def on_done(count: int) -> None:
            nonlocal finished
            finished += count
            told(finished / len(items))

        for group, found in zip(groups, model.logprobs(items, on_done, self._go_on), strict=True):
            for (task, part), values in zip(group, found, strict=True):
                task.values[part.start : part.stop] = values

    def _go_on(self) -> None:
        if self.stopped:
            raise _Stopped

    def _load(self, path: Path) -> Recomputer | None:
        if self._model is not None and self._model.path == path:
            return self._model
        if path in self._broken:
            return None
        try:
            import torch
        except ImportError as error:
            raise ConfigError("recomputing needs torch: install polar-rl[train]", "fidelity") from error
        from .recompute import Recomputer

        torch.set_num_threads(self._threads)
        # The one in use goes before the next comes: two may not fit.
        self._model = None
        try:
            self._model = Recomputer(path)
        except ConfigError as error:
            self._broken[path] = str(error)
            self.details.append(str(error))
        return self._model

    def _judge(self, task: _Task) -> None:
        if task.failed:
            self._report.unmeasured[task.failed] += 1
            return
        span, loaded = task.span, task.loaded
        stop = span.start + span.length
        counted = np.flatnonzero((loaded.mask[span.start : stop] == 1) & ~np.isnan(task.values))
        if not len(counted):
            self._report.unmeasured["no_context"] += 1
            return
        recorded = loaded.logprobs[span.start : stop].astype(np.float64)
        difference = task.values - recorded
        scope, context = outside(span, loaded.provenance.dtype), context_label(span)
        self._report.add(scope, context, difference[counted])
        size = np.abs(difference[counted])
        floor = self._report.threshold(context)
        for at in counted[np.argsort(-size, kind="stable")][: self._report.keep].tolist():
            if abs(difference[at]) > floor:
                self._report.consider(_worst(task, at, float(recorded[at]), scope, context))


def _part(told: Callable[[float], None], done: int, of: int, share: float) -> None:
    told((done + share) / of)


def _worst(task: _Task, at: int, recorded: float, scope: str, context: str) -> Worst:
    loaded, span = task.loaded, task.span
    place = loaded.start + span.start + at
    recomputed = float(task.values[at])
    return Worst(
        difference=recomputed - recorded,
        recorded=recorded,
        recomputed=recomputed,
        session=loaded.name.session,
        number=loaded.name.number,
        completion=span.completion,
        place=place,
        at=at,
        token=int(loaded.ids[place]),
        before=loaded.ids[max(0, place - _BEFORE) : place].copy(),
        after=loaded.ids[place + 1 : place + 1 + _AFTER].copy(),
        context=context,
        scope=scope,
        tokenizer_hash=loaded.provenance.tokenizer_hash,
    )
