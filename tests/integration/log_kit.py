"""Whole tasks on a real log, for tests of what reads logs: accepted, tried, built, evaluated, closed; and commands."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.scripted_sessions import Script

from polar_common import subjects
from polar_common.bus import Bus
from polar_common.events import (
    EvaluationEvaluated,
    Event,
    GroupClosed,
    GroupMember,
    SessionAccepted,
    SessionClaimed,
    SessionCompleted,
    SessionInitialized,
    SessionQueued,
    SessionReady,
    SessionRunning,
    TaskAccepted,
    now,
)
from polar_common.ids import FIRST_SEGMENT, sessions_of, task_id
from polar_common.nats_server import NatsServer
from polar_common.task_spec import HarnessSpec, TaskSpec
from polar_reconstructor.handlers import Reconstructor
from polar_reconstructor.rules import BUILT_IN

E = 99


@dataclass
class Lived:
    """A task that has run its course. `events`: what was published, without builds."""

    task: str
    sessions: list[str]
    events: list[Event] = field(default_factory=list)


def spec(number: int) -> TaskSpec:
    return TaskSpec(id=f"t{number}", instruction="do", samples=2, harness=HarnessSpec(name="command"))


def accepted(number: int, samples: int = 2, segment: str = FIRST_SEGMENT) -> list[Event]:
    task = task_id(segment, "run", f"t{number}")
    sessions = sessions_of(task, samples)
    about: dict[str, Any] = {"run": "run", "task": task}
    first = TaskAccepted(**about, spec=spec(number), spec_hash=f"h{number}", sessions=tuple(sessions))
    return [first] + [
        SessionAccepted(**about, session=s, attempt=0, index=i, work_class="local") for i, s in enumerate(sessions)
    ]


def attempt(script: Script, number: int, *, dies: bool = False) -> Script:
    """One attempt with a chain of calls, one of them large, and a call after the seal."""
    script.attempt = number
    about = script.common
    script.add(SessionQueued(**about, work_class="local", spec=spec(number)))
    script.add(SessionClaimed(**about, gateway="g1", attempt_deadline=now(), session_deadline=now()))
    initialized = SessionInitialized(
        **about, runtime="local", isolation="none", harness="command", harness_version="1", harness_config_hash="c",
        init_s=0.1,
    )  # fmt: skip
    script.add(initialized).add(SessionReady(**about)).add(SessionRunning(**about))
    a, b, big = f"a{number}", f"b{number}", f"big{number}"
    script.heads.clear()
    script.call(a, [1, 2], [10, E])
    script.call(b, [1, 2, 10, E, 5], [20, E], base=a, shared=4, parent=a, chain_class="continued")
    ids = np.random.default_rng(number).integers(100, 30_000, 9_000).tolist()
    script.call(big, [1, 2, 10, E, 5, 20, E, *ids], [30, E], base=b, shared=7, parent=b, chain_class="continued")
    script.cut(f"cut{number}", sampled=[7, 8])
    if dies:
        return script.lost().sealed("lost")
    script.sealed()
    script.call(f"late{number}", [3], [40, E])
    return script.exited().artifacts()


async def lived(bus: Bus, number: int = 0, *, attempts: int = 1, segment: str = FIRST_SEGMENT) -> Lived:
    """A task with two sessions, each with `attempts` attempts of which the last one counts."""
    events = accepted(number, segment=segment)
    await bus.batch(events)
    task = events[0].task
    reconstructor = Reconstructor(bus, "live", BUILT_IN["exact"])
    found = Lived(task, sessions_of(task, 2), events)
    for index, session in enumerate(found.sessions):
        script = Script(task=task, index=index)
        for n in range(1, attempts + 1):
            attempt(script, n, dies=n < attempts)
        await script.publish(bus)
        stored = await bus.last(subjects.session(session, attempts, "artifacts"))
        assert stored is not None
        await reconstructor.on_ended(stored)
        found.events += [e for _, e in script.events]
        for event in end(script, attempts):
            await bus.once(event)
            found.events.append(event)
    closed = closing(task, found.sessions, attempts)
    await bus.once(closed)
    await reconstructor.project(closed)
    found.events.append(closed)
    return found


def end(script: Script, attempts: int) -> list[Event]:
    """Evaluated and completed."""
    about = script.common
    evaluated = EvaluationEvaluated(**about, evaluator="command", outcome="passed", reward=1.0)
    completed = SessionCompleted(
        **(about | {"attempt": 0}), last_attempt=attempts, outcome="passed", reward=1.0, evaluation="live"
    )
    return [evaluated, completed]


def closing(task: str, sessions: list[str], attempts: int = 1, **changes: Any) -> GroupClosed:
    members = tuple(
        GroupMember(session=s, outcome="passed", reward=1.0, trainable=True, attempts=attempts, evaluation="live")
        for s in sessions
    )
    fields: dict[str, Any] = {"expected": len(sessions), "terminal": len(sessions), "trainable": len(sessions)}
    return GroupClosed(run="run", task=task, by="complete", members=members, **(fields | changes))


def polar(server: NatsServer, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """A command against the server alone, as JSON lines. `code`: how it has to end."""
    env = os.environ | {"POLAR_NATS": server.url}
    argv = [sys.executable, "-m", "polar_common.cli", *arguments, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


async def command(server: NatsServer, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    return await asyncio.to_thread(polar, server, *arguments, code=code)
