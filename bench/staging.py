"""Staged against serial: the engine's busy share, sessions per hour, and what a second gateway adds (DESIGN §11).

Real gateways on a real log; runtimes and engine are simulated by sleeping, with times drawn per session from one seed,
so that both ways run the same sessions. Preparing and testing are log-normal (sigma 0.5), model calls and the harness's
own thinking between them exponential. Busy is an engine place in use; shares are taken between the start of session
2 × slots and the start of the last one, where neither filling up nor running dry counts. Serial is one worker per
slot that does all stages of a session before it takes the next.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from bench.load import Result, arguments, report
from polar_common.bus import Bus, Worker
from polar_common.events import SessionAccepted, SessionQueued
from polar_common.ids import session_id, task_id
from polar_common.nats_server import NatsConfig, NatsServer, free_port
from polar_common.subjects import ANY_ARTIFACTS
from polar_common.task_spec import HarnessSpec, TaskSpec
from polar_common.tasks import spawn
from polar_common.topology import Topology, apply, work_consumer
from polar_gateway.handlers import Gateway
from polar_gateway.house import make_house
from polar_gateway.settings import GatewaySettings
from polar_runtime import ExecResult, OnOutput, Runtime, RuntimeStats
from polar_runtime.gitstore import Change, Node


@dataclass(frozen=True)
class Mix:
    """Mean seconds per session. `calls` model calls, each followed by thinking."""

    init_s: float = 0.6
    engine_s: float = 0.1
    think_s: float = 0.1
    test_s: float = 0.4
    calls: int = 6


@dataclass(frozen=True)
class Draw:
    """One session's times."""

    init_s: float
    calls: tuple[tuple[float, float], ...]
    """Engine and thinking time of each."""
    test_s: float


def draw(mix: Mix, seed: int, index: int) -> Draw:
    """The same for the same seed and index."""
    rng = random.Random(f"{seed}/{index}")

    def lognormal(mean: float) -> float:
        return mean * rng.lognormvariate(-0.125, 0.5)

    calls = tuple(
        (rng.expovariate(1 / mix.engine_s) if mix.engine_s else 0.0, rng.expovariate(1 / mix.think_s))
        for _ in range(mix.calls)
    )
    return Draw(lognormal(mix.init_s), calls, lognormal(mix.test_s))


@dataclass
class Engine:
    """`places` model calls at once; remembers when how many were in use."""

    places: int
    used: int = 0
    steps: list[tuple[float, int]] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    """When sessions began to run."""

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.places)

    async def call(self, seconds: float) -> None:
        async with self._free:
            self._step(1)
            await asyncio.sleep(seconds)
            self._step(-1)

    def _step(self, by: int) -> None:
        self.used += by
        self.steps.append((time.monotonic(), self.used))

    def share(self, begin: float, end: float) -> float:
        """Of the places, how many were in use on average."""
        busy, at, used = 0.0, begin, 0
        for when, now_used in self.steps:
            if when > begin:
                busy += used * (min(when, end) - max(at, begin)) if min(when, end) > at else 0.0
                at = min(when, end)
            used = now_used
        return busy / (end - begin) / self.places


class Simulated(Runtime):
    """Sleeps as long as the real thing would take."""

    draws: Mapping[str, Draw]
    engine: Engine

    @property
    def workdir(self) -> str:
        return "/workspace"

    @property
    def home(self) -> str:
        return "/home/agent"

    @property
    def proxy_base(self) -> str:
        return "http://127.0.0.1:1"

    @property
    def isolation(self) -> str:
        return "none"

    def _draw(self) -> Draw:
        return self.draws[self.spec.label]

    async def start(self) -> None:
        await asyncio.sleep(self._draw().init_s)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        on_output: OnOutput | None = None,
        stdin: bytes | None = None,
        proxy: bool = False,
    ) -> ExecResult:
        began = time.monotonic()
        self.engine.started.append(began)
        for engine_s, think_s in self._draw().calls:
            if engine_s:
                await self.engine.call(engine_s)
            await asyncio.sleep(think_s)
        return ExecResult(0, False, "", 0, time.monotonic() - began, b"done")

    async def upload(self, data: bytes | Mapping[str, bytes], dest: str | None = None) -> None:
        return

    async def download(self, paths: Sequence[str], *, max_bytes: int = 64 << 20) -> dict[str, bytes]:
        return {}

    async def cancel(self) -> None:
        return

    async def stop(self) -> None:
        return

    async def stats(self) -> RuntimeStats:
        return RuntimeStats()

    async def snapshot(self) -> str:
        return "base"

    async def diff(self, base: str | None = None) -> bytes:
        await asyncio.sleep(self._draw().test_s)
        return b""

    def _git_dir(self) -> Path:
        return Path("/nonexistent")

    async def _tree(self) -> list[Node]:
        return []

    async def _apply(self, changes: Sequence[Change]) -> None:
        return


