"""A real server with stored sessions, for benchmarks that read: written without syncing, measured with it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from nats.js.api import AckPolicy, ConsumerConfig

from bench.session import LongSession
from polar_common import subjects
from polar_common.bus import Bus
from polar_common.events import Event, GroupClosed, GroupMember, SessionAccepted, SessionCompleted, TaskAccepted
from polar_common.ids import task_of
from polar_common.nats_server import NatsConfig, NatsServer, free_port
from polar_common.task_spec import HarnessSpec, TaskSpec
from polar_common.topology import Topology, apply
from polar_reconstructor.handlers import Reconstructor
from polar_reconstructor.rules import BUILT_IN

__all__ = ["close_group", "fetched", "stored_log"]


@asynccontextmanager
async def stored_log(sessions: list[LongSession], *, groups: bool = False) -> AsyncIterator[Bus]:
    """Connected to a server that holds these sessions and, if asked, their traces and one closed group a task."""
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as directory:
        server = NatsServer(NatsConfig(data=Path(directory) / "js", port=free_port(), name="bench", sync="2m"))
        server.start()
        try:
            bus = await Bus.connect(server.url, "bench")
            await apply(bus.js, Topology())
            for start in range(0, len(sessions), 32):
                await asyncio.gather(*(s.publish(bus) for s in sessions[start : start + 32]))
            if groups:
                for task in dict.fromkeys(task_of(s.session) for s in sessions):
                    await close_group(bus, task, [s.session for s in sessions if task_of(s.session) == task])
            await bus.close()
            # Written without syncing every message, measured with the house's default.
            server.stop("term")
            server.config = NatsConfig(data=server.config.data, port=server.config.port, name="bench")
            server.start()
            bus = await Bus.connect(server.url, "bench")
            try:
                yield bus
            finally:
                await bus.close()
        finally:
            server.stop("kill")


async def close_group(bus: Bus, task: str, sessions: list[str]) -> None:
    """What ingest and reconstructor make of ended sessions; every second one passed."""
    spec = TaskSpec(id=task, instruction="x", harness=HarnessSpec(name="command"), samples=len(sessions))
    facts: list[Event] = [
        TaskAccepted(run="bench", task=task, spec=spec, spec_hash="h", sessions=tuple(sessions)),
        *(
            SessionAccepted(run="bench", task=task, session=s, attempt=0, index=i, work_class="local")
            for i, s in enumerate(sessions)
        ),
    ]
    await bus.batch(facts)
    service = Reconstructor(bus, "live", BUILT_IN["exact"])
    members = []
    for index, session in enumerate(sessions):
        ended = await bus.last(subjects.session(session, 1, "artifacts"))
        if ended is None:
            raise RuntimeError(f"{session} hasn't ended")
        await service.on_ended(ended)
        passed = index % 2
        await bus.once(
            SessionCompleted(
                run="bench",
                task=task,
                session=session,
                attempt=0,
                last_attempt=1,
                reward=float(passed),
                outcome="passed" if passed else "failed",
                evaluation="e",
            )
        )
        outcome = "passed" if passed else "failed"
        members.append(GroupMember(session=session, outcome=outcome, reward=float(passed), trainable=True, attempts=1))
    closed = GroupClosed(
        run="bench", task=task, expected=len(members), terminal=len(members), trainable=len(members), by="complete",
        members=tuple(members),
    )  # fmt: skip
    await bus.once(closed)
    await service.project(closed)


async def fetched(bus: Bus, stream: str, subject: str) -> float:
    """Messages a second, read as nats-py's own manual does it."""
    config = ConsumerConfig(ack_policy=AckPolicy.NONE, mem_storage=True, filter_subject=subject)
    info = await bus.js.add_consumer(stream, config)
    sub = await bus.js.pull_subscribe_bind(info.name, stream)
    begun, count = time.perf_counter(), 0
    while count < (info.num_pending or 0):
        count += len(await sub.fetch(512, timeout=10))
    took = time.perf_counter() - begun
    await sub.unsubscribe()
    return count / took
