"""The deployment gap: how often a plain engine would have shown the model other prompt ids than it really saw.

Plain means: no memory of what was sampled. Every call's messages, as the harness sent them, are rendered in full with
the model's format, past answers from their text (`rendering.py`). Where the harness sent an answer back, the log has a
reference to it; it counts as sent back in full, but for thinking that the log says was left out. Needs no torch.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.errors import BlobError, Poison, TraceError
from polar_common.events import CompletionCaptured
from polar_common.ids import segment_of
from polar_common.traces import Provenance
from polar_render.base import Renderer
from polar_render.records import ResolvedCompletion, blobs_needed, resolve_session

from .check import Options, Progress
from .rendering import Difference, compare
from .source import Chosen, Loaded, choose, unreadable_because, windows

__all__ = ["Example", "Gap", "GapReport", "deployment_gap"]

RendererOf = Callable[[Provenance], Renderer | None]
"""The plain format of a trace's model; None where its tokenizer can't be found."""

_SHOWN, _DETAILS = 16, 20


@dataclass(frozen=True, slots=True)
class Example:
    """A call whose prompt would have been another: text before the first differing id, and from it on in both."""

    session: str
    completion: str
    kind: str
    at: int
    before: str
    seen: str
    native: str


@dataclass(slots=True)
class Gap:
    """Trained calls of one harness on one model. `later`: those whose prompt shows an answer of the model."""

    harness: str
    model: str
    calls: int = 0
    later: int = 0
    different: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    first: list[int] = field(default_factory=list)
    """First differing places."""
    other_template: int = 0
    """Calls rendered with another template than the one compared with."""
    examples: dict[str, Example] = field(default_factory=dict)
    """One of each kind."""

    @property
    def share(self) -> float | None:
        return self.different / self.calls if self.calls else None

    def merge(self, other: Gap) -> None:
        for name in ("calls", "later", "different", "other_template"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kinds.update(other.kinds)
        self.first += other.first

    def json(self) -> dict[str, Any]:
        shown = ("session", "completion", "kind", "at", "before", "seen", "native")
        return {
            "harness": self.harness,
            "model": self.model,
            "calls": self.calls,
            "later_calls": self.later,
            "different": self.different,
            "share": self.share,
            "later_share": self.different / self.later if self.later else None,
            "kinds": dict(self.kinds),
            "first_at": [min(self.first), float(np.median(self.first)), max(self.first)] if self.first else None,
            "other_template": self.other_template,
            "examples": [{name: getattr(e, name) for name in shown} for e in self.examples.values()],
        }


@dataclass(slots=True)
class GapReport:
    """By harness and model. `unreadable`: why calls couldn't be compared → calls."""

    gaps: dict[tuple[str, str], Gap] = field(default_factory=dict)
    unreadable: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    @property
    def total(self) -> Gap:
        total = Gap("all", "all")
        for gap in self.gaps.values():
            total.merge(gap)
        return total

    def json(self) -> dict[str, Any]:
        total = self.total.json()
        return {
            **{k: total[k] for k in ("calls", "later_calls", "different", "share", "later_share", "kinds", "first_at")},
            "groups": [self.gaps[key].json() for key in sorted(self.gaps)],
            "unreadable": dict(self.unreadable),
            "details": self.details,
        }


async def deployment_gap(
    bus: Bus, options: Options, renderer_of: RendererOf, on_progress: Progress | None = None
) -> GapReport:
    """Compare the prompts of a build's trained calls with what a plain engine would have shown."""
    chosen = await choose(bus, options.build, options.run, options.sessions, options.sample, options.seed)
    gauge = _Gauge(bus, renderer_of)
    done = 0
    async for window in windows(bus, chosen, options.window_tokens):
        for loaded in window:
            await gauge.trace(loaded)
            done += 1
            if on_progress is not None:
                on_progress(done, len(chosen.names))
    _unread(gauge.report, chosen)
    return gauge.report


