"""Who is released next: deficit round-robin over runs, weighted by priority, one queue per class of work.

A run's weight is 2^(priority/10) of its most urgent waiting task: ten steps of priority double the share, and nobody
starves. Within a run the more urgent task goes first; at equal priority an opened group is finished before the next
one is opened, in order of acceptance. Pure values, no clock, no I/O.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["FairQueue", "weight"]

_Key = tuple[int, int]


def weight(priority: int) -> float:
    """A run's share of releases relative to priority 0."""
    return float(2.0 ** (priority / 10))


@dataclass(slots=True)
class _Waiting:
    """One task's sessions that wait, in order."""

    task: str
    run: str
    key: _Key
    opened: bool
    sessions: deque[str] = field(default_factory=deque)


@dataclass(slots=True)
class _Run:
    """One run's waiting tasks: `fresh` ones have released nothing yet (or stand among the opened ones as well)."""

    name: str
    fresh: list[tuple[_Key, str]] = field(default_factory=list)
    opened: list[tuple[_Key, str]] = field(default_factory=list)
    deficit: float = 0.0


class FairQueue:
    """The waiting sessions of one class of work."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._ring: deque[str] = deque()
        self._tasks: dict[str, _Waiting] = {}

    def push(self, run: str, task: str, session: str, *, priority: int, order: int, opened: bool = False) -> None:
        """Add a session; `order` is its task's place in the log."""
        if (waiting := self._tasks.get(task)) is None:
            waiting = self._tasks[task] = _Waiting(task, run, (-priority, order), opened)
            owner = self._runs.get(run)
            if owner is None:
                owner = self._runs[run] = _Run(run)
                self._ring.append(run)
            heapq.heappush(owner.opened if opened else owner.fresh, (waiting.key, task))
        waiting.sessions.append(session)

    def open(self, task: str) -> None:
        """A session of the task was released, here or elsewhere."""
        waiting = self._tasks.get(task)
        if waiting is not None and not waiting.opened:
            waiting.opened = True
            heapq.heappush(self._runs[waiting.run].opened, (waiting.key, task))

    def take(
        self, count: int, *, is_waiting: Callable[[str], bool], may_open: Callable[[str], bool] = lambda _: True
    ) -> list[str]:
        """Remove and return up to `count` sessions. `may_open(task)` is asked before a fresh task's first session."""
        taken: list[str] = []
        idle = 0
        while len(taken) < count and self._ring and idle < len(self._ring):
            run = self._runs[self._ring[0]]
            head = self._head(run, is_waiting, may_open)
            if head is None:
                idle += 1 if run.fresh or run.opened else 0
                self._leave(run)
                continue
            idle = 0
            if run.deficit < 1:
                run.deficit += self._quantum(head)
            while run.deficit >= 1 and len(taken) < count and head is not None:
                taken.append(self._pop(head))
                run.deficit -= 1
                head = self._head(run, is_waiting, may_open)
            if head is None:
                self._leave(run)
            elif run.deficit < 1:
                self._ring.rotate(-1)
        return taken

    def _leave(self, run: _Run) -> None:
        """A run that has nothing to give keeps no credit; an empty one is forgotten."""
        run.deficit = 0.0
        if run.fresh or run.opened:
            self._ring.rotate(-1)
        else:
            self._ring.popleft()
            del self._runs[run.name]

    def _quantum(self, head: _Waiting) -> float:
        """At least 1 for the lightest run, so that each round releases something of each."""
        lightest = min(
            weight(-heap[0][0][0]) for run in self._runs.values() for heap in (run.fresh, run.opened) if heap
        )
        return weight(-head.key[0]) / lightest

    def _head(self, run: _Run, is_waiting: Callable[[str], bool], may_open: Callable[[str], bool]) -> _Waiting | None:
        opened, fresh = self._first(run.opened, is_waiting), self._first(run.fresh, is_waiting)
        if fresh is not None and (opened is None or fresh.key[0] < opened.key[0]) and may_open(fresh.task):
            return fresh
        return opened

    def _first(self, heap: list[tuple[_Key, str]], is_waiting: Callable[[str], bool]) -> _Waiting | None:
        """The first task with a session that still waits; what doesn't is dropped."""
        while heap:
            waiting = self._tasks.get(heap[0][1])
            if waiting is not None:
                while waiting.sessions and not is_waiting(waiting.sessions[0]):
                    waiting.sessions.popleft()
                if waiting.sessions:
                    return waiting
                del self._tasks[waiting.task]
            heapq.heappop(heap)
        return None

    def _pop(self, waiting: _Waiting) -> str:
        self.open(waiting.task)
        return waiting.sessions.popleft()
