"""Random lives: whatever the order of events and however often schedulers die or race, each session ends once."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ingest_log import MemoryLog

from polar_common.events import Event, GroupClosed, SessionArtifacts
from polar_ingest.decisions import Applied, group_event, session_event
from polar_ingest.domain import CloseGroup, Decision, Queue, Rules, decide, decide_group, release
from polar_ingest.entries import Session
from polar_ingest.state import World

RULES = Rules(
    release_ahead=3, postrun_bound=3, retry_delay_s=1, exited_patience_s=5, owner_grace_s=20, evaluation_patience_s=30
)
LIMITS = {"queue_s": 50, "session_s": 60, "attempt_min_s": 5, "attempts": 3, "group_s": 400}
FAULTS = ["none", "none", "agent", "harness", "infra", "infra", "lost", "lost", "silent"]
ACTIONS = ["serve"] * 8 + ["schedule"] * 8 + ["wait"] * 4 + ["build"] * 2 + ["cancel", "late", "restart"]
ENDS = ("session.completed", "session.failed", "session.cancelled")


class Lives(RuleBasedStateMachine):
    """The log is the truth. Two schedulers fold it, each at its own pace; a publish behind an old fence is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.log = MemoryLog(RULES)
        self.messages: list[tuple[Applied, float]] = []
        self.worlds = [World("live"), World("live")]
        self.seen = [0, 0]
        self.live: Counter[str] = Counter()
        self.silent: set[str] = set()
        """Whoever is responsible for these says nothing more: gateway, evaluator."""
        self.most_live = 0
        self.ended_alive = False

    def put(self, event: Event) -> None:
        self.log.put(event)
        self.messages.append((Applied(event.subject(), self.log.sequence, self.log.log_time, event), self.log.now))

    @initialize(samples=st.integers(1, 3))
    def accept(self, samples: int) -> None:
        before = len(self.log.events)
        self.log.accept(samples=samples, limits=LIMITS, evaluator={"command": "true", "timeout_s": 10})
        for number, event in enumerate(self.log.events[before:], before + 1):
            self.messages.append((Applied(event.subject(), number, self.log.log_time, event), self.log.now))

    def write(self, do: str, session: Session, **fields: object) -> None:
        """Somebody else's facts, recorded for the schedulers to follow."""
        before, first = len(self.log.events), self.log.sequence
        getattr(self.log, do)(session, **fields)
        for offset, event in enumerate(self.log.events[before:], 1):
            self.messages.append((Applied(event.subject(), first + offset, self.log.log_time, event), self.log.now))

    def pick(self, index: int, *phases: str) -> Session | None:
        found = [s for s in self.log.world.sessions.values() if s.phase in phases]
        return found[index % len(found)] if found else None

    @rule(
        action=st.sampled_from(ACTIONS),
        index=st.integers(0, 2),
        who=st.integers(0, 1),
        fault=st.sampled_from(FAULTS),
        whole=st.sampled_from([True, True, False]),
        lag=st.sampled_from([0, 0, 0, 1, 2, 5, 9]),
        seconds=st.sampled_from([0.5, 1, 1, 1, 2, 2, 10, 70]),
    )
    def step(self, action: str, index: int, who: int, fault: str, whole: bool, lag: int, seconds: float) -> None:
        """One rule for all: hypothesis leaves out whole rules in most runs, and then little would happen."""
        match action:
            case "serve":
                self.serve(index, fault, whole)
            case "schedule":
                self.schedule(who, lag, index + 2)
            case "wait":
                self.log.now += seconds
            case "build":
                self.build(index)
            case "cancel":
                self.cancel(index)
            case "late":
                self.late_artifacts_of_a_dead_attempt(index)
            case "restart":
                self.restart(who)

    # -- what the other services do

    def serve(self, index: int, fault: str, whole: bool) -> None:
        """The next thing that gateway or evaluator would do about a session."""
        session = self.pick(index, "queued", "claimed", "exited", "artifacts")
        if session is None or session.end is not None or session.id in self.silent:
            return
        if session.phase == "queued":
            self.write("claim", session)
            self.live[session.id] += 1
            self.most_live = max(self.most_live, self.live[session.id])
        elif fault == "silent":
            self.silent.add(session.id)
            self.live[session.id] = 0
        elif session.phase == "claimed":
            self.live[session.id] -= 1
            if fault == "lost":
                self.write("lose", session)
            else:
                self.write("exit", session, fault=fault, artifacts=whole, cancelled=session.cancel is not None)
        elif session.phase == "exited":
            self.write("artifacts", session)
        elif session.exited is not None and session.exited.fault in ("none", "agent") and not session.evaluation:
            self.write("evaluate", session)

    def cancel(self, index: int) -> None:
        found = [s for s in self.log.world.sessions.values() if s.cancel is None]
        if found:
            self.write("cancel", found[index % len(found)])

    def build(self, index: int) -> None:
        found = [s for s in self.log.world.sessions.values() if s.end is not None and not s.built]
        if found:
            self.write("build", found[index % len(found)])

    def late_artifacts_of_a_dead_attempt(self, index: int) -> None:
        """A gateway that was thought dead speaks again."""
        found = [s for s in self.log.world.sessions.values() if s.attempt > 1 and s.end is None]
        for session in found[index:]:
            event = SessionArtifacts(**self.log.about(session, session.attempt - 1))
            if event.subject() not in self.log.subjects:
                self.put(event)

    # -- the schedulers

    def schedule(self, who: int, lag: int, count: int) -> None:
        """Follow, perhaps not to the end, and act on what is known."""
        self.follow(who, max(0, len(self.messages) - lag - self.seen[who]))
        self.act(who, count)

    def restart(self, who: int) -> None:
        self.worlds[who], self.seen[who] = World("live"), 0

    def follow(self, who: int, most: int) -> None:
        for message, at in self.messages[self.seen[who] : self.seen[who] + most]:
            self.worlds[who].apply(message, at)
        self.seen[who] = min(len(self.messages), self.seen[who] + most)

    def act(self, who: int, count: int) -> None:
        """Decide and publish up to `count` decisions, on what this scheduler knows."""
        world = self.worlds[who]
        todo: list[tuple[Session, Decision]] = []
        for session in world.sessions.values():
            found = decide(session, world.tasks[session.task], self.log.now, RULES)
            if not isinstance(found, float):
                todo.append((session, found))
        for name in release(world, RULES):
            if world.sessions[name].cancel is None:
                todo.append((world.sessions[name], Queue(1)))
        for session, decision in todo[:count]:
            self.publish(world, session, decision)
        for session, _ in todo:
            if world.is_waiting(session.id):
                world.wait(session)
        for task in list(world.tasks.values()):
            group = decide_group(task, self.log.now)
            if isinstance(group, CloseGroup):
                event = group_event(task, [world.sessions[s] for s in task.sessions], group)
                if event.subject() not in self.log.subjects:
                    self.put(event)

    def publish(self, world: World, session: Session, decision: Decision) -> None:
        true = self.log.world.sessions.get(session.id)
        task = world.tasks[session.task]
        accepted = self.log.events[0]
        event = session_event(session, task, decision, accepted)  # type: ignore[arg-type]
        if true is not None and true.seq == session.seq and event.subject() not in self.log.subjects:
            if event.kind in ENDS:
                # A gateway kills its own attempt at the session deadline, long before the last resort.
                over = (true.first_claim_at or math.inf) + LIMITS["session_s"] + RULES.owner_grace_s
                self.ended_alive |= bool(self.live[session.id]) and self.log.now < over
            self.put(event)

    # -- what must hold

    @invariant()
    def no_session_ends_twice(self) -> None:
        ends = Counter(e.session for e in self.log.events if e.kind in ENDS)  # type: ignore[attr-defined]
        assert all(n == 1 for n in ends.values()), ends
        assert sum(e.kind == "group.closed" for e in self.log.events) <= 1

    @invariant()
    def a_complete_group_is_complete(self) -> None:
        for event in self.log.events:
            if isinstance(event, GroupClosed) and event.by == "complete":
                assert event.terminal == event.expected == len(event.members)
                assert not {m.reason for m in event.members} & {"not_terminal", "not_reconstructed"}

    @invariant()
    def never_two_attempts_live(self) -> None:
        assert self.most_live <= 1
        assert not self.ended_alive, "a session ended under a running attempt"

    @invariant()
    def attempts_are_consecutive(self) -> None:
        queued: dict[str, list[int]] = {}
        for event in self.log.events:
            if event.kind == "session.queued":
                queued.setdefault(event.session, []).append(event.attempt)  # type: ignore[attr-defined]
        assert all(found == list(range(1, len(found) + 1)) for found in queued.values()), queued

    @precondition(lambda self: bool(self.messages))
    @invariant()
    def schedulers_agree_on_what_both_have_seen(self) -> None:
        if self.seen[0] == self.seen[1]:
            assert {s.id: (s.seq, s.phase) for s in self.worlds[0].sessions.values()} == {
                s.id: (s.seq, s.phase) for s in self.worlds[1].sessions.values()
            }

    def teardown(self) -> None:
        """Left alone with time, schedulers end everything; nothing more needs to come from anybody."""
        sessions = {e.session for e in self.log.events if e.kind == "session.accepted"}  # type: ignore[attr-defined]
        for _ in range(12):
            self.log.now += 100
            self.follow(0, 10_000)
            self.act(0, 1000)
            self.follow(0, 10_000)
        ended = {e.session for e in self.log.events if e.kind in ENDS}  # type: ignore[attr-defined]
        assert ended == sessions
        assert sum(e.kind == "group.closed" for e in self.log.events) == 1 or not sessions
        self.no_session_ends_twice()


Lives.TestCase.settings = settings(max_examples=100, stateful_step_count=80, deadline=None)
TestLives = Lives.TestCase
