"""Builds as the log tells them: which there are, what each made of a session, and how two differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

import nats.errors
import orjson
import structlog

from polar_common import subjects
from polar_common.bus import Bus, Stored, scan
from polar_common.catalogue import Catalogue
from polar_common.errors import ConfigError, Poison, Unavailable
from polar_common.events import BuildFailed, BuildReconstructed
from polar_common.topology import TRACES, events_stream
from polar_common.trace_messages import read_message
from polar_common.traces import TraceManifest

__all__ = [
    "BuildFact",
    "BuildSummary",
    "Difference",
    "FateChange",
    "check_held",
    "compare",
    "diff",
    "drop",
    "read_build",
    "summaries",
]

BuildFact = BuildReconstructed | BuildFailed
TRAINED = "trained"
_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class BuildSummary:
    """Sums over a build's sessions."""

    build: str
    rules: str = ""
    rules_hash: str = ""
    sessions: int = 0
    failed: int = 0
    traces: int = 0
    trained: int = 0
    tokens: int = 0
    exact_spans: int = 0
    drifted_spans: int = 0
    ambiguous: int = 0
    held: int = 0
    """Traces that can still be read: none of a build that was dropped."""
    excluded: Counter[str] = field(default_factory=Counter)
    """Reason → completions."""
    chain_classes: Counter[str] = field(default_factory=Counter)
    """Why traces begin where they do → traces."""
    drift: Counter[str] = field(default_factory=Counter)
    """Class of drift → trained spans."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why sessions weren't built → sessions."""
    first: datetime | None = None
    last: datetime | None = None

    @property
    def exact_share(self) -> float | None:
        spans = self.exact_spans + self.drifted_spans
        return self.exact_spans / spans if spans else None

    @property
    def traces_per_session(self) -> float | None:
        built = self.sessions - self.failed
        return self.traces / built if built else None

    def add(self, event: BuildFact, time: datetime) -> None:
        self.first, self.last = self.first or time, time
        self.sessions += 1
        self.rules_hash = event.rules_hash
        if isinstance(event, BuildFailed):
            self.failed += 1
            self.reasons[event.reason] += 1
            return
        self.rules = event.rules
        self.traces += event.traces
        self.trained += event.trained_completions
        self.tokens += event.sampled_tokens
        self.exact_spans += event.exact_spans
        self.drifted_spans += event.drifted_spans
        self.ambiguous += event.ambiguous
        self.excluded.update(event.excluded.values())
        self.chain_classes.update(event.chain_classes)
        self.drift.update(event.drift)


async def summaries(bus: Bus, build: str | None = None) -> list[BuildSummary]:
    """One summary per build, by its first session; of all segments that are kept."""
    found: dict[str, BuildSummary] = {}
    for segment in await Catalogue(bus).kept():
        async for stored in scan(bus, events_stream(segment), [subjects.build_filter(segment, build)]):
            if (event := _fact(stored)) is not None:
                found.setdefault(event.build, BuildSummary(event.build)).add(event, stored.time)
    for name, summary in found.items():
        summary.held = len(await _trace_ids(bus, name))
    return list(found.values())


async def check_held(bus: Bus, build: str) -> None:
    """Raises ConfigError for a build that isn't there, or whose traces aren't."""
    if await _trace_ids(bus, build):
        return
    found = await summaries(bus, build)
    if not found:
        raise ConfigError("there is no build of that name", build)
    if found[0].traces:
        raise ConfigError("its traces were dropped; `polar replay` under its name and rules makes them again", build)


async def drop(bus: Bus, build: str) -> int:
    """Purge a build's traces, manifests and projected closings; what the log says of it stays, and a replay under its
    name makes them again. Returns how many messages went. Only the topology user may.

    Raises ConfigError for a build that isn't there, Unavailable where the server doesn't answer or refuses.
    """
    body = orjson.dumps({"filter": subjects.trace_filter(build=build)})
    try:
        answer = orjson.loads((await bus.nc.request(f"$JS.API.STREAM.PURGE.{TRACES}", body, timeout=30)).data)
    except (TimeoutError, nats.errors.Error) as error:
        raise Unavailable(f"{TRACES} isn't purged: no answer ({error!r})") from error
    if "error" in answer:
        raise Unavailable(f"{TRACES} isn't purged: {answer['error'].get('description')}")
    purged = int(answer["purged"])
    if not purged and not await summaries(bus, build):
        raise ConfigError("there is no build of that name", build)
    return purged


