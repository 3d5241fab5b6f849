"""Attempts in memory, rebuilt from the log when this instance doesn't know them (LOG §6's guarded reads).

Any instance can serve any session: before it concludes that a request continues nothing, an instance asks the log's
leader for the attempt's last completion event, and loads what it doesn't hold.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import structlog

from polar_common import subjects
from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.events import CompletionCaptured
from polar_common.ids import segment_of
from polar_common.keys import SessionKey
from polar_common.topology import events_stream
from polar_render.base import Renderer
from polar_render.records import blobs_needed

from .context.nodes import SessionIndex
from .context.restore import apply

__all__ = ["Session", "Sessions"]

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Session:
    """One attempt of a session. `delivered`: answers that reached the harness since the last event."""

    key: SessionKey
    index: SessionIndex = field(default_factory=SessionIndex)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    loaded: bool = False
    doubtful: bool = False
    """A publish got no answer: the log may hold more than the index."""
    running: int = 0
    delivered: list[str] = field(default_factory=list)
    recent: deque[float] = field(default_factory=deque)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set and renewed whenever a live call gets its outcome."""

    def settle(self) -> None:
        self.settled.set()
        self.settled = asyncio.Event()


class Sessions:
    """The attempts this instance serves."""

    def __init__(self, bus: Bus, renderer_for: dict[str, Renderer], limit: int) -> None:
        self._bus = bus
        self._renderers = renderer_for
        self._limit = limit
        self._known: OrderedDict[tuple[str, int], Session] = OrderedDict()
        self._blobs: dict[str, Blobs] = {}

    def __len__(self) -> int:
        return len(self._known)

    def values(self) -> list[Session]:
        return list(self._known.values())

    def blobs(self, segment: str) -> Blobs:
        if segment not in self._blobs:
            self._blobs[segment] = Blobs(self._bus, segment)
        return self._blobs[segment]

    def known(self, session: str, attempt: int) -> Session | None:
        return self._known.get((session, attempt))

    async def get(self, key: SessionKey) -> Session:
        """The attempt, loaded. Raises Unavailable if the log doesn't answer."""
        name = (key.session, key.attempt)
        session = self._known.get(name)
        if session is None:
            session = self._known[name] = Session(key)
            self._evict(name)
        self._known.move_to_end(name)
        if not session.loaded or session.doubtful:
            await self.refresh(session)
        return session

    async def refresh(self, session: Session) -> bool:
        """Load what the log has and the index hasn't. Returns whether there was anything."""
        async with session.lock:
            key, known = session.key, len(session.index.nodes)
            pattern = subjects.completion_filter(key.session, key.attempt)
            stream = events_stream(segment_of(key.session))
            last = await self._bus.last(pattern, stream)
            if last is not None and last.sequence > session.index.synced:
                await self._load(session, stream, pattern, last.sequence)
            session.loaded, session.doubtful = True, False
            return len(session.index.nodes) > known

    async def _load(self, session: Session, stream: str, pattern: str, newest: int) -> None:
        index = session.index
        stored = await self._bus.read(stream, [pattern], after=index.synced, at_least=newest)
        fresh = [s for s in stored if s.subject.split(".")[6] not in index.nodes or not s.subject.endswith(".captured")]
        events = [(s.sequence, s.event) for s in fresh]
        captured = [e for _, e in events if isinstance(e, CompletionCaptured)]
        store = self.blobs(segment_of(session.key.session))
        bodies = {ref.sha256: await store.get(ref) for ref in blobs_needed(captured)}
        renderer = self._renderers[session.key.sampling.thinking]
        if captured:
            await asyncio.to_thread(apply, index, events, bodies, renderer)
        else:
            apply(index, events, bodies, renderer)
        index.synced = max(index.synced, stored[-1].sequence)

    def forget(self, session: str, attempt: int) -> None:
        """Drop an attempt that can have no more calls."""
        self._known.pop((session, attempt), None)

    def _evict(self, new: tuple[str, int]) -> None:
        """Those used longest ago come first, and nearly always the first may go."""
        now = time.monotonic()
        while len(self._known) > self._limit:
            idle = (
                name
                for name, session in self._known.items()
                if name != new and not session.running and now - (session.recent[-1] if session.recent else 0.0) > 1.0
            )
            if (gone := next(idle, None)) is None:
                return
            del self._known[gone]
