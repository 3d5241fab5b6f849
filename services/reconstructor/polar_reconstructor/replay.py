"""Replay: one sequential pass over the log makes a new build under any rules, closed groups included.

Messages are gathered per session until one decides it; then the session is built and published while the pass goes on.
What a replay publishes depends on the log and the rules alone, so it can be broken off and started again, and under the
rules of the live build it gives the same trace ids.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from polar_common import subjects
from polar_common.bus import Bus, Stored, scan
from polar_common.errors import ConfigError
from polar_common.events import GroupClosed, SessionAccepted
from polar_common.tasks import cancel_and_wait, spawn
from polar_common.topology import events_stream

from .builds import read_build
from .handlers import Reconstructor
from .rules import RuleSet

__all__ = ["Choice", "Replay", "Report"]

_IN_FLIGHT = 64
"""Sessions being published while the pass goes on; bounds memory."""
_DECIDING = (".artifacts", ".0.failed", ".0.cancelled")


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
    """`reconstructed`, `failed`, `there` (from an earlier try), and sessions `open` at the end."""
    groups: int = 0


class Replay:
    """One replay. `rate`: messages a second at most, so that live traffic keeps its server; 0: unbounded."""

    def __init__(
        self,
        bus: Bus,
        build: str,
        rules: RuleSet,
        segment: str,
        choice: Choice | None = None,
        *,
        rate: float = 0.0,
        on_progress: Callable[[Report], None] | None = None,
    ) -> None:
        self.report = Report(build, rules.hash)
        self._bus = bus
        self._maker = Reconstructor(bus, build, rules)
        self._segment = segment
        self._choice = choice or Choice()
        self._rate = rate
        self._on_progress = on_progress
        self._gathered: dict[str, list[Stored]] = {}
        self._skipped: set[str] = set()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._free = asyncio.Semaphore(_IN_FLIGHT)

    async def run(self) -> Report:
        """Go through the log as it is now. Raises ConfigError if the build exists under other rules."""
        stream = events_stream(self._segment)
        await self._resume()
        self.report.end = int((await self._bus.js.stream_info(stream)).state.last_seq)
        begun = asyncio.get_running_loop().time()
        try:
            async for stored in scan(self._bus, stream, self._filters(), until=self.report.end):
                await self._take(stored)
                if self.report.messages % 512 == 0:
                    await self._pace(begun)
            await self._drain()
        finally:
            await cancel_and_wait(*self._running.values())
        self.report.position = self.report.end
        self.report.results["open"] = len(self._gathered)
        if self._on_progress is not None:
            self._on_progress(self.report)
        return self.report

    async def _resume(self) -> None:
        """What an earlier try finished is skipped."""
        for session, fact in (await read_build(self._bus, self._segment, self._maker.build)).items():
            if fact.rules_hash != self._maker.rules.hash:
                raise ConfigError(
                    f"it exists under other rules (hash {fact.rules_hash[:12]}): give the new one another name", "build"
                )
            self._skipped.add(session)
            self.report.results["there"] += 1

    def _filters(self) -> list[str]:
        if not self._choice.sessions:
            return [subjects.ANY_SESSION, subjects.ANY_COMPLETION, subjects.ANY_GROUP_CLOSED]
        found = []
        for session in sorted(self._choice.sessions):
            found += [subjects.session_filter(session), subjects.completion_filter(session)]
        return found

    async def _pace(self, begun: float) -> None:
        if self._on_progress is not None:
            self._on_progress(self.report)
        # Publishing needs its turns: the pass would otherwise read on while acknowledgements wait.
        ahead = self.report.messages / self._rate - (asyncio.get_running_loop().time() - begun) if self._rate else 0.0
        await asyncio.sleep(max(0.0, ahead))

    async def _take(self, stored: Stored) -> None:
        self.report.messages += 1
        self.report.bytes += len(stored.body)
        self.report.position = stored.sequence
        tokens = stored.subject.split(".", 5)
        if tokens[3] == "group":
            await self._close(stored)
            return
        session = tokens[4]
        if session in self._skipped:
            return
        if not self._choice.whole and stored.subject.endswith(".0.accepted"):
            event = stored.event
            if isinstance(event, SessionAccepted) and not self._choice.takes(event, stored.time):
                self._skipped.add(session)
                self._gathered.pop(session, None)
                return
        self._gathered.setdefault(session, []).append(stored)
        if stored.subject.endswith(_DECIDING) and self._maker.decided(session, self._gathered[session]):
            self._skipped.add(session)
            await self._free.acquire()
            messages = self._gathered.pop(session)
            self._running[session] = spawn(self._build(session, messages), name=f"replay:{session}")

    async def _build(self, session: str, messages: list[Stored]) -> None:
        try:
            self.report.results[await self._maker.reconstruct(session, messages)] += 1
        finally:
            self._running.pop(session, None)
            self._free.release()

    async def _close(self, stored: Stored) -> None:
        event = stored.event
        if not isinstance(event, GroupClosed) or (self._choice.run and event.run != self._choice.run):
            return
        for member in event.members:
            task = self._running.get(member.session)
            if task is not None:
                await asyncio.wait({task})
        if not self._choice.sessions and await self._maker.any_built(m.session for m in event.members):
            self.report.groups += await self._maker.project(event)

    async def _drain(self) -> None:
        while self._running:
            await asyncio.wait(set(self._running.values()))
