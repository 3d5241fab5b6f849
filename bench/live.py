"""A thousand live sessions on one machine: a whole house whose harnesses call the model once and then sleep.

All sleep until the same moment, which is far enough away for every one of them to have started; so all are live at
once, and all end at once. Memory is what the house's processes and all below them hold: their proportional share of
resident pages (PSS), read once when the most are live. `idle_cpu` is what all of them take of one core meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from bench.chaos_house import ChaosHouse
from bench.load import Result, arguments, cpu_seconds, report

_ASK = """python3 -c '
import json, os, urllib.request as u
body = {"model": "policy", "messages": [{"role": "user", "content": "Say it"}]}
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), head)).read()
' && while [ "$(date +%s)" -lt UNTIL ]; do sleep $((UNTIL - $(date +%s) + 1)); done; echo slept > slept.txt
"""
_GROUP = 250
_SETTINGS = {"POLAR_GATEWAY_ISOLATION": "auto", "POLAR_GATEWAY_INIT_SLOTS": "4", "POLAR_ENGINE_SCRIPT_TOKEN_MS": "0"}


@dataclass
class Seen:
    """What the run showed. Bytes, seconds."""

    rows: list[dict[str, Any]]
    live: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    """By what it is: `gateway`, `sessions` (everything below the gateway), `others` of the house."""
    idle_cpu: float = 0.0
    """Of one core."""
    idle_gateway: float = 0.0
    wall_s: float = 0.0


def tree(root: int) -> list[int]:
    """`root` and everything below it."""
    found = [root]
    for pid in found:
        for task in _listed(f"/proc/{pid}/task"):
            try:
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
            except OSError:
                continue
    return found


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def pss(pids: list[int]) -> int:
    """Bytes: resident pages, shared ones divided among those who share them."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
    return total


def _cpu(pids: list[int]) -> dict[int, float]:
    found = {}
    for pid in pids:
        try:
            found[pid] = cpu_seconds(pid)
        except (OSError, ValueError):
            continue
    return found


def _live(pids: list[int]) -> int:
    """Sessions whose script sleeps."""
    found = 0
    for pid in pids:
        try:
            found += Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0")
        except OSError:
            continue
    return found


def watch(house: ChaosHouse, gateway: int, sessions: int, until: float, running: subprocess.Popen[bytes]) -> Seen:
    """Until all are live, or 20 seconds before they end; then measure."""
    seen = Seen([])
    while time.time() < until - 20 and running.poll() is None:
        seen.live = max(seen.live, _live(tree(gateway)))
        if seen.live >= sessions:
            break
        time.sleep(2)
    below = tree(gateway)
    others = [pid for name, pid in house.live() if name != "gateway"]
    seen.memory = {"gateway": pss([gateway]), "sessions": pss(below[1:]), "others": pss(others)}
    before, began = _cpu([*below, *others]), time.monotonic()
    time.sleep(min(10.0, max(1.0, until - 5 - time.time())))
    after, took = _cpu(list(before)), time.monotonic() - began
    used = {pid: after[pid] - before[pid] for pid in after}
    seen.idle_cpu, seen.idle_gateway = sum(used.values()) / took, used.get(gateway, 0.0) / took
    return seen


def measure(directory: Path, sessions: int, seconds: int) -> Seen:
    house = ChaosHouse(directory, lease_s=30.0, slots=sessions, env=_SETTINGS)
    house.start()
    try:
        gateway = dict(house.live())["gateway"]
        until = int(time.time()) + seconds
        limits = {"attempt_s": seconds * 4, "session_s": seconds * 8, "queue_s": seconds * 4, "attempts": 1}
        harness = {"name": "command", "args": {"script": _ASK.replace("UNTIL", str(until))}}
        evaluator = {"kind": "command", "command": "test -s slept.txt"}
        shared = {"instruction": "sleep", "harness": harness, "evaluator": evaluator, "limits": limits}
        counts = [min(_GROUP, sessions - start) for start in range(0, sessions, _GROUP)]
        tasks = [{"id": f"sleep-{i}", "samples": count, **shared} for i, count in enumerate(counts)]
        file = directory / "tasks.yaml"
        file.write_bytes(orjson.dumps({"tasks": tasks}))
        argv = [sys.executable, "-m", "polar_common.cli", "run", str(file), "--data", str(house.data), "--json"]
        began = time.monotonic()
        with (directory / "rows").open("wb") as rows:
            running = subprocess.Popen([*argv, "--timeout", str(seconds * 4)], stdout=rows)
            seen = watch(house, gateway, sessions, until, running)
            running.wait()
        seen.wall_s = time.monotonic() - began
        lines = (directory / "rows").read_bytes().splitlines()
        seen.rows = [orjson.loads(line) for line in lines if line.startswith(b"{")]
        return seen
    finally:
        house.stop()


def results(seen: Seen, sessions: int) -> list[Result]:
    mib = {name: size / (1 << 20) for name, size in seen.memory.items()}
    total, passed = sum(mib.values()), sum(row.get("outcomes", {}).get("passed", 0) for row in seen.rows)
    traces = sum(row.get("traces", 0) for row in seen.rows)
    return [
        Result("live", seen.live, "sessions at once", sessions, seen.live / sessions),
        Result("passed", passed, "sessions", sessions, passed / sessions),
        Result("traces", traces, "", sessions, traces / sessions),
        Result("memory", total, "MiB", note="PSS, " + ", ".join(f"{name} {size:.0f}" for name, size in mib.items())),
        Result("memory_per_session", mib["sessions"] / max(1, seen.live), "MiB"),
        Result("idle_cpu", seen.idle_cpu, "cores", note=f"the gateway alone {seen.idle_gateway:.2f}"),
        Result("wall", seen.wall_s, "s"),
    ]


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__ or "", argv, sessions=1000, seconds=420)
    sessions, seconds = (50, 60) if options.short else (options.sessions, options.seconds)
    with tempfile.TemporaryDirectory(prefix="polar-live-") as name:
        report(results(measure(Path(name), sessions, seconds), sessions), options.json)


if __name__ == "__main__":
    main()
