"""What trainers want in flight, and what is: a group from its first release until it's closed, and then until a trainer
has consumed it or asks anew. Each run has the demands of its own trainers; those of trainers that read all runs are for
what goes beyond. So a trainer that stops reading neither fills the log nor holds up another run's.

A trainer's demand rests while every engine lags further behind its newest weights than its staleness bound: what opened
then would be too old from its first token on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["Demand"]


class Demand:
    """The fold of demands, openings, closings and consumption, in the log's order."""

    def __init__(self) -> None:
        self.open: Counter[str] = Counter()
        """Run → groups with a released session that aren't closed."""
        self._spent: dict[str, str] = {}
        """Task → run of groups that are closed and still in flight for the trainer."""
        self._wanted: dict[str, tuple[str, int, int]] = {}
        """Trainer → its run ("": all), groups and staleness bound, as it said last."""
        self._trainers: dict[str, str] = {}
        """Version of weights → whose they are."""
        self._published: Counter[str] = Counter()
        self._active: Counter[str] = Counter()
        """Trainer → number of its newest version published, and of the newest that an engine samples with."""

    def closed(self, task: str, run: str) -> None:
        self._spent[task] = run

    def consumed(self, tasks: Iterable[str]) -> None:
        for task in tasks:
            self._spent.pop(task, None)

    def demanded(self, trainer: str, run: str, groups: int, staleness: int) -> None:
        self._wanted[trainer] = (run, max(0, groups), max(0, staleness))
        self._spent = {task: other for task, other in self._spent.items() if run and other != run}

    def published(self, trainer: str, version: str, number: int) -> None:
        self._trainers[version] = trainer
        self._published[trainer] = max(self._published[trainer], number)

    def activated(self, version: str, number: int) -> None:
        if (trainer := self._trainers.get(version)) is not None:
            self._active[trainer] = max(self._active[trainer], number)

    def in_flight(self) -> Counter[str]:
        """Groups by run."""
        return self.open + Counter(self._spent.values())

    def room(self, run: str, flight: Counter[str]) -> bool:
        """Whether one more group of the run is wanted while so many are in flight."""
        own: Counter[str] = Counter()
        for trainer, (of, groups, staleness) in self._wanted.items():
            if self._published[trainer] - self._active[trainer] <= staleness:
                own[of] += groups
        shared = own.pop("", 0)
        return flight[run] < own[run] or sum(max(0, n - own[r]) for r, n in flight.items()) < shared
