"""What benchmarks share: processes with their CPU time, a cheap HTTP client, and how results are printed."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httptools
import orjson
from rich.console import Console
from rich.table import Table

from polar_common.keys import SessionKey, sign

__all__ = [
    "Answer",
    "Client",
    "Result",
    "Spawned",
    "arguments",
    "bench_key",
    "chat_path",
    "cpu_seconds",
    "median",
    "report",
    "resident_mb",
]


@dataclass(frozen=True)
class Result:
    """One line: `baseline` and `ratio` are None where there is nothing to compare with."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    note: str = ""


def arguments(doc: str, argv: list[str] | None, **defaults: int) -> argparse.Namespace:
    """`--json`, `--short`, and an integer option per keyword."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--short", action="store_true", help="fewer repetitions")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser.parse_args(argv)


def report(results: Sequence[Result], as_json: bool) -> None:
    """To standard output."""
    if as_json:
        for r in results:
            line = {"name": r.name, "value": r.value, "unit": r.unit, "baseline": r.baseline, "ratio": r.ratio}
            print(orjson.dumps(line | ({"note": r.note} if r.note else {})).decode())
        return
    table = Table("name", "value", "unit", "baseline", "ratio", "note")
    for r in results:
        shown = [f"{v:.4g}" if v is not None else "" for v in (r.value, r.baseline, r.ratio)]
        table.add_row(r.name, shown[0], r.unit, shown[1], shown[2], r.note)
    Console().print(table)


def bench_key(task: str) -> SessionKey:
    """The key of a benchmark's session, the first of `task`, for two hours."""
    return SessionKey(
        session=f"{task}-0", task=task, run="bench", attempt=1, model="policy", expires=int(time.time()) + 7200
    )


def chat_path(key: SessionKey, secret: str) -> str:
    """Where OpenAI Chat is spoken with that key."""
    return f"/s/{sign(key, secret.encode())}/v1/chat/completions"


def resident_mb(pid: int) -> float:
    """Of a process, in megabytes of 10^6 bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"{pid} has no resident memory")


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else float("nan")


def cpu_seconds(pid: int) -> float:
    """User and system time of all of a process's threads, ended ones excluded."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


class Spawned:
    """A process that prints a port (or writes a ready file) and is ended with the block."""

    def __init__(self, command: Sequence[str], *, env: dict[str, str] | None = None, ready: Path | None = None) -> None:
        self._ready = ready
        self.process = subprocess.Popen(
            command, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE if ready is None else subprocess.DEVNULL
        )
        self.port = self._wait()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _wait(self) -> int:
        if self._ready is None:
            assert self.process.stdout is not None
            return int(self.process.stdout.readline())
        deadline = time.monotonic() + 60
        while not self._ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{self.process.args!r} didn't start")
            time.sleep(0.05)
        return int(orjson.loads(self._ready.read_bytes())["port"])

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Answer:
    """One answer. `first_s`: until the first body byte; `whole_s`: until the last."""

    status: int
    body: bytes
    first_s: float
    whole_s: float


class Client(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._parser: Any = None
        self._done: asyncio.Future[None] | None = None
        self._body: list[bytes] = []
        self._first = 0.0

    @classmethod
    async def connect(cls, port: int) -> Client:
        _, made = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self._body:
            self._first = time.perf_counter()
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def post(self, path: str, body: bytes) -> Answer:
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._body = []
        start = time.perf_counter()
        self._transport.write(
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (path.encode(), len(body), body)
        )
        await self._done
        end = time.perf_counter()
        return Answer(self._parser.get_status_code(), b"".join(self._body), self._first - start, end - start)

    def close(self) -> None:
        self._transport.close()
