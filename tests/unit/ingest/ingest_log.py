"""A log in memory for the scheduler's pure parts: events become messages with sequences, without a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from polar_common.events import (
    BuildReconstructed,
    EvaluationEvaluated,
    Event,
    SessionArtifacts,
    SessionCancelRequested,
    SessionClaimed,
    SessionExited,
    SessionLost,
    SessionQueued,
    SessionSealed,
)
from polar_common.task_spec import EvaluatorSpec, HarnessSpec, TaskSpec
from polar_ingest.decisions import Applied, group_event, session_event
from polar_ingest.domain import CloseGroup, Decision, Rules, decide, decide_group
from polar_ingest.entries import Session, Task
from polar_ingest.intake import parse, task_events
from polar_ingest.state import World

START = datetime(2030, 1, 1, tzinfo=UTC)
HASH = "0" * 64


def spec(id: str = "t", **fields: Any) -> TaskSpec:
    harness = HarnessSpec(name="command", args={"argv": ["agent"]})
    fields.setdefault("evaluator", EvaluatorSpec(command="true"))
    return TaskSpec(id=id, instruction="do", harness=harness, **fields)


@dataclass
class MemoryLog:
    """`now` is the clock of log and scheduler alike, in seconds; tests move it by hand."""

    rules: Rules = field(default_factory=Rules)
    now: float = 1000.0
    sequence: int = 0
    world: World = field(default_factory=lambda: World("live", demand=True))
    events: list[Event] = field(default_factory=list)
    subjects: set[str] = field(default_factory=set)

    def put(self, event: Event) -> None:
        """Append and fold. A subject is used once."""
        assert event.subject() not in self.subjects, event.subject()
        self.subjects.add(event.subject())
        self.sequence += 1
        self.events.append(event)
        self.world.apply(Applied(event.subject(), self.sequence, self.log_time, event), self.now)

    @property
    def log_time(self) -> datetime:
        return START + timedelta(seconds=self.now)

    def accept(self, id: str = "t", run: str = "r", samples: int = 1, **fields: Any) -> Task:
        import orjson

        body = {**spec(id).model_dump(mode="json"), "samples": samples, **fields}
        [one] = parse(orjson.dumps(body), run=run, segment="s1", work_classes=("local", "docker"), spec_limit=1 << 20)
        for event in task_events(one, None):
            self.put(event)
        return self.world.tasks[one.task]

    def session(self, task: Task, index: int = 0) -> Session:
        return self.world.sessions[task.sessions[index]]

    def about(self, session: Session, attempt: int | None = None) -> dict[str, Any]:
        number = session.attempt if attempt is None else attempt
        return {"run": "r", "task": session.task, "session": session.id, "attempt": number}

    # -- what others write

    def queue(self, session: Session, attempt: int | None = None) -> None:
        number = session.attempt + 1 if attempt is None else attempt
        self.put(SessionQueued(**self.about(session, number), work_class=session.work_class, spec=spec()))

    def claim(self, session: Session) -> None:
        self.put(
            SessionClaimed(
                **self.about(session), gateway="g", attempt_deadline=self.log_time, session_deadline=self.log_time
            )
        )

    def start(self, session: Session) -> None:
        """Queued and claimed."""
        self.queue(session)
        self.claim(session)

    def exit(self, session: Session, *, artifacts: bool = True, **fields: Any) -> None:
        self.put(SessionSealed(**self.about(session), reason="exited"))
        self.put(SessionExited(**self.about(session), exit_code=0, **fields))
        if artifacts:
            self.artifacts(session)

    def artifacts(self, session: Session) -> None:
        self.put(SessionArtifacts(**self.about(session)))

    def lose(self, session: Session) -> None:
        self.put(SessionLost(**self.about(session)))
        self.put(SessionSealed(**self.about(session), reason="lost"))

    def evaluate(self, session: Session, outcome: Any = "passed", reward: float | None = 1.0, **fields: Any) -> None:
        self.put(EvaluationEvaluated(**self.about(session), evaluator="e", outcome=outcome, reward=reward, **fields))

    def build(self, session: Session, traces: int = 1, excluded: dict[str, str] | None = None) -> None:
        self.put(
            BuildReconstructed(
                **self.about(session),
                build="live",
                rules="exact",
                rules_hash=HASH,
                manifest_hash=HASH,
                traces=traces,
                trained_completions=traces,
                excluded=excluded or {},
                sampled_tokens=traces,
                exact_spans=traces,
                drifted_spans=0,
            )
        )

    def cancel(self, session: Session) -> None:
        self.put(SessionCancelRequested(**self.about(session, 0), reason="enough"))

    # -- what the scheduler does

    def decide(self, session: Session) -> Decision | float:
        return decide(session, self.world.tasks[session.task], self.now, self.rules)

    def obey(self, session: Session, decision: Decision) -> None:
        """Publish a decision as the scheduler would."""
        task = self.world.tasks[session.task]
        accepted = next(e for e in self.events if e.kind == "task.accepted" and e.task == task.id)
        self.put(session_event(session, task, decision, accepted))  # type: ignore[arg-type]

    def end(self, session: Session) -> None:
        """Decide and obey; the decision must be there."""
        decision = self.decide(session)
        assert not isinstance(decision, float), decision
        self.obey(session, decision)

    def group(self, task: Task) -> CloseGroup | float:
        return decide_group(task, self.now)

    def close(self, task: Task) -> None:
        decision = self.group(task)
        assert isinstance(decision, CloseGroup), decision
        self.put(group_event(task, [self.world.sessions[s] for s in task.sessions], decision))
