"""Bus in, bus out: delivered work is claimed and run, or its lost owner's traces are settled; cancels are passed on."""

from __future__ import annotations

from datetime import datetime

import structlog

from polar_common import subjects
from polar_common.bus import Lease, follow
from polar_common.errors import Poison
from polar_common.events import SessionArtifacts, SessionClaimed, SessionLost, SessionQueued, SessionSealed
from polar_common.session_state import SessionState
from polar_common.tasks import cancel_and_wait, spawn
from polar_common.topology import events_stream

from . import metrics
from .attempt import Attempt, about
from .domain import Deadlines, Disposition, deadlines, disposition
from .house import House
from .ledger import SessionLedger, Superseded
from .pools import Place

__all__ = ["Gateway"]

_log = structlog.get_logger(__name__)


class Gateway:
    """The handlers of one gateway, and what it has in hand: `live`, by label."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.live: dict[str, Attempt] = {}

    async def on_queued(self, lease: Lease) -> None:
        """One delivery of an attempt: returns when nothing more will come from here."""
        queued = lease.stored.event
        if not isinstance(queued, SessionQueued):
            raise Poison(f"{lease.stored.subject} holds a {queued.kind}")
        ledger = SessionLedger(self.house.bus, queued.session, queued.attempt)
        state = await ledger.load()
        with Place() as place:
            what = disposition(state, queued.attempt)
            if what == "claim":
                await place.move(self.house.pools.init)
            while what == "claim":
                attempt = self._claimable(ledger, queued)
                if await self._claim(ledger, queued, attempt):
                    await self._run(attempt, place, lease)
                    return
                what = disposition(ledger.state, queued.attempt)
        await self._settle(ledger, queued, what)

    def _claimable(self, ledger: SessionLedger, queued: SessionQueued) -> Attempt:
        limits = queued.spec.limits
        until = deadlines(limits, self.house.clock.now(), queued.session_deadline)
        return Attempt(self.house, ledger, queued, until)

    async def _claim(self, ledger: SessionLedger, queued: SessionQueued, attempt: Attempt) -> bool:
        until: Deadlines = attempt.deadlines
        queued_at = _queued_at(ledger.state, queued)
        event = SessionClaimed(
            **about(queued),
            gateway=self.house.gateway,
            attempt_deadline=until.attempt,
            session_deadline=until.session,
            queue_s=max(0.0, (self.house.clock.now() - queued_at).total_seconds()),
        )
        if not await ledger.try_once(event):
            return False
        metrics.stage_s.labels("queue").observe(event.queue_s)
        return True

    async def _run(self, attempt: Attempt, place: Place, lease: Lease) -> None:
        self.live[attempt.label] = attempt
        # Beside the cancellation that comes with it, which `asyncio.wait_for` may swallow on Python 3.11.
        watch = spawn(lease.lost.wait(), name=f"lease:{attempt.label}")
        watch.add_done_callback(lambda task: None if task.cancelled() else attempt.interrupt("lost"))
        try:
            await attempt.run(place)
        finally:
            self.live.pop(attempt.label, None)
            await cancel_and_wait(watch)

    async def _settle(self, ledger: SessionLedger, queued: SessionQueued, what: Disposition) -> None:
        """What an earlier owner left undone."""
        try:
            if what == "resume":
                await ledger.publish(SessionArtifacts(**about(queued)))
            elif what == "lose":
                current = ledger.state.attempts[queued.attempt]
                lost = SessionLost(**about(queued), detail="its gateway is gone")
                sealed = [] if current.sealed else [SessionSealed(**about(queued), reason="lost")]
                await ledger.publish(lost, *sealed)
            else:
                return
        except Superseded:
            return
        metrics.taken_over.labels(what).inc()
        _log.warning("took over", what=what, session=queued.session, attempt=queued.attempt)

    async def follow_cancels(self) -> None:
        """Pass cancel requests on to running attempts, for ever."""
        bus, stream = self.house.bus, events_stream(self.house.settings.segment)
        newest = (await bus.js.stream_info(stream)).state.last_seq
        async for stored in follow(bus, stream, [subjects.ANY_CANCEL], after=newest):
            session = stored.subject.split(".")[4]
            for attempt in list(self.live.values()):
                if attempt.session == session:
                    attempt.interrupt("cancelled")


def _queued_at(state: SessionState, queued: SessionQueued) -> datetime:
    attempt = state.attempts.get(queued.attempt)
    return attempt.at["queued"] if attempt is not None and "queued" in attempt.at else queued.time
