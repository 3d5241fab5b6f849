"""A whole house for end-to-end tests: `polar up` as a user starts it, on free ports, in a directory of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polar_common.house.layout import House, process_started

POLAR = [sys.executable, "-m", "polar_common.cli"]


@dataclass
class Live:
    """A running house; `polar(...)` runs a command on it and returns its JSON lines."""

    data: Path
    process: subprocess.Popen[bytes]

    def polar(self, *arguments: str, code: int = 0, timeout: float = 300) -> list[dict[str, Any]]:
        argv = [*POLAR, *arguments, "--data", str(self.data), "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}{self.logs()}"
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def sql(self, query: str) -> list[dict[str, Any]]:
        """Rows of a query; waits until the projection has caught up with what had been stored."""
        return self.polar("query", query)

    def children(self) -> dict[str, int]:
        labels = [json.loads(p.read_bytes()) for p in House(self.data).run.glob("*.pid")]
        return {told["name"]: told["pid"] for told in labels}

    def logs(self) -> str:
        tails = []
        for log in sorted(House(self.data).logs.glob("*.log")):
            bad = [x for x in log.read_text(errors="replace").splitlines() if '"level": "info"' not in x]
            tails.append(f"\n== {log.name}\n" + "\n".join(bad[-5:])[-1500:])
        return "".join(tails)

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(sig)
            self.process.wait(60)


def free_port() -> int:
    from polar_common.nats_server import free_port

    return free_port()


@contextlib.contextmanager
def running_house(data: Path, *options: str, timeout_s: float = 180) -> Iterator[Live]:
    """Start `polar up`, wait until it's ready, stop it at the end, and check that nothing of it is left."""
    ports = [
        x for name in ("ingest", "proxy", "analytics", "engine", "nats") for x in (f"--{name}-port", str(free_port()))
    ]
    log = data.parent / f"{data.name}-up.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*POLAR, "up", "--data", str(data), *ports, *options],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    live = Live(data, process)
    children: dict[str, int] = {}
    try:
        deadline = time.monotonic() + timeout_s
        while House(data).read() is None:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"polar up: {log.read_text(errors='replace')[-3000:]}{live.logs()}")
            time.sleep(0.1)
        children = live.children()
        yield live
    finally:
        live.stop()
    left = {name: pid for name, pid in children.items() if process_started(pid)}
    assert not left, f"left behind: {left}"
