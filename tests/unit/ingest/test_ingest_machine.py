"""Random lives: whatever the order of events and however often schedulers die or race, each session ends once."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ingest_log import MemoryLog

from polar_common.events import Event
from polar_ingest.decisions import Applied, group_event, session_event
from polar_ingest.domain import CloseGroup, Decision, Rules, decide, decide_group, release
from polar_ingest.state import Session, World

RULES = Rules(
    release_ahead=3, postrun_bound=3, retry_delay_s=1, exited_patience_s=5, owner_grace_s=20, evaluation_patience_s=30
)
LIMITS = {"queue_s": 50, "session_s": 60, "attempt_min_s": 5, "attempts": 3, "group_s": 400}
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
        self.most_live = 0

    def put(self, event: Event) -> None:
        self.log.put(event)
        self.messages.append((Applied(event.subject(), self.log.sequence, self.log.log_time, event), self.log.now))

    @initialize(samples=st.integers(1, 3))
    def accept(self, samples: int) -> None:
        before = len(self.log.events)
        self.log.accept(samples=samples, limits=LIMITS, evaluator={"timeout_s": 10})
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

    # -- what the other services do

    @rule(index=st.integers(0, 2))
    def claim(self, index: int) -> None:
        session = self.pick(index, "queued")
        if session is not None and session.end is None:
            self.write("claim", session)
            self.live[session.id] += 1
            self.most_live = max(self.most_live, self.live[session.id])

    @rule(index=st.integers(0, 2), fault=st.sampled_from(["none", "agent", "harness", "infra"]), whole=st.booleans())
    def exit(self, index: int, fault: str, whole: bool) -> None:
        session = self.pick(index, "claimed")
        if session is not None and session.end is None:
            self.live[session.id] -= 1
            self.write("exit", session, fault=fault, artifacts=whole, cancelled=session.cancel is not None)

    @rule(index=st.integers(0, 2))
    def lose(self, index: int) -> None:
        session = self.pick(index, "claimed")
        if session is not None and session.end is None:
            self.live[session.id] -= 1
            self.write("lose", session)

    @rule(index=st.integers(0, 2))
    def artifacts(self, index: int) -> None:
        session = self.pick(index, "exited")
        if session is not None and session.end is None:
            self.write("artifacts", session)

    @rule(index=st.integers(0, 2))
    def evaluate(self, index: int) -> None:
        session = self.pick(index, "artifacts")
        exited = session.exited if session is not None else None
        if session is not None and exited is not None and exited.fault in ("none", "agent") and not session.evaluation:
            self.write("evaluate", session)

    @rule(index=st.integers(0, 2))
    def cancel(self, index: int) -> None:
        found = [s for s in self.log.world.sessions.values() if s.cancel is None]
        if found:
            self.write("cancel", found[index % len(found)])

    @rule(index=st.integers(0, 2))
    def build(self, index: int) -> None:
        found = [s for s in self.log.world.sessions.values() if s.end is not None and not s.built]
        if found:
            self.write("build", found[index % len(found)])

    @rule(seconds=st.sampled_from([0.5, 2, 10, 30, 100]))
    def wait(self, seconds: float) -> None:
        self.log.now += seconds

    # -- the schedulers

    @rule(who=st.integers(0, 1), most=st.integers(1, 50))
    def follow(self, who: int, most: int) -> None:
        for message, at in self.messages[self.seen[who] : self.seen[who] + most]:
            self.worlds[who].apply(message, at)
        self.seen[who] = min(len(self.messages), self.seen[who] + most)

    @rule(who=st.integers(0, 1))
    def restart(self, who: int) -> None:
        self.worlds[who], self.seen[who] = World("live"), 0

    @rule(who=st.integers(0, 1), count=st.integers(1, 5))
    def act(self, who: int, count: int) -> None:
        """Decide and publish up to `count` decisions, on what this scheduler knows."""
        world = self.worlds[who]
        todo: list[tuple[Session, Decision]] = []
        for session in world.sessions.values():
            found = decide(session, world.tasks[session.task], self.log.now, RULES)
            if not isinstance(found, float):
                todo.append((session, found))
        from polar_ingest.domain import Queue

        for name in release(world, RULES):
            if world.sessions[name].cancel is None:
                todo.append((world.sessions[name], Queue(1)))
        for session, decision in todo[:count]:
            self.publish(world, session, decision)
        for name in {s.id for s, _ in todo}:
            if world.is_waiting(name):
                world.wait(world.sessions[name])
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
            self.put(event)

    # -- what must hold

    @invariant()
    def no_session_ends_twice(self) -> None:
        ends = Counter(e.session for e in self.log.events if e.kind in ENDS)  # type: ignore[attr-defined]
        assert all(n == 1 for n in ends.values()), ends
        assert sum(e.kind == "group.closed" for e in self.log.events) <= 1

    @invariant()
    def never_two_attempts_live(self) -> None:
        assert self.most_live <= 1

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


Lives.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLives = Lives.TestCase