def _unread(report: GapReport, chosen: Chosen) -> None:
    for reason, count in chosen.unreadable.items():
        report.unreadable[f"trace_{reason}"] += count
    report.details += chosen.details


class _Gauge:
    """Adds up trace by trace; the last session's records are kept, since its traces come together."""

    def __init__(self, bus: Bus, renderer_of: RendererOf) -> None:
        self.report = GapReport()
        self._bus = bus
        self._renderer_of = renderer_of
        self._session: tuple[str, int] = ("", 0)
        self._records: Mapping[str, ResolvedCompletion] = {}

    async def trace(self, loaded: Loaded) -> None:
        trained = [s.completion for s in loaded.spans if s.trained]
        renderer = self._renderer_of(loaded.provenance)
        if renderer is None:
            self._refuse("no_tokenizer", trained, f"{loaded.name.session}: no tokenizer of its model is at hand")
            return
        try:
            records = await self._resolved(loaded)
        except (TraceError, BlobError, Poison) as error:
            self._refuse(unreadable_because(error), trained, f"{loaded.name.session}: {error}")
            return
        await asyncio.to_thread(self._trace, loaded, trained, records, renderer)

    async def _resolved(self, loaded: Loaded) -> Mapping[str, ResolvedCompletion]:
        key = (loaded.name.session, loaded.attempt)
        if key != self._session:
            self._session, self._records = ("", 0), {}
            stored = [s for s in await self._bus.read_session(key[0]) if ".completion." in s.subject]
            events = [s.event for s in stored if s.subject.endswith(".captured")]
            captured = [e for e in events if isinstance(e, CompletionCaptured) and e.attempt == loaded.attempt]
            blobs = Blobs(self._bus, segment_of(key[0]))
            bodies = {ref.sha256: await blobs.get(ref) for ref in blobs_needed(captured)}
            self._records = resolve_session(captured, bodies)
            self._session = key
        return self._records

    def _trace(
        self, loaded: Loaded, trained: Sequence[str], records: Mapping[str, ResolvedCompletion], renderer: Renderer
    ) -> None:
        key = (loaded.provenance.harness, loaded.provenance.model)
        gap = self.report.gaps.setdefault(key, Gap(*key))
        same_template = renderer.provenance.template_hash == loaded.provenance.template_hash
        for name in trained:
            item = records.get(name)
            if item is None or not item.messages:
                self._refuse("no_messages", [name], f"{loaded.name.session}: {name} has no messages on the log")
                continue
            try:
                # In native context the engine itself did what is measured here.
                native = item.event.context == "native"
                found, prompt = (None, item.prompt) if native else compare(item, records, renderer)
            except (TraceError, BlobError) as error:
                self._refuse("damaged", [name], str(error))
                continue
            gap.calls += 1
            gap.later += any(getattr(m, "role", "assistant") == "assistant" for m in item.messages)
            gap.other_template += not same_template
            if found is not None:
                self._differs(
                    gap, loaded, item, found, renderer.decode(prompt[max(0, found.at) :][:_SHOWN].tolist()), renderer
                )

    def _differs(
        self, gap: Gap, loaded: Loaded, item: ResolvedCompletion, found: Difference, native: str, renderer: Renderer
    ) -> None:
        gap.different += 1
        gap.kinds[found.kind] += 1
        if found.at >= 0:
            gap.first.append(found.at)
        at = max(0, found.at)
        seen = item.prompt
        gap.examples.setdefault(
            found.kind,
            Example(
                loaded.name.session,
                item.completion,
                found.kind,
                found.at,
                renderer.decode(seen[max(0, at - _SHOWN) : at].tolist()),
                renderer.decode(seen[at : at + _SHOWN].tolist()),
                found.detail or native,
            ),
        )

    def _refuse(self, reason: str, calls: Sequence[str], detail: str) -> None:
        self.report.unreadable[reason] += len(calls)
        if len(self.report.details) < _DETAILS:
            self.report.details.append(detail)