async def read_build(bus: Bus, segment: str, build: str) -> dict[str, BuildFact]:
    """Session → what the build said of it, in one segment."""
    found: dict[str, BuildFact] = {}
    async for stored in scan(bus, events_stream(segment), [subjects.build_filter(segment, build)]):
        if (event := _fact(stored)) is not None:
            found[event.session] = event
    return found


def _fact(stored: Stored) -> BuildFact | None:
    """None for what can't be read, which is told: one damaged message mustn't hide a log's builds."""
    try:
        event = stored.event
    except Poison as error:
        _log.warning("what a build said of a session can't be read", subject=stored.subject, error=str(error))
        return None
    return event if isinstance(event, BuildReconstructed | BuildFailed) else None


@dataclass(frozen=True, slots=True)
class FateChange:
    """A completion whose fate isn't the same: `trained`, a reason for not training it, or `not built`."""

    session: str
    completion: str
    before: str
    after: str


@dataclass(slots=True)
class Difference:
    """Two builds beside each other. Sums are over the sessions that both made."""

    before: BuildSummary
    after: BuildSummary
    common: int
    only_before: list[str]
    only_after: list[str]
    same_traces: int
    """Traces with one id in both."""
    changes: list[FateChange]

    @property
    def kinds(self) -> Counter[tuple[str, str]]:
        """(before, after) → completions."""
        return Counter((c.before, c.after) for c in self.changes)


async def diff(bus: Bus, before: str, after: str) -> Difference:
    """Compare two builds, over all segments that are kept. Raises ConfigError for a build that isn't there."""
    facts: list[dict[str, BuildFact]] = [{}, {}]
    for segment in await Catalogue(bus).kept():
        for found, name in zip(facts, (before, after), strict=True):
            found |= await read_build(bus, segment, name)
    for name, found in zip((before, after), facts, strict=True):
        if not found:
            raise ConfigError("there is no build of that name", name)
    ids = [await _trace_ids(bus, name) for name in (before, after)]
    return compare(before, after, facts[0], facts[1], len(ids[0] & ids[1]))


def compare(
    before: str, after: str, old: Mapping[str, BuildFact], new: Mapping[str, BuildFact], same_traces: int
) -> Difference:
    """The difference of two builds' facts. Pure."""
    both = sorted(old.keys() & new.keys())
    sums = [BuildSummary(before), BuildSummary(after)]
    changes: list[FateChange] = []
    for session in both:
        for summary, facts in zip(sums, (old, new), strict=True):
            summary.add(facts[session], facts[session].time)
        changes += _changes(session, old[session], new[session])
    only = [sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())]
    return Difference(sums[0], sums[1], len(both), only[0], only[1], same_traces, changes)


def _changes(session: str, old: BuildFact, new: BuildFact) -> list[FateChange]:
    if isinstance(old, BuildFailed) or isinstance(new, BuildFailed):
        told = [f"failed: {e.reason}" if isinstance(e, BuildFailed) else "built" for e in (old, new)]
        return [FateChange(session, "", told[0], told[1])] if told[0] != told[1] else []
    found = []
    # What neither excludes both train.
    for name in sorted(old.excluded.keys() | new.excluded.keys()):
        before, after = old.excluded.get(name, TRAINED), new.excluded.get(name, TRAINED)
        if before != after:
            found.append(FateChange(session, name, before, after))
    return found


async def _trace_ids(bus: Bus, build: str) -> set[str]:
    found: set[str] = set()
    async for stored in scan(bus, TRACES, [subjects.manifests_filter(build=build)]):
        try:
            found.update(read_message(TraceManifest, stored.body).traces)
        except Poison as error:
            _log.warning("a manifest can't be read", subject=stored.subject, error=str(error))
    return found
