"""Chaos: a whole house under `kill -9`, counted afterwards by `polar verify` and from journals of engine and harnesses.

Starts a house with the scripted engine and real harness processes, hands in sessions while random processes are killed
at random instants, waits until everything has ended, and counts. Lost, doubled: as LOG §10 says. Stuck: a session
without an end, a build or a closed group.

A long run is bounded in time by `--minutes` and goes on where it was by `--totals FILE`: each run adds its counts
there, and the next, with another seed, does what is left of `--kills` and `--sessions`.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import orjson

from bench.chaos_count import Count, count
from bench.chaos_house import Callbacks, ChaosHouse, running
from bench.load import Result, report
from polar_common.bus import Bus
from polar_common.house import find_house
from polar_common.ids import FIRST_SEGMENT, sessions_of, task_id
from polar_common.verify import LiveSource, Options, Report, audit

__all__ = ["ChaosOptions", "Outcome", "main", "run_chaos"]

HARNESS = Path(__file__).with_name("chaos_harness.py")
SAMPLES = 4
_SUMMED = ("kills", "sessions", "events", "lost", "doubled", "stuck", "verify_findings", "seconds")
RUN = "chaos"


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """`pause_s`: mean time between two kills. `settle_s`: how long nothing may happen after the last kill until what
    hasn't ended counts as stuck. `kill_s`: no more kills after so long; then fewer sessions are handed in, too."""

    kills: int = 40
    sessions: int = 80
    seed: int = 1
    pause_s: float = 2.0
    settle_s: float = 180.0
    lease_s: float = 4.0
    slots: int = 4
    with_up: bool = True
    kill_s: float = math.inf


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    options: ChaosOptions
    kills: dict[str, int]
    counted: Count
    verified: Report
    seconds: float = 0.0
    settled_s: float = 0.0
    """From the last kill to the last end."""
    say: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        found = self.counted
        return self.verified.ok and not (found.lost or found.doubled or found.stuck)

    def results(self) -> list[Result]:
        found, facts = self.counted, self.counted.facts
        return [
            Result("kills", sum(self.kills.values()), "1", note=", ".join(f"{k} {v}" for k, v in self.kills.items())),
            Result("lost", len(found.lost), "1", note="; ".join(found.lost[:3])),
            Result("doubled", len(found.doubled), "1", note="; ".join(found.doubled[:3])),
            Result("stuck", len(found.stuck), "1", note="; ".join(found.stuck[:3])),
            Result("sessions", facts["sessions"], "1"),
            Result("events", facts["events"], "1"),
            Result("captured", facts["captured"], "1", float(facts["engine_answers"])),
            Result("attempts", self.verified.totals["attempts"], "1", float(facts["sessions"])),
            Result("callback_repeats", facts["callback_repeats"], "1"),
            Result("verify_findings", sum(self.verified.counts.values()), "1", note=str(self.verified.counts or "")),
            Result("recovery_s_max", round(max(found.recoveries_s, default=0.0), 1), "s", 2 * self.options.lease_s),
            Result("settled_s", round(self.settled_s, 1), "s"),
            Result("seconds", round(self.seconds, 1), "s"),
        ]


