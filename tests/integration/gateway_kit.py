"""A gateway in this process on the test's server, and the part of the scheduler that releases work to it."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from polar_common.blobs import Blobs
from polar_common.bus import Bus, Worker
from polar_common.errors import RuntimeUnavailable
from polar_common.events import (
    CompletionCaptured,
    EngineFacts,
    HeadRef,
    MessagesRef,
    PromptRef,
    SamplingUsed,
    SessionAccepted,
    SessionCancelRequested,
    SessionQueued,
)
from polar_common.ids import new_id, session_id, task_id
from polar_common.packing import BlobRef, pack
from polar_common.session_state import SessionState, newest_state
from polar_common.task_spec import HarnessSpec, TaskSpec
from polar_common.topology import Topology, consumers, work_consumer
from polar_gateway.handlers import Gateway
from polar_gateway.harnesses.base import Harness, Launch, LaunchContext, skills
from polar_gateway.house import House, make_house
from polar_gateway.settings import GatewaySettings
from polar_runtime import pack_files
from polar_runtime.local import LocalRuntime

SECRET = "a secret for tests only"


def settings(tmp_path: Path, **options: Any) -> GatewaySettings:
    """Small pools, everything below `tmp_path`."""
    made = GatewaySettings(data=tmp_path, secret=SecretStr(SECRET), **options)
    made.proxy_socket.parent.mkdir(parents=True, exist_ok=True)
    made.root.mkdir(parents=True, exist_ok=True)
    return made


def script(text: str, *, name: str = "t", **fields: Any) -> TaskSpec:
    """A task whose harness is a shell script."""
    return TaskSpec(id=name, instruction="do it", harness=HarnessSpec(name="command", args={"script": text}), **fields)


async def release(
    bus: Bus,
    spec: TaskSpec,
    *,
    index: int = 0,
    attempt: int = 1,
    session_deadline: datetime | None = None,
    files: BlobRef | None = None,
) -> str:
    """Accept (for the first attempt) and queue one session; returns its id."""
    task = task_id("s1", "run", spec.id)
    session = session_id(task, index)
    about: dict[str, Any] = {"session": session, "run": "run", "task": task}
    if attempt == 1:
        await bus.once(SessionAccepted(**about, attempt=0, index=index, work_class=spec.runtime.queue_class))
    if spec.files:
        packed = pack_files({path: text.encode() for path, text in spec.files.items()})
        files = await Blobs(bus, "s1").put(packed)
    state = await load(bus, session)
    queued = SessionQueued(
        **about,
        attempt=attempt,
        work_class=spec.runtime.queue_class,
        spec=spec,
        files=files,
        session_deadline=session_deadline,
    )
    await bus.transition(queued, state.last_seq)
    return session


async def cancel(bus: Bus, session: str) -> None:
    await bus.once(SessionCancelRequested(session=session, attempt=0, reason="test"))


async def completion(bus: Bus, session: str, attempt: int = 1, name: str = "c1") -> None:
    """What the proxy would record of one model call."""
    ids, _ = pack([1, 2, 3], "i32")
    await bus.once(
        CompletionCaptured(
            session=session,
            attempt=attempt,
            completion=name,
            dialect="openai-chat",
            stream=False,
            model="policy",
            request_hash="h",
            head=HeadRef(hash="h"),
            messages=MessagesRef(),
            prompt=PromptRef(new=ids, length=3),
            sampled=ids,
            finish="stop",
            closed=True,
            sampling=SamplingUsed(temperature=1, top_p=1, top_k=0, min_p=0, max_tokens=9),
            engine=EngineFacts(name="e", replica="r", model="m"),
        )
    )


async def load(bus: Bus, session: str) -> SessionState:
    return await newest_state(bus, session)


async def until(bus: Bus, session: str, reached: Callable[[SessionState], bool], timeout: float = 30.0) -> SessionState:
    """The session as soon as it has `reached` what is waited for."""
    async with asyncio.timeout(timeout):
        while True:
            state = await load(bus, session)
            if reached(state):
                return state
            await asyncio.sleep(0.03)


async def over(bus: Bus, session: str, attempt: int = 1, timeout: float = 30.0) -> SessionState:
    return await until(bus, session, lambda s: attempt in s.attempts and s.attempts[attempt].over, timeout)


async def phase(bus: Bus, session: str, name: str, timeout: float = 30.0) -> SessionState:
    return await until(bus, session, lambda s: s.phase == name, timeout)


async def idle(found: Gateway, timeout: float = 5.0) -> bool:
    """Whether the gateway lets go of all attempts: it does so just after their last event."""
    deadline = time.monotonic() + timeout
    while found.live and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return not found.live


def names(state: SessionState, attempt: int = 1) -> list[str]:
    """The attempt's events in the order of the log."""
    at = state.attempts[attempt].at
    return sorted(at, key=lambda name: at[name])


