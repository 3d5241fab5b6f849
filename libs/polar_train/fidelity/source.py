"""Published traces for checking: those that a manifest names, a random sample of them, their arrays verified.

The choice is made from manifests alone, so a build may be of any size; traces are then read window by window.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from polar_common import subjects
from polar_common.blobs import Blobs
from polar_common.bus import Bus, scan
from polar_common.errors import BlobError, ConfigError, FromTheFuture, Poison, PolarError, TraceError
from polar_common.events import GroupMember
from polar_common.ids import segment_of
from polar_common.topology import TRACES
from polar_common.trace_messages import read_message
from polar_common.traces import Provenance, Span, Trace, TraceManifest
from polar_train.groups import Floats, Ids, Mask, TrainTrace, load_trace

__all__ = ["Chosen", "Loaded", "Name", "choose", "unreadable_because", "windows"]

_PAGE = 32
_WINDOW_TOKENS = 1_000_000
_DETAILS = 20


@dataclass(frozen=True, slots=True)
class Name:
    """A trace as its manifest names it."""

    run: str
    build: str
    task: str
    session: str
    number: int
    trace_id: str

    @property
    def subject(self) -> str:
        return subjects.trace(self.run, self.build, self.task, self.session, self.number)


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A trace with its whole sequence: `ids` int32[n]; the response, to which `mask` and `logprobs` are aligned,
    begins at `start`. For a tree's node `ids` holds the path from the root."""

    name: Name
    attempt: int
    spans: tuple[Span, ...]
    provenance: Provenance
    ids: Ids
    start: int
    mask: Mask
    logprobs: Floats


@dataclass(slots=True)
class Chosen:
    """What was chosen out of `traces` in `sessions`; and, after reading, what couldn't be read."""

    names: list[Name] = field(default_factory=list)
    traces: int = 0
    sessions: int = 0
    unreadable: Counter[str] = field(default_factory=Counter)
    """`missing`, `damaged`, `newer` (an upgrade reads them) or `pictures` (which aren't recomputed) → traces; a
    manifest that can't be read counts as one."""
    details: list[str] = field(default_factory=list)

    def refuse(self, reason: str, detail: str) -> None:
        self.unreadable[reason] += 1
        if len(self.details) < _DETAILS:
            self.details.append(detail)


class _Pictures(TraceError):
    """Ids alone don't say what the model saw."""


async def choose(
    bus: Bus, build: str, run: str = "", sessions: Sequence[str] = (), sample: int = 0, seed: int = 0
) -> Chosen:
    """`sample` traces of a build at random (0: all), in the order of their manifests.

    Raises ConfigError where the build, or a named session in it, isn't there.
    """
    draws = random.Random(seed)
    chosen = Chosen()
    kept: list[tuple[int, Name]] = []
    missing = set(sessions)
    found = False
    async for stored in scan(bus, TRACES, [subjects.manifests_filter(run or None, build)]):
        session = stored.subject.split(".")[5]
        if sessions and session not in sessions:
            continue
        found = True
        missing.discard(session)
        try:
            manifest = read_message(TraceManifest, stored.body, stored.subject)
        except Poison as error:
            chosen.refuse(unreadable_because(error), str(error))
            continue
        chosen.sessions += 1
        for number, trace_id in enumerate(manifest.traces):
            name = Name(manifest.run, manifest.build, manifest.task, manifest.session, number, trace_id)
            place = chosen.traces
            chosen.traces += 1
            if not sample or len(kept) < sample:
                kept.append((place, name))
            elif (at := draws.randrange(chosen.traces)) < sample:
                kept[at] = (place, name)
    of = f" of run {run}" if run else ""
    if missing:
        raise ConfigError(f"not in build {build}{of}: {', '.join(sorted(missing))}", "session")
    if not found:
        raise ConfigError(f"no session{of} is in build {build}", "run" if run else "build")
    chosen.names = [name for _, name in sorted(kept, key=lambda k: k[0])]
    return chosen


async def windows(bus: Bus, chosen: Chosen, tokens: int = _WINDOW_TOKENS) -> AsyncIterator[list[Loaded]]:
    """The chosen traces in lists of about `tokens` ids; what is damaged or missing is counted in `chosen`."""
    window: list[Loaded] = []
    size = 0
    for begin in range(0, len(chosen.names), _PAGE):
        page = chosen.names[begin : begin + _PAGE]
        bodies = {m.subject: m.body for m in await bus.read(TRACES, [n.subject for n in page])}
        for name in page:
            body = bodies.get(name.subject)
            if body is None:
                chosen.refuse("missing", f"{name.session}/{name.number} isn't there: replay its build")
                continue
            try:
                loaded = await _load(bus, name, body)
            except _Pictures as error:
                chosen.refuse("pictures", f"{name.session}/{name.number}: {error}")
                continue
            except (TraceError, BlobError, Poison) as error:
                chosen.refuse(unreadable_because(error), f"{name.session}/{name.number}: {error}")
                continue
            window.append(loaded)
            size += len(loaded.ids)
            if size >= tokens:
                yield window
                window, size = [], 0
    if window:
        yield window


def unreadable_because(error: PolarError) -> str:
    """`newer` or `damaged`."""
    return "newer" if isinstance(error, FromTheFuture) else "damaged"


async def _load(bus: Bus, name: Name, body: bytes) -> Loaded:
    trace = read_message(Trace, body)
    if trace.images:
        raise _Pictures(f"it shows {len(trace.images)} pictures, and only text is recomputed")
    found = await _checked(bus, name.session, body)
    if found.trace_id != name.trace_id:
        raise TraceError(f"it is {found.trace_id}, the manifest says {name.trace_id}")
    before = await _path(bus, name, trace)
    return Loaded(
        name=name,
        attempt=trace.attempt,
        spans=trace.spans,
        provenance=trace.provenance,
        ids=np.concatenate((*before, found.prompt_ids, found.response_ids)),
        start=sum(map(len, before)) + len(found.prompt_ids),
        mask=found.loss_mask,
        logprobs=found.logprobs,
    )


async def _checked(bus: Bus, session: str, body: bytes) -> TrainTrace:
    member = GroupMember(session=session, outcome=None, reward=None, trainable=True)
    return await load_trace(body, Blobs(bus, segment_of(session)), member)


async def _path(bus: Bus, name: Name, trace: Trace) -> list[Ids]:
    """The ids before a tree's node: its ancestors' own, from the root on. Raises TraceError where one is missing."""
    if trace.tree is None or trace.tree.parent is None:
        return []
    messages = await bus.read(TRACES, [subjects.session_traces_filter(name.run, name.build, name.task, name.session)])
    nodes: dict[int, bytes] = {}
    parents: dict[int, int | None] = {}
    for message in messages:
        if not message.subject.rpartition(".")[2].isdigit():
            continue
        other = read_message(Trace, message.body)
        if other.tree is not None and other.tree.tree == trace.tree.tree:
            nodes[other.tree.node], parents[other.tree.node] = message.body, other.tree.parent
    found: list[Ids] = []
    at: int | None = trace.tree.parent
    while at is not None:
        if at not in nodes:
            raise TraceError(f"node {at} of its tree is missing")
        one = await _checked(bus, name.session, nodes.pop(at))
        found[:0] = [one.prompt_ids, one.response_ids]
        at = parents[at]
    if sum(map(len, found)) != trace.tree.position_start:
        raise TraceError(f"{sum(map(len, found))} ids before it, {trace.tree.position_start} are said to be")
    return found
