"""How long INIT waits for a Docker daemon that doesn't answer."""

from __future__ import annotations

import time

__all__ = ["Patience"]


class Patience:
    """One that restarts, or starts with its host, is waited for: attempts are few. One that was never there isn't, for
    attempts that wait hold the places of those that could run."""

    def __init__(self, wait_s: float, *, was_there: bool) -> None:
        self._wait_s = wait_s
        self._was_there = was_there
        self._began = time.monotonic()

    def heard(self) -> None:
        """It answered."""
        self._was_there = True

    def until(self) -> float:
        """A moment of the monotonic clock."""
        return self._wait_s + (time.monotonic() if self._was_there else self._began)
