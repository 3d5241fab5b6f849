"""The proxy against a fake engine: CPU per call, added latency, first token, requests per second (DESIGN §11).

A continued call has a prompt of about 512 ids and 32 sampled ones; every call is captured on a log that syncs before
it acknowledges. CPU is user + system time of all threads of the proxy's process.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop
from tokenizers import Tokenizer

from bench.load import Answer, Client, Result, Spawned, arguments, bench_key, chat_path, cpu_seconds, median, report
from bench.long_prompt import long_prompts
from bench.models import model_directory
from polar_common.bus import Bus
from polar_common.nats_server import NatsConfig, NatsServer, free_port
from polar_common.topology import Topology, apply

SECRET = "bench-secret"
PROMPT = 512
SLICES = 20
WORDS = (
    "read the file and edit it then run all tests again because one of them fails when a number is odd or the list "
    "has no value so that every line is checked before you write the result into a new place"
)


@dataclass
class House:
    """What runs while a benchmark does."""

    proxy: Spawned
    bare: Spawned
    engine: Spawned
    nats: NatsServer

    @property
    def nats_pid(self) -> int:
        assert self.nats.process is not None
        return self.nats.process.pid


@contextmanager
def house(model: Path, ttft_ms: float = 0, gap_ms: float = 0) -> Iterator[House]:
    """NATS (syncing always), the fake engine and one proxy, each a process of its own."""
    end = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id("<|im_end|>")
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as name:
        data = Path(name)
        nats = NatsServer(NatsConfig(data=data / "js", port=free_port(), name="bench"))
        nats.start()
        asyncio.run(_topology(nats.url))
        engine = Spawned(
            [
                sys.executable,
                "-m",
                "bench.fake_engine",
                "--ttft-ms",
                str(ttft_ms),
                "--gap-ms",
                str(gap_ms),
                "--end",
                str(end),
            ]
        )
        env = {
            "POLAR_DATA": str(data), "POLAR_NATS": nats.url, "POLAR_SECRET": SECRET, "POLAR_LOG_LEVEL": "warning",
            "POLAR_READY_FILE": str(data / "ready"), "POLAR_PROXY_MODEL": "policy", "POLAR_PROXY_MODEL_DIR": str(model),
            "POLAR_PROXY_ENGINES": f'["http://127.0.0.1:{engine.port}"]', "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1",
        }  # fmt: skip
        proxy = Spawned([sys.executable, "-c", "from polar_proxy.app import run; run()"], env=env, ready=data / "ready")
        floor = {"BARE_NATS": nats.url, "BARE_ENGINE": f"http://127.0.0.1:{engine.port}", "BARE_PROMPT": str(PROMPT)}
        bare = Spawned([sys.executable, "-m", "bench.bare_proxy"], env=floor)
        try:
            yield House(proxy, bare, engine, nats)
        finally:
            proxy.stop()
            bare.stop()
            engine.stop()
            nats.stop("kill")


async def _topology(url: str) -> None:
    bus = await Bus.connect(url, "bench")
    await apply(bus.js, Topology())
    await bus.close()


class Talks:
    """Conversations of one question and one follow-up; each in a session of its own."""

    def __init__(self, model: Path, count: int, stream: bool, name: str) -> None:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        words = WORDS.split()
        text = " ".join(words[(7 * i) % len(words)] for i in range(4 * PROMPT))
        ids = tokenizer.encode(text, add_special_tokens=False)
        self._system = text[: ids.offsets[PROMPT - 120][0]]
        self._stream = stream
        self._name = name
        self.paths: list[str] = []
        self.talks: list[list[dict[str, Any]]] = []
        for number in range(count):
            task = f"s1-{name}{number:08d}"
            self.paths.append(chat_path(bench_key(task), SECRET))
            self.talks.append(
                [
                    {"role": "system", "content": self._system},
                    {"role": "user", "content": f"Question {number}: what now?"},
                ]
            )

    def body(self, number: int) -> bytes:
        body = {"model": "policy", "messages": self.talks[number], "max_tokens": 64, "stream": self._stream}
        return orjson.dumps(body)

    def answered(self, number: int, answer: Answer) -> None:
        """Go on where the answer leaves off."""
        assert answer.status == 200, answer.body
        text = said(answer.body) if self._stream else orjson.loads(answer.body)["choices"][0]["message"]["content"]
        self.talks[number] += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on, please."}]


def said(body: bytes) -> str:
    """The text of a Chat stream."""
    assert body.endswith(b"data: [DONE]\n\n"), body[-200:]
    pieces = []
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in orjson.loads(line[6:])["choices"]:
                pieces.append(choice["delta"].get("content") or "")
    return "".join(pieces)


async def drive(port: int, talks: Talks, clients: int, *, go_on: bool = True) -> tuple[list[Answer], float]:
    """One call of every conversation, `clients` at a time. Returns the answers and the wall time in seconds."""
    numbers = iter(range(len(talks.talks)))
    answers: list[Answer | None] = [None] * len(talks.talks)

    async def one() -> None:
        client = await Client.connect(port)
        for number in numbers:
            answers[number] = await client.post(talks.paths[number], talks.body(number))
        client.close()

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(clients)))
    wall = time.perf_counter() - start
    found = [a for a in answers if a is not None]
    if go_on:
        for number, answer in enumerate(found):
            talks.answered(number, answer)
    return found, wall


async def direct(port: int, count: int, stream: bool) -> list[Answer]:
    """The same load straight to the engine, with the ids as the proxy would send them."""
    body = {
        "model": "policy", "token_ids": list(range(100, 100 + PROMPT)), "request_id": "x", "stream": stream,
        "return_token_ids": True, "sampling_params": {"max_tokens": 64, "temperature": 1.0, "logprobs": 0},
    }  # fmt: skip
    client = await Client.connect(port)
    answers = [await client.post("/inference/v1/generate", orjson.dumps(body)) for _ in range(count)]
    client.close()
    return answers


def cpu(home: House, model: Path, count: int) -> list[Result]:
    """CPU milliseconds per call, cold and continued, streamed and not; the bare proxy on the same load beside.

    The two are measured in alternating slices, since whatever else runs on the machine moves both.
    """
    results = []
    for stream in (False, True):
        kind = "streamed" if stream else "unstreamed"
        warm = Talks(model, 32, stream, f"w{int(stream)}")
        for _ in range(2):
            asyncio.run(drive(home.proxy.port, warm, 4))
            asyncio.run(drive(home.bare.port, warm, 4, go_on=False))
        slices = [Talks(model, count // SLICES, stream, f"m{int(stream)}s{n}") for n in range(SLICES)]
        for name, bar in ((f"cpu_ms_{kind}_cold", 2.0 if stream else 1.5), (f"cpu_ms_{kind}", 1.2 if stream else 0.7)):
            mine, floor, beside = [], [], []
            for talks in slices:
                floor.append(_spent(home.bare.pid, home.bare.port, talks, go_on=False))
                nats = cpu_seconds(home.nats_pid)
                mine.append(_spent(home.proxy.pid, home.proxy.port, talks))
                beside.append((cpu_seconds(home.nats_pid) - nats) / len(talks.talks) * 1e3)
            value, base = median(mine), median(floor)
            note = f"bar {bar} ms; best slices {min(mine):.3f} and {min(floor):.3f}; NATS {median(beside):.3f}"
            results.append(Result(name, round(value, 4), "ms", round(base, 4), round(value / base, 3), note))
    return results


def _spent(pid: int, port: int, talks: Talks, *, go_on: bool = True) -> float:
    before = cpu_seconds(pid)
    asyncio.run(drive(port, talks, 4, go_on=go_on))
    return (cpu_seconds(pid) - before) / len(talks.talks) * 1e3


def latency(home: House, model: Path, count: int) -> list[Result]:
    """What a proxy adds at one client, and calls per second at 32; the bare proxy's beside."""
    straight = median([a.whole_s for a in asyncio.run(direct(home.engine.port, count, False))]) * 1e3
    mine, floor = [], []
    for number in range(4):
        talks = Talks(model, count // 4, False, f"lat{number}")
        asyncio.run(drive(home.proxy.port, talks, 1))
        floor += asyncio.run(drive(home.bare.port, talks, 1, go_on=False))[0]
        mine += asyncio.run(drive(home.proxy.port, talks, 1))[0]
    value, base = (median([a.whole_s for a in answers]) * 1e3 - straight for answers in (mine, floor))
    note = f"bar 1 ms; the engine alone {straight:.3f} ms"
    results = [Result("added_p50_ms", round(value, 4), "ms", round(base, 4), round(value / base, 3), note)]
    for stream in (False, True):
        talks = Talks(model, 4 * count, stream, f"rps{int(stream)}")
        asyncio.run(drive(home.proxy.port, talks, 32))
        bare = len(talks.talks) / asyncio.run(drive(home.bare.port, talks, 32, go_on=False))[1]
        rate = len(talks.talks) / asyncio.run(drive(home.proxy.port, talks, 32))[1]
        name = "rps_32_streamed" if stream else "rps_32"
        results.append(Result(name, round(rate, 1), "1/s", round(bare, 1), round(rate / bare, 3)))
    return results


def first_token(model: Path, ttft: float, count: int) -> Result:
    """Time to the first token through the proxy and direct, at a given engine TTFT."""
    with house(model, ttft_ms=ttft, gap_ms=1) as home:
        talks = Talks(model, count, True, "ttft")
        asyncio.run(drive(home.proxy.port, talks, 1))
        through, _ = asyncio.run(drive(home.proxy.port, talks, 1))
        straight = asyncio.run(direct(home.engine.port, count, True))
    mine, base = (median([a.first_s for a in answers]) * 1e3 for answers in (through, straight))
    name = "first_token_ratio" if ttft == 50 else f"first_token_ratio_{ttft:g}ms"
    return Result(name, round(mine / base, 4), "ratio", round(base, 3), round(mine / base, 4), f"+{mine - base:.3f} ms")


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__ or "", argv, calls=1000)
    uvloop.install()
    count = 200 if options.short else options.calls
    model = model_directory()
    with house(model) as home:
        results = [*cpu(home, model, count), *latency(home, model, min(count, 300))]
        results += long_prompts(home.proxy.port, home.engine.port, SECRET, model, 3 if options.short else 10)
    results += [first_token(model, ttft, 40) for ttft in (50, 5)]
    report(results, options.json)


if __name__ == "__main__":
    main()
