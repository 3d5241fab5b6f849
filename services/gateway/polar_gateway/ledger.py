"""One session's transitions as its gateway writes them: every publish is fenced, a refusal is read and understood."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polar_common.bus import Bus
from polar_common.errors import Stale, Unavailable
from polar_common.events import SessionEvent
from polar_common.session_state import SessionState, newest_state

__all__ = ["SessionLedger", "Superseded"]

_STALES = 8


class Superseded(Exception):
    """Somebody else ended the attempt: stop everything, publish nothing more."""


class SessionLedger:
    """Publishes the events of one attempt behind the session's fence.

    `on_cancel` is called once when a cancel request is seen while publishing.
    """

    def __init__(self, bus: Bus, session: str, attempt: int) -> None:
        self._bus = bus
        self.session = session
        self.attempt = attempt
        self.state = SessionState(session)
        self.on_cancel: Callable[[], None] = lambda: None
        self.silent = False
        """Set when the lease is lost: nothing is published any more."""

    async def load(self) -> SessionState:
        """Read the session, at least up to the leader's last fact."""
        self.state = await newest_state(self._bus, self.session)
        return self.state

    async def publish(self, *events: SessionEvent) -> None:
        """Publish one event, or several as one batch. Raises Superseded if the attempt is no longer ours."""
        for _ in range(_STALES):
            if self.silent:
                raise Superseded(f"{self.session}.{self.attempt}: the lease is lost")
            try:
                self._folded(events, await self._send(events))
                return
            except Stale:
                await self.load()
                self._still_ours()
        raise Unavailable(f"{self.session}: the fence moves all the time")

    async def try_once(self, event: SessionEvent) -> bool:
        """Publish behind the fence as read; False, after reading again, where something else came first."""
        try:
            self._folded([event], await self._send([event]))
        except Stale:
            await self.load()
            return False
        return True

    async def _send(self, events: Sequence[SessionEvent]) -> int:
        after = self.state.last_seq
        if len(events) == 1:
            return (await self._bus.transition(events[0], after)).sequence
        return (await self._bus.batch(events, fence=(self.session, after))).sequence

    def _folded(self, events: Sequence[SessionEvent], last: int) -> None:
        for event in events:
            self.state.apply(event, last, event.time)

    def _still_ours(self) -> None:
        current = self.state.attempts.get(self.attempt)
        if self.state.terminal or current is None or current.over:
            raise Superseded(f"{self.session}.{self.attempt}")
        if self.state.cancel is not None:
            self.on_cancel()
