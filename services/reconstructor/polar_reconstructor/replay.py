"""Replay: one sequential pass over the log or an archive makes a new build under any rules, closed groups included.

Messages are gathered per session until one decides it; then the session is built and published while the pass goes on.
What a replay publishes depends on the log and the rules alone, so it can be broken off and started again, and under the
rules of the live build it gives the same trace ids.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime

import structlog
from nats.js.errors import NotFoundError

from polar_common import subjects
from polar_common.bus import Bus, Stored, scan
from polar_common.errors import ConfigError, FromTheFuture, Poison
from polar_common.events import BuildFailed, GroupClosed, SessionAccepted
from polar_common.tasks import cancel_and_wait, spawn
from polar_common.topology import TRACES, events_stream

from .builds import read_build
from .handlers import Reconstructor, decided
from .origins import Origin
from .pool import Builders, Here, Job
from .rules import RuleSet

__all__ = ["Choice", "Replay", "Report"]

_BATCH, _BATCH_BYTES = 16, 8_000_000
"""Sessions, and bytes of their messages, handed over together; with the builders' `at_once` they bound memory."""
_CLOSINGS = 32
_DECIDING = (".artifacts", ".0.failed", ".0.cancelled")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which sessions: all by default. Times are of acceptance."""

    run: str = ""
    since: datetime | None = None
    until: datetime | None = None
    sessions: frozenset[str] = frozenset()

    def takes(self, accepted: SessionAccepted, time: datetime) -> bool:
        if self.run and accepted.run != self.run:
            return False
        if self.since is not None and time < self.since:
            return False
        return self.until is None or time < self.until

    @property
    def whole(self) -> bool:
        """No condition that an `accepted` event decides."""
        return not self.run and self.since is None and self.until is None


@dataclass(slots=True)
class Report:
    """How far a replay is. `position` and `end` are sequences."""

    build: str
    rules_hash: str
    position: int = 0
    end: int = 0
    messages: int = 0
    bytes: int = 0
    results: Counter[str] = field(default_factory=Counter)
    """`reconstructed`, `failed`, `newer` (left to an upgraded replay), `there` (from an earlier try), and sessions
    `open` at the end; and `unreadable` closings."""
    groups: int = 0


class Replay:
    """One replay. `rate`: messages a second at most, so that live traffic keeps its server; `budget`: bytes of traces
    that the build may have. 0: unbounded.

    `origin`: what is read; what is made goes to the bus's server in any case. `builders`: where sessions are built; by
    default here. `dry`: nothing is published. Builders of your own have to be told both.
    """

    def __init__(
        self,
        bus: Bus,
        build: str,
        rules: RuleSet,
        origin: Origin,
        choice: Choice | None = None,
        *,
        builders: Builders | None = None,
        dry: bool = False,
        rate: float = 0.0,
        budget: int = 0,
    ) -> None:
        self.report = Report(build, rules.hash)
        self._bus = bus
        self._origin = origin
        self._maker = Reconstructor(bus, build, rules, dry=dry, blob=origin.blob)
        self._builders = builders or Here(self._maker)
        self._segment = origin.segment
        self._choice = choice or Choice()
        self._rate = rate
        self._budget = budget
        self._there = 0
        """Bytes of traces from earlier tries."""
        self.on_progress: Callable[[Report], None] | None = None
        """Called now and then, and at the end."""
        self._claimed = False
        self._gathered: dict[str, list[Stored]] = {}
        self._skipped: set[str] = set()
        self._batch: list[Job] = []
        self._weight = 0
        self._unfinished: set[str] = set()
        self._newer: set[str] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(self._builders.at_once)
        self._closings: list[GroupClosed] = []

    async def run(self) -> Report:
        """Go through what is there now.

        Raises ConfigError if the build exists under other rules, has no place or is over its budget, or a named session
        isn't there; Unavailable, BlobError for damage.
        """
        await self._place()
        await self._resume()
        self.report.end = await self._origin.last()
        await self._find_named()
        begun = asyncio.get_running_loop().time()
        try:
            async for stored in self._origin.messages(self._choice.sessions, self.report.end):
                await self._take(stored)
                if self.report.messages % 512 == 0:
                    await self._pace(begun)
            await self._dispatch()
            while self._running:
                await self._finish(self._running)
            await self._close_groups()
        finally:
            await cancel_and_wait(*self._running)
        self.report.position = self.report.end
        self.report.results["open"] = len(self._gathered)
        if self.on_progress is not None:
            self.on_progress(self.report)
        return self.report

    async def _place(self) -> None:
        """Raises ConfigError where what is made couldn't be published."""
        try:
            config = (await self._bus.js.stream_info(events_stream(self._segment))).config
        except NotFoundError:
            what = (
                f"this log has no segment {self._segment}: replay its archive onto a house that has, such as a new one"
            )
            raise ConfigError(what, "segment") from None
        if config.sealed:
            what = f"segment {self._segment} is sealed: replay its archive onto another house (`--from`)"
            raise ConfigError(what, "segment")

    async def _resume(self) -> None:
        """What an earlier try finished is skipped, unless its traces were dropped."""
        build = self._maker.build
        kept: set[str] = set()
        wanted = subjects.trace_filter(build=build) if self._budget else subjects.manifests_filter(build=build)
        async for stored in scan(self._bus, TRACES, [wanted]):
            self._there += len(stored.body)
            if stored.subject.endswith(".manifest"):
                kept.add(stored.subject.split(".")[5])
        self._within_budget()
        for session, fact in (await read_build(self._bus, self._segment, build)).items():
            if fact.rules_hash != self._maker.rules.hash:
                raise ConfigError(
                    f"it exists under other rules (hash {fact.rules_hash[:12]}): give the new one another name", "build"
                )
            if session in kept or isinstance(fact, BuildFailed):
                self._skipped.add(session)
                self.report.results["there"] += 1

    async def _find_named(self) -> None:
        """Raises ConfigError where a named session isn't there, before anything is built."""
        missing = set(self._choice.sessions)
        if not missing:
            return
        async with aclosing(self._origin.messages(self._choice.sessions, self.report.end)) as messages:
            async for stored in messages:
                missing.discard(stored.subject.split(".", 5)[4])
                if not missing:
                    return
        raise ConfigError(f"no such session: {', '.join(sorted(missing))}", "session")

    async def _claim(self) -> None:
        """Take the build's name when there is something to build: a choice of nothing leaves it free."""
        if not self._claimed and not self._maker.dry:
            await self._maker.claim()
            self._claimed = True

    def _within_budget(self) -> None:
        """Raises ConfigError where the build has more bytes than it may have."""
        made = self._there + self._builders.written
        if self._budget and made > self._budget:
            build = self._maker.build
            what = f"{build} has {made:,} bytes of traces, more than its budget of {self._budget:,}"
            raise ConfigError(f"{what}: choose less, raise it, or `polar build drop {build}`", "build_bytes")

    async def _pace(self, begun: float) -> None:
        if self.on_progress is not None:
            self.on_progress(self.report)
        ahead = self.report.messages / self._rate - (asyncio.get_running_loop().time() - begun) if self._rate else 0.0
        await asyncio.sleep(max(0.0, ahead))

    async def _take(self, stored: Stored) -> None:
        self.report.messages += 1
        self.report.bytes += len(stored.body)
        self.report.position = stored.sequence
        tokens = stored.subject.split(".", 5)
        if tokens[3] == "group":
            await self._take_closing(stored)
            return
        session = tokens[4]
        if session in self._skipped:
            return
        if stored.subject.endswith(".0.accepted") and not await self._chosen(session, stored):
            self._skipped.add(session)
            self._gathered.pop(session, None)
            return
        self._gathered.setdefault(session, []).append(stored)
        if stored.subject.endswith(_DECIDING) and decided(session, self._gathered[session]):
            await self._schedule(session, self._gathered.pop(session))

    async def _take_closing(self, stored: Stored) -> None:
        try:
            event = stored.event
        except Poison as error:
            self._unreadable(stored.subject, error)
            return
        if isinstance(event, GroupClosed) and self._choice.run in ("", event.run):
            self._closings.append(event)
            if len(self._closings) >= _CLOSINGS:
                await self._close_groups()

    async def _chosen(self, session: str, stored: Stored) -> bool:
        """Whether a session that was accepted is to be built. Where that can't be told, the session has failed."""
        if self._choice.whole:
            return True
        try:
            accepted = stored.event
        except FromTheFuture as error:
            self._leave(session, error)
            return False
        except Poison as error:
            await self._claim()
            told = Poison(f"{stored.subject}: {error}")
            self.report.results[await self._maker.failed(session, None, [stored], told)] += 1
            return False
        return isinstance(accepted, SessionAccepted) and self._choice.takes(accepted, stored.time)

    def _leave(self, session: str, error: FromTheFuture) -> None:
        _log.error("left: a newer version wrote it; replay with that", session=session, error=str(error))
        self._newer.add(session)
        self.report.results["newer"] += 1

    def _unreadable(self, subject: str, error: Exception) -> None:
        _log.error("a closing can't be projected", subject=subject, error=str(error))
        self.report.results["unreadable"] += 1

    async def _schedule(self, session: str, messages: list[Stored]) -> None:
        self._skipped.add(session)
        self._unfinished.add(session)
        self._batch.append((session, messages))
        self._weight += sum(len(m.body) for m in messages)
        if len(self._batch) >= _BATCH or self._weight >= _BATCH_BYTES:
            await self._dispatch()

    async def _dispatch(self) -> None:
        if not self._batch:
            return
        await self._claim()
        batch, self._batch, self._weight = self._batch, [], 0
        while self._free.locked():
            await self._finish(self._running)
        await self._free.acquire()
        self._running.add(spawn(self._build(batch), name="replay"))

    async def _build(self, batch: list[Job]) -> None:
        try:
            results = await self._builders.build(batch)
        finally:
            self._free.release()
        self.report.results.update(results)
        self._newer.update(session for (session, _), result in zip(batch, results, strict=True) if result == "newer")
        self._unfinished.difference_update(session for session, _ in batch)
        self._within_budget()

    async def _finish(self, tasks: set[asyncio.Task[None]]) -> None:
        """Wait until one of the tasks is done; its error is the replay's."""
        done, _ = await asyncio.wait(set(tasks), return_when=asyncio.FIRST_COMPLETED)
        self._running -= done
        for task in done:
            task.result()

    async def _close_groups(self) -> None:
        """Project the closings whose sessions are built; the others wait for the next time, or for the end."""
        ready = [e for e in self._closings if not any(m.session in self._unfinished for m in e.members)]
        self._closings = [e for e in self._closings if any(m.session in self._unfinished for m in e.members)]
        if self._choice.sessions or self._maker.dry:
            return
        for start in range(0, len(ready), _CLOSINGS):
            some = ready[start : start + _CLOSINGS]
            self.report.groups += sum(await asyncio.gather(*(self._project(event) for event in some)))

    async def _project(self, event: GroupClosed) -> bool:
        sessions = [m.session for m in event.members]
        if not self._newer.isdisjoint(sessions) or not await self._maker.any_built(sessions):
            return False
        try:
            return await self._maker.project(event)
        except Poison as error:
            self._unreadable(event.subject(), error)
            return False