class _Work:
    """Hands in tasks in step with the kills, and knows when everything has ended."""

    def __init__(self, house: ChaosHouse, callback: str, options: ChaosOptions) -> None:
        self._house = house
        self._callback = callback
        self._options = options
        self.tasks: dict[str, list[str]] = {}
        self._wanted = -(-options.sessions // SAMPLES)

    def hand_in(self, until: float) -> None:
        """Submit tasks up to this share of all. What isn't acknowledged is submitted again: it's the same task."""
        while len(self.tasks) < min(self._wanted, int(self._wanted * until) + 1):
            number = len(self.tasks)
            body = {"run": RUN, "tasks": [self._task(number)]}
            if self._post(body):
                task = task_id(FIRST_SEGMENT, RUN, f"t{number}")
                self.tasks[task] = sessions_of(task, SAMPLES)

    def _post(self, body: dict[str, object]) -> bool:
        try:
            found = find_house(self._house.data)
            answer = httpx.post(f"{found.ingest}/v1/tasks", json=body, headers=found.headers, timeout=20)
        except (httpx.HTTPError, OSError, ValueError):
            time.sleep(0.3)
            return False
        if answer.status_code >= 500 or answer.status_code == 429:
            time.sleep(0.3)
            return False
        answer.raise_for_status()
        return True

    def _task(self, number: int) -> dict[str, object]:
        argv = [sys.executable, str(HARNESS), str(self._house.journals), str(2 + number % 4)]
        return {
            "id": f"t{number}",
            "instruction": f"Task {number}: write hello.txt",
            "samples": SAMPLES,
            "harness": {"name": "command", "args": {"argv": argv}},
            "evaluator": {"kind": "answer", "args": {"expected": ["hello"]}},
            "limits": {
                "session_s": 900, "attempt_s": 120, "attempt_min_s": 1, "attempts": 20, "postrun_reserve_s": 10,
                "group_s": 3600,
            },
            "callback": self._callback,
        }  # fmt: skip


async def _settled(house: ChaosHouse, work: _Work, callbacks: Callbacks, settle_s: float) -> None:
    """Wait until every group is closed and told, as long as one is within `settle_s`."""
    deadline, before = time.monotonic() + settle_s, 0
    while time.monotonic() < deadline:
        told = sum(f"{task}.closed" in callbacks.bodies for task in work.tasks)
        if told == len(work.tasks) and await _projected(house, len(work.tasks)):
            return
        if told > before:
            deadline, before = time.monotonic() + settle_s, told
        await asyncio.sleep(0.5)


async def _projected(house: ChaosHouse, tasks: int) -> bool:
    """Whether the trace stream has every group's end."""
    bus = await _bus(house)
    try:
        found = await bus.read("POLAR_TRACES", ["polar.traces.*.live.*.closed"])
    finally:
        await bus.close()
    return len(found) >= tasks


async def _bus(house: ChaosHouse) -> Bus:
    return await Bus.connect(find_house(house.data).nats, "chaos")


def run_chaos(options: ChaosOptions, directory: Path, say: bool = False) -> Outcome:
    """One run. Everything it starts is ended."""
    rng = random.Random(options.seed)
    house = ChaosHouse(directory, lease_s=options.lease_s, slots=options.slots)
    callbacks = Callbacks()
    began = time.monotonic()
    try:
        with running(house):
            work = _Work(house, callbacks.url, options)
            done = 0
            while done < options.kills and time.monotonic() - began < options.kill_s:
                work.hand_in((done + 2) / options.kills)
                time.sleep(rng.expovariate(1 / options.pause_s))
                part = house.kill_one(rng, with_up=options.with_up)
                done += bool(part)
                if say and part:
                    told = f"{len(callbacks.bodies)} of {len(work.tasks)} groups told"
                    at = f"[{time.monotonic() - began:6.1f} s]"
                    print(f"{at} kill {done} of {options.kills}: {part}; {told}", file=sys.stderr, flush=True)
            last = time.monotonic()
            if done >= options.kills:
                work.hand_in(1.0)
            counted, verified, settled = asyncio.run(_counted(house, work, callbacks, options))
            return Outcome(options, dict(house.kills), counted, verified, time.monotonic() - began, settled - last)
    finally:
        callbacks.close()


async def _counted(
    house: ChaosHouse, work: _Work, callbacks: Callbacks, options: ChaosOptions
) -> tuple[Count, Report, float]:
    await _settled(house, work, callbacks, options.settle_s)
    settled = time.monotonic()
    bus = await _bus(house)
    try:
        counted = await count(bus, work.tasks, callbacks.bodies, house.journals, house.engine_journal, house.killed_at)
        verified = await audit(LiveSource(bus), Options(settled=True))
    finally:
        await bus.close()
    return counted, verified, settled


def rest_of(options: ChaosOptions, totals: Path | None) -> tuple[ChaosOptions, dict[str, int]]:
    """What earlier runs have left of a run's kills and sessions, under a seed of its own; and what they counted."""
    lines = totals.read_text().splitlines() if totals is not None and totals.exists() else []
    counted: Counter[str] = Counter()
    for line in lines:
        counted.update(orjson.loads(line))
    kills = max(0, options.kills - counted["kills"])
    share = -(-kills * options.sessions // max(1, options.kills))
    sessions = max(share, options.sessions - counted["sessions"])
    left = replace(options, kills=kills, sessions=sessions, seed=options.seed + len(lines))
    return left, dict(counted)


def _add(totals: Path, outcome: Outcome) -> None:
    found = {r.name: int(r.value) for r in outcome.results() if r.name in _SUMMED}
    with totals.open("a") as file:
        file.write(orjson.dumps(found).decode() + "\n")


def main(argv: list[str] | None = None) -> None:
    """Print the figures. With `--keep DIR`, the house's directory stays there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--sessions", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between two kills")
    parser.add_argument("--settle", type=float, default=180.0, help="seconds without progress after which one is stuck")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no more kills after so many")
    parser.add_argument("--totals", type=Path, help="a file to which each run adds its counts, and does what is left")
    parser.add_argument("--short", action="store_true", help="10 kills")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", default="")
    given = parser.parse_args(argv)
    kills, sessions = (10, 20) if given.short else (given.kills, given.sessions)
    wanted = ChaosOptions(
        kills, sessions, given.seed, given.pause, given.settle, slots=given.slots, kill_s=given.minutes * 60
    )
    options, _ = rest_of(wanted, given.totals)
    if not options.kills:
        print(f"{given.totals}: {kills} kills are done", file=sys.stderr)
    else:
        _once(options, given)
    if given.totals is not None:
        counted = rest_of(wanted, given.totals)[1]
        report([Result(f"all_{name}", counted.get(name, 0), "1") for name in _SUMMED], given.json)


def _once(options: ChaosOptions, given: argparse.Namespace) -> None:
    directory = Path(given.keep or tempfile.mkdtemp(prefix="polar-chaos-"))
    try:
        outcome = run_chaos(options, directory, say=not given.json)
        report(outcome.results(), given.json)
        for f in outcome.verified.findings:
            print(orjson.dumps({"check": f.check, "where": f.where, "detail": f.detail}).decode(), file=sys.stderr)
        if given.totals is not None:
            _add(given.totals, outcome)
    finally:
        if not given.keep:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