@asynccontextmanager
async def gateway(
    bus: Bus, made: GatewaySettings, *, adapt: Callable[[House], Awaitable[None] | None] | None = None
) -> AsyncIterator[Gateway]:
    """Its worker takes class `local` until the block ends; what still runs then is abandoned, as by a lost lease."""
    house = make_house(made, bus, "g1")
    if adapt is not None:
        adapt(house)
    await house.clock.sync(bus, "POLAR_EVENTS_s1")
    one = Gateway(house)
    worker = Worker(bus, work_consumer("local"), one.on_queued, lambda: worker.active + house.pools.init.free)
    stop = asyncio.Event()
    working = asyncio.ensure_future(worker.run(stop))
    following = asyncio.ensure_future(one.follow_cancels())
    try:
        yield one
    finally:
        stop.set()
        following.cancel()
        await worker.abandon()
        await asyncio.gather(working, following, return_exceptions=True)


async def short_leases(bus: Bus, lease_s: float) -> None:
    """Make the work consumers anew with a short ack wait."""
    for consumer in consumers(Topology(lease_s=lease_s)):
        if consumer.owner == "gateway":
            await bus.js.delete_consumer(consumer.stream, consumer.durable)
            await bus.js.add_consumer(consumer.stream, consumer.config())


@contextmanager
def process(
    url: str, tmp_path: Path, package: str = "polar_gateway", **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A gateway (or another service) as a process of its own, ready; killed at the end if it still runs."""
    ready = tmp_path / f"ready-{new_id()[:6]}.json"
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": ":".join(p for p in sys.path if p),
        "POLAR_NATS": url,
        "POLAR_DATA": str(tmp_path),
        "POLAR_SECRET": SECRET,
        "POLAR_READY_FILE": str(ready),
        **{f"POLAR_{name.upper()}": str(value) for name, value in options.items()},
    }
    program = f"from {package}.app import run; run()"
    log = (tmp_path / f"{ready.stem}.log").open("wb")
    with log, subprocess.Popen([sys.executable, "-c", program], env=env, stdout=log, stderr=log) as started:
        try:
            for _ in range(400):
                if ready.exists() or started.poll() is not None:
                    break
                time.sleep(0.05)
            assert started.poll() is None and ready.exists(), (tmp_path / f"{ready.stem}.log").read_text()[-2000:]
            yield started
        finally:
            if started.poll() is None:
                started.kill()


def running(marker: str) -> list[int]:
    """Processes of this host with `marker` in their command line."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                line = Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in line:
                found.append(int(entry))
    return found


async def there(marker: str, timeout: float = 10.0) -> bool:
    """Whether one starts in time."""
    for _ in range(int(timeout / 0.05)):
        if running(marker):
            return True
        await asyncio.sleep(0.05)
    return False


async def gone(marker: str, timeout: float = 10.0) -> bool:
    """Whether all of them end in time."""
    for _ in range(int(timeout / 0.05)):
        if not running(marker):
            return True
        await asyncio.sleep(0.05)
    return False


def hostile_archive() -> bytes:
    """A tar that would write outside the working directory."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("../../outside.txt")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    return out.getvalue()


class Unavailable(LocalRuntime):
    """A host without the image."""

    async def start(self) -> None:
        raise RuntimeUnavailable("no such image", "image")


class Broken(Harness):
    """A user's adapter with a defect."""

    name = "broken"
    version = "0"

    def launch(self, ctx: LaunchContext) -> Launch:
        raise KeyError("boom")


class Skilled(Harness):
    """Shows the skills it was given."""

    name = "skilled"
    version = "0"
    known_args = frozenset({"skills"})

    def launch(self, ctx: LaunchContext) -> Launch:
        here = f"{ctx.home}/.skilled"
        line = f"cat {here}/*/SKILL.md {here}/*/more/*"
        return Launch(("/bin/sh", "-c", line), folders=skills(ctx.args, here))
