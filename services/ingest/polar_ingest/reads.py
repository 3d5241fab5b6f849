"""Questions about tasks, sessions and runs: from the fold where it remembers, else from the log."""

from __future__ import annotations

from polar_common import subjects
from polar_common.bus import Bus, Stored
from polar_common.errors import ConfigError, RequestError
from polar_common.events import GroupClosed, TaskAccepted
from polar_common.ids import segment_of, task_id
from polar_common.session_state import SessionState, fold
from polar_common.topology import events_stream

from .scheduler import Scheduler
from .settings import IngestSettings
from .views import RunView, SessionSummary, SessionView, TaskView, ended_summary, run_view, session_view, summary_of
from .views import task_view as make_task_view

__all__ = ["Reads"]

_AT_ONCE = 64
"""Sessions per read: with a dozen transitions each, a read stays below the server's 1,024 subjects."""


class Reads:
    """Answers of one ingest instance."""

    def __init__(self, bus: Bus, scheduler: Scheduler, settings: IngestSettings) -> None:
        self._bus = bus
        self._scheduler = scheduler
        self._segment = settings.segment
        self._stream = events_stream(settings.segment)

    async def accepted(self, name: str, run: str) -> TaskAccepted:
        """A task by Polar's id, or by the user's own within a run. Raises RequestError 404."""
        found = None
        if self._ours(name):
            found = await self._scheduler.specs.find(name)
        if found is None:
            found = await self._scheduler.specs.find(task_id(self._segment, run, name))
        if found is None:
            raise RequestError(f"no task {name!r}, neither as an id nor in run {run!r}", 404, "task")
        return found

    def _ours(self, name: str) -> bool:
        try:
            return segment_of(name) == self._segment
        except ConfigError:
            return False

    async def task(self, name: str, run: str) -> TaskView:
        """A task with the state of its sessions."""
        accepted = await self.accepted(name, run)
        world = self._scheduler.world
        if (task := world.tasks.get(accepted.task)) is not None:
            known = [summary_of(world.sessions[s]) for s in task.sessions if s in world.sessions]
            if len(known) == len(accepted.sessions):
                closing = await self._bus.last(subjects.group(task.id)) if task.closed else None
                return make_task_view(accepted, known, _closed(closing))
        closing = await self._bus.last(subjects.group(accepted.task))
        return make_task_view(accepted, await self._from_log(accepted, closing), _closed(closing))

    async def _from_log(self, accepted: TaskAccepted, closing: Stored | None) -> list[SessionSummary]:
        found: list[SessionSummary] = []
        for start in range(0, len(accepted.sessions), _AT_ONCE):
            some = accepted.sessions[start : start + _AT_ONCE]
            filters = [subjects.group(accepted.task), *(subjects.session_filter(s) for s in some)]
            messages = await self._bus.read(self._stream, filters, at_least=closing.sequence if closing else 0)
            states = {s: SessionState(s) for s in some}
            for message in messages:
                if (state := states.get(message.subject.split(".")[4])) is not None:
                    state.apply(message.event, message.sequence, message.time)
            found += [ended_summary(s, index) for index, s in enumerate(states.values(), start)]
        return found

    async def session(self, session: str) -> SessionView:
        """One session from one read. Raises RequestError 404."""
        newest = await self._newest(session)
        filters = [
            subjects.session_filter(session),
            subjects.completion_filter(session),
            f"polar.events.{self._segment}.evaluation.{session}.>",
            f"polar.events.{self._segment}.build.*.{session}.*",
        ]
        return session_view(session, await self._bus.read(self._stream, filters, at_least=newest))

    async def ended_session(self, session: str) -> SessionState:
        """A session that the fold doesn't remember. Raises RequestError 404."""
        newest = await self._newest(session)
        return fold(session, await self._bus.read_session(session, completions=False, at_least=newest))

    async def _newest(self, session: str) -> int:
        """The sequence of its last transition, as the leader has it. Raises RequestError 404."""
        newest = await self._bus.last(subjects.session_filter(session)) if self._ours(session) else None
        if newest is None:
            raise RequestError(f"no session {session!r}", 404, "session")
        return newest.sequence

    def run(self, run: str) -> RunView:
        """Counts of a run. Raises RequestError 404."""
        world = self._scheduler.world
        counts = world.runs.get(run)
        if counts is None:
            raise RequestError(f"no run {run!r}", 404, "run")
        return run_view(counts, world.live_sessions(run), [world.tasks[t] for t in world.run_tasks.get(run, ())])


def _closed(stored: Stored | None) -> GroupClosed | None:
    event = stored.event if stored is not None else None
    return event if isinstance(event, GroupClosed) else None
