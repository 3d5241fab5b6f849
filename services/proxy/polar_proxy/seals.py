"""Which attempts are sealed, followed on the log. A proxy that lost the follower can't know, and says 503."""

from __future__ import annotations

import time
from collections.abc import Callable

from polar_common import subjects
from polar_common.bus import Bus, follow
from polar_common.topology import events_stream

__all__ = ["LOST_S", "Seals"]

LOST_S = 5.0
"""Without a sign of life from the follower for this long, seals may have been missed."""


_KEPT_S = 7 * 86_400.0
_PRUNE = 50_000


class Seals:
    """The set of sealed attempts of one segment. `on_seal` is told of each as it comes."""

    def __init__(self, bus: Bus, segment: str, on_seal: Callable[[str, int], None]) -> None:
        self._bus = bus
        self._segment = segment
        self._on_seal = on_seal
        self._sealed: dict[tuple[str, int], float] = {}
        self._caught_up = False
        self._alive = 0.0

    def sealed(self, session: str, attempt: int) -> bool:
        return (session, attempt) in self._sealed

    @property
    def ready(self) -> bool:
        """All seals so far are known, and the follower lives."""
        return self._caught_up and time.monotonic() - self._alive < LOST_S

    @property
    def caught_up(self) -> bool:
        """All seals at start are known."""
        return self._caught_up

    async def run(self) -> None:
        """Follow for ever."""
        pattern = subjects.ANY_SEALED.replace("*", self._segment, 1)
        stream = events_stream(self._segment)
        async for stored in follow(self._bus, stream, [pattern], on_caught_up=self._now, on_alive=self._heard):
            _, _, _, _, session, attempt, _ = stored.subject.split(".")
            if not attempt.isdecimal():
                # The subject decides, whatever the body says; and no key names such an attempt.
                continue
            self._sealed[session, int(attempt)] = stored.time.timestamp()
            if len(self._sealed) % _PRUNE == 0:
                self._prune()
            self._on_seal(session, int(attempt))

    def _prune(self) -> None:
        """Keys of attempts that were sealed long ago have expired."""
        old = time.time() - _KEPT_S
        self._sealed = {name: at for name, at in self._sealed.items() if at > old}

    def _now(self) -> None:
        self._caught_up = True
        self._heard()

    def _heard(self) -> None:
        self._alive = time.monotonic()
