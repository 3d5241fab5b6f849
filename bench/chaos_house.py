"""The chaos run's house: started as a user starts it, and killed piece by piece."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import orjson

from polar_common.house.layout import House, process_started
from polar_common.nats_server import free_port

__all__ = ["Callbacks", "ChaosHouse", "running"]

PARTS = ("nats", "engine", "proxy", "ingest", "reconstructor", "evaluator", "analytics", "gateway")
_UP_S = 240.0


class Callbacks:
    """A receiver that counts what it is told: key → bodies."""

    def __init__(self) -> None:
        self.bodies: dict[str, Counter[bytes]] = {}
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", "0")))
                with lock:
                    outer.bodies.setdefault(self.headers.get("idempotency-key", ""), Counter())[body] += 1
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/closed"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class ChaosHouse:
    """A house in a directory of its own. `kills` counts what was killed, by part."""

    def __init__(self, directory: Path, *, lease_s: float, slots: int, env: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.data = directory / "house"
        self.house = House(self.data)
        self.journals = directory / "journals"
        self.engine_journal = directory / "engine.jsonl"
        self.journals.mkdir(parents=True)
        self.kills: Counter[str] = Counter()
        self.killed_at: dict[int, float] = {}
        """Process id → Unix seconds."""
        self._ports = {name: free_port() for name in ("ingest", "proxy", "analytics", "engine", "nats")}
        settings = {
            "POLAR_ENGINE_SCRIPT": "file",
            "POLAR_ENGINE_SCRIPT_TOKEN_MS": "12",
            "POLAR_ENGINE_JOURNAL": str(self.engine_journal),
            "POLAR_GATEWAY_ISOLATION": "none",
            "POLAR_GATEWAY_REAP_S": "5",
            "POLAR_EVALUATOR_REAP_S": "5",
            "POLAR_INGEST_EXITED_PATIENCE_S": "5",
            **(env or {}),
        }
        self._argv = [sys.executable, "-m", "polar_common.cli", "up", "--data", str(self.data), "--model", "tiny"]
        self._argv += ["--lease", str(lease_s), "--slots", str(slots)]
        self._argv += [x for name, port in self._ports.items() for x in (f"--{name}-port", str(port))]
        self._argv += [x for item in settings.items() for x in ("--setting", "=".join(item))]
        self._up: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or start it again after it was killed; returns when it is ready."""
        with (self.directory / "up.log").open("ab") as log:
            self._up = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + _UP_S
        while (found := self.house.read()) is None or found.pid != self._up.pid:
            if self._up.poll() is not None or time.monotonic() > deadline:
                tail = (self.directory / "up.log").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"the house didn't start: {tail}")
            time.sleep(0.1)

    def stop(self) -> None:
        if self._up is not None and self._up.poll() is None:
            self._up.terminate()
            try:
                self._up.wait(60)
            except subprocess.TimeoutExpired:
                self._up.kill()
                self._up.wait()

    def live(self) -> Iterator[tuple[str, int]]:
        """Parts that run, by name and process id: services by their labels, harnesses by their journals."""
        for part in PARTS:
            with suppress(OSError, orjson.JSONDecodeError):
                told = orjson.loads((self.house.run / f"{part}.pid").read_bytes())
                if process_started(told["pid"]) == told["started"]:
                    yield part, told["pid"]
        for journal in self.journals.glob("*.jsonl"):
            pid = int(journal.name.split(".")[-2])
            with suppress(OSError):
                if _runs(pid):
                    yield "harness", pid

    def kill_one(self, rng: random.Random, *, with_up: bool) -> str:
        """Kill a random part with SIGKILL; what it was, "" if nothing could be killed."""
        if with_up and self._up is not None and rng.random() < 0.02:
            self._up.kill()
            self._up.wait()
            self.kills["up"] += 1
            self.start()
            return "up"
        by_part: dict[str, list[int]] = {}
        for part, pid in self.live():
            by_part.setdefault(part, []).append(pid)
        if not by_part:
            return ""
        part = rng.choice(sorted(by_part))
        pid = rng.choice(sorted(by_part[part]))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return ""
        self.kills[part] += 1
        self.killed_at[pid] = time.time()
        return part


def _runs(pid: int) -> bool:
    """Whether a process is one of our harnesses: a process id may have been given to somebody else."""
    return b"chaos_harness.py" in Path(f"/proc/{pid}/cmdline").read_bytes()


@contextmanager
def running(house: ChaosHouse) -> Iterator[ChaosHouse]:
    try:
        house.start()
        yield house
    finally:
        house.stop()