@dataclass(frozen=True)
class Plan:
    """One run: `gateways` of them, each with `slots` RUNNING places; `staged` or one worker per slot."""

    mix: Mix
    seed: int
    sessions: int
    slots: int
    engine_places: int
    staged: bool = True
    gateways: int = 1


@dataclass(frozen=True)
class Run:
    engine: Engine
    draws: list[Draw]
    wall_s: float

    def share(self, slots: int) -> float:
        started = sorted(self.engine.started)
        return self.engine.share(started[min(2 * slots, len(started) // 3)], started[-1])

    def rate(self) -> float:
        """Sessions per second, from the start of the first tenth to that of the last."""
        started = sorted(self.engine.started)
        tenth = len(started) // 10
        return (len(started) - 2 * tenth - 1) / (started[-1 - tenth] - started[tenth])


async def run(plan: Plan, bus: Bus, name: str) -> Run:
    """Release all sessions at once and wait for the last one's artifacts."""
    task = task_id("s1", "bench", name)
    sessions = [session_id(task, i) for i in range(plan.sessions)]
    draws = [draw(plan.mix, plan.seed, i) for i in range(plan.sessions)]
    engine = Engine(plan.engine_places)
    labelled = {f"{session}.1": one for session, one in zip(sessions, draws, strict=True)}
    kind = type("Scripted", (Simulated,), {"draws": labelled, "engine": engine})
    await _release(bus, task, sessions)
    stop, begin = asyncio.Event(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as directory:
        working = [spawn(_gateway(plan, bus, Path(directory), kind, stop, n), name="g") for n in range(plan.gateways)]
        try:
            await _finished(bus, task, plan.sessions)
            wall = time.monotonic() - begin
        finally:
            stop.set()
            await asyncio.gather(*working)
    return Run(engine, draws, wall)


async def _gateway(plan: Plan, bus: Bus, data: Path, kind: type[Runtime], stop: asyncio.Event, number: int) -> None:
    many = plan.slots if not plan.staged else max(plan.slots, 2)
    settings = GatewaySettings(
        data=data, secret=SecretStr("bench"), gateway_slots=plan.slots, gateway_init_slots=many,
        gateway_ready=plan.slots, gateway_postrun_slots=many,
    )  # fmt: skip
    house = make_house(settings, bus, f"bench-{number}")
    house.make_runtime = lambda spec: kind(spec)
    gateway = Gateway(house)

    def slots() -> int:
        return worker.active + house.pools.init.free if plan.staged else plan.slots

    worker = Worker(bus, work_consumer("local"), gateway.on_queued, slots)
    house.pools.init.on_free = worker.wake
    await worker.run(stop)


async def _release(bus: Bus, task: str, sessions: Sequence[str]) -> None:
    harness = HarnessSpec(name="command", args={"script": "true"})
    spec = TaskSpec(id=task, instruction="sleep", harness=harness, samples=len(sessions))
    about: dict[str, Any] = {"run": "bench", "task": task, "work_class": "local"}
    for start in range(0, len(sessions), 100):
        some = list(enumerate(sessions))[start : start + 100]
        await bus.batch([SessionAccepted(session=s, attempt=0, index=i, **about) for i, s in some])
        await bus.batch([SessionQueued(session=s, attempt=1, spec=spec, **about) for _, s in some])


async def _finished(bus: Bus, task: str, count: int) -> None:
    while True:
        info = await bus.js.stream_info("POLAR_EVENTS_s1", subjects_filter=ANY_ARTIFACTS.replace("*", "s1", 1))
        if sum(1 for subject in info.state.subjects or {} if f".{task}-" in subject) >= count:
            return
        await asyncio.sleep(0.1)


def bound(one: Run, plan: Plan) -> float:
    """The busy share that slots and mean times allow, at most 1."""
    engine = sum(e for d in one.draws for e, _ in d.calls)
    running = sum(e + t for d in one.draws for e, t in d.calls)
    many = max(plan.slots, 2)
    by_stage = [plan.slots / running, many / sum(d.init_s for d in one.draws), many / sum(d.test_s for d in one.draws)]
    return min(1.0, min(by_stage) * engine / plan.engine_places)


def plot(runs: Mapping[str, Run], places: int, path: Path) -> None:
    """Engine places in use over time, one curve a run, smoothed over half a second, as SVG."""
    width, height, colours = 900, 300, ("#1f6feb", "#d29922")
    longest = max(r.engine.steps[-1][0] - r.engine.steps[0][0] for r in runs.values())
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-50 -20 {width + 70} {height + 70}" font-size="13">']
    parts.append(f'<path d="M0 0V{height}H{width}" fill="none" stroke="#888"/>')
    parts.append(f'<text x="{width / 2}" y="{height + 35}">seconds (0 to {longest:.0f})</text>')
    parts.append(f'<text x="-45" y="5">{places}</text><text x="-45" y="{height}">0</text>')
    for number, (name, one) in enumerate(runs.items()):
        begin, points, step = one.engine.steps[0][0], [], 0.5
        for i in range(int((one.engine.steps[-1][0] - begin) / step)):
            share = one.engine.share(begin + i * step, begin + (i + 1) * step)
            points.append(f"{(i + 0.5) * step / longest * width:.1f},{height * (1 - share):.1f}")
        colour = colours[number % len(colours)]
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{width - 120}" y="{15 + 18 * number}" fill="{colour}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


async def measure(url: str, seed: int, sessions: int, drawing: str) -> list[Result]:
    bus = await Bus.connect(url, "bench/staging")
    await apply(bus.js, Topology())
    plan = Plan(Mix(), seed, sessions, slots=8, engine_places=8)
    staged = await run(plan, bus, "staged")
    serial = await run(Plan(Mix(), seed, sessions, 8, 8, staged=False), bus, "serial")
    free = Mix(init_s=0.1, engine_s=0, think_s=0.1, test_s=0.05)
    alone, pair = [await run(Plan(free, seed, sessions, 4, 1, gateways=n), bus, f"free-{n}") for n in (1, 2)]
    await bus.close()
    if drawing:
        plot({"staged": staged, "serial": serial}, plan.engine_places, Path(drawing))
    share, serial_share, limit = staged.share(8), serial.share(8), bound(staged, plan)
    hour = [3600 * sessions / r.wall_s for r in (staged, serial)]
    per_s = [r.rate() for r in (alone, pair)]
    return [
        Result("busy_share", share, "of engine places", limit, share / limit, f"seed {seed}, {sessions} sessions"),
        Result("busy_share_bound", limit, "of engine places"),
        Result("busy_share_serial", serial_share, "of engine places", limit, serial_share / limit, "same seed"),
        Result("sessions_per_hour", hour[0], "1/h", hour[1], hour[0] / hour[1], "baseline: serial"),
        Result("gateways_2_ratio", per_s[1] / per_s[0], "x", 1.0, per_s[1] / per_s[0], "engine-free, one machine"),
    ]


def main(argv: list[str] | None = None) -> None:
    drawing, rest = argparse.ArgumentParser(add_help=False), list(sys.argv[1:] if argv is None else argv)
    drawing.add_argument("--plot", default="", help="write the curves there, as SVG")
    plotted, rest = drawing.parse_known_args(rest)
    options = arguments(__doc__ or "", rest, sessions=200, seed=1)
    sessions = 80 if options.short else options.sessions
    with tempfile.TemporaryDirectory(prefix="polar-bench-nats-") as name:
        server = NatsServer(NatsConfig(data=Path(name) / "js", port=free_port(), name="bench"))
        server.start()
        try:
            report(asyncio.run(measure(server.url, options.seed, sessions, plotted.plot)), options.json)
        finally:
            server.stop("kill")


if __name__ == "__main__":
    main()
