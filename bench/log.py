"""The log: bytes of a session, publish and read rates against plain nats-py, one session out of a million messages.

Sizes are of sessions that really went through the proxy: bodies, headers and subjects as JetStream stores them, and
what they take on disk once their block is closed and compressed; on a cluster of three, whose servers do not, what
each replica stores. Unique content is each message, new prompt id, sampled id and log-prob once, uncompressed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats.errors
import orjson
import uvloop
from nats.js.errors import APIError
from tokenizers import Tokenizer

from bench.load import Client, Result, Spawned, median, report
from bench.models import model_directory
from polar_common.bus import Bus, scan
from polar_common.events import CompletionCaptured, EngineFacts, HeadRef, MessagesRef, PromptRef, SamplingUsed
from polar_common.ids import FIRST_SEGMENT, session_id, task_id
from polar_common.keys import SessionKey, sign
from polar_common.nats_server import NatsCluster, NatsConfig, NatsServer, free_port
from polar_common.packing import pack
from polar_common.topology import Topology, apply, blobs_stream, events_stream

__all__ = ["main"]

SECRET = "bench-secret"
EVENTS, BLOBS = events_stream(FIRST_SEGMENT), blobs_stream(FIRST_SEGMENT)
SAMPLED = 160
RESULT = 1_500
"""Characters of a tool's result: about 400 tokens."""
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]


@contextmanager
def server(sync: str = "always") -> Iterator[NatsServer]:
    with tempfile.TemporaryDirectory(prefix="polar-bench-log-") as name:
        nats = NatsServer(NatsConfig(data=Path(name) / "js", port=free_port(), name="bench-log", sync=sync))
        nats.start()
        try:
            yield nats
        finally:
            nats.stop("kill")


@asynccontextmanager
async def connected(nats: NatsServer) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats.url, "bench")
    await apply(bus.js, Topology())
    yield bus
    await bus.close()


# -- bytes


@contextmanager
def proxied(nats: NatsServer | NatsCluster, model: Path) -> Iterator[int]:
    """The proxy before an engine that says different ids with different log-probs; its port."""
    end = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id("<|im_end|>")
    with tempfile.TemporaryDirectory(prefix="polar-bench-proxy-") as name:
        data = Path(name)
        engine_argv = ["--tokens", str(SAMPLED), "--spread", "400", "--end", str(end)]
        engine = Spawned([sys.executable, "-m", "bench.fake_engine", *engine_argv])
        env = {
            "POLAR_DATA": str(data), "POLAR_NATS": nats.url, "POLAR_SECRET": SECRET, "POLAR_LOG_LEVEL": "warning",
            "POLAR_READY_FILE": str(data / "ready"), "POLAR_PROXY_MODEL": "policy", "POLAR_PROXY_MODEL_DIR": str(model),
            "POLAR_PROXY_ENGINES": f'["http://127.0.0.1:{engine.port}"]', "TOKENIZERS_PARALLELISM": "false",
            "POLAR_PROXY_CONTEXT_WINDOW": "1000000", "POLAR_PROXY_SESSION_RATE": "10000",
        }  # fmt: skip
        proxy = Spawned([sys.executable, "-c", "from polar_proxy.app import run; run()"], env=env, ready=data / "ready")
        try:
            yield proxy.port
        finally:
            proxy.stop()
            engine.stop()


def source_text() -> str:
    """Text that compresses as tool results do: this interpreter's own library."""
    return "".join(p.read_text(errors="replace") for p in sorted(Path(asyncio.__file__).parent.glob("*.py")))


@dataclass
class Sizes:
    """Bytes: `stored` by JetStream, `unique`, `copied` (prompts and histories whole), `columns` of what was sampled."""

    stored: int = 0
    unique: int = 0
    copied: int = 0
    columns: int = 0
    sampled: int = 0


async def talk(bus: Bus, port: int, turns: int, text: str, name: str = "") -> Sizes:
    """One session of so many calls, each with the last answer and a tool's result; what it took."""
    task = task_id(FIRST_SEGMENT, "bench", f"turns{turns}{name}")
    session = session_id(task, 0)
    key = SessionKey(
        session=session, task=task, run="bench", attempt=1, model="policy", expires=int(time.time()) + 3600, calls=1000
    )
    path = f"/s/{sign(key, SECRET.encode())}/v1/chat/completions"
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text[:2_000]},
        {"role": "user", "content": "Mend it."},
    ]
    before = await stored_bytes(bus)
    client = await Client.connect(port)
    for turn in range(turns):
        body = {"model": "policy", "messages": messages, "tools": TOOLS, "max_tokens": SAMPLED}
        answer = await client.post(path, orjson.dumps(body))
        if answer.status != 200:
            sys.exit(f"the proxy answered {answer.status}: {answer.body[:300]!r}")
        messages.append(orjson.loads(answer.body)["choices"][0]["message"])
        at = (turn * RESULT) % (len(text) - RESULT)
        messages.append({"role": "user", "content": text[at : at + RESULT]})
    client.close()
    sizes = Sizes(stored=await stored_bytes(bus) - before)
    await _count(bus, session, sizes)
    return sizes


async def stored_bytes(bus: Bus) -> int:
    return sum([(await bus.js.stream_info(s)).state.bytes for s in (EVENTS, BLOBS)])


async def _count(bus: Bus, session: str, sizes: Sizes) -> None:
    history = 0
    sizes.unique += len(orjson.dumps(TOOLS))
    for message in await bus.read_session(session):
        event = message.event
        if not isinstance(event, CompletionCaptured):
            continue
        said = sum(len(orjson.dumps(m)) for m in event.messages.new if "echo" not in m)
        history += said
        drawn = event.sampled.n
        sizes.sampled += drawn
        sizes.unique += said + 4 * event.prompt.new.n + 8 * drawn
        sizes.copied += history + 4 * event.prompt.length + 8 * drawn
        for column in (event.sampled, event.logprobs):
            if column is not None:
                sizes.columns += len(column.data or "") if column.blob is None else column.blob.size


def sizes_of(turns: Sequence[int]) -> list[Result]:
    text, model = source_text(), model_directory()
    found: list[tuple[int, Sizes]] = []
    with server("2m") as nats:
        asyncio.run(_apply(nats))
        with proxied(nats, model) as port:

            async def run() -> float:
                async with connected(nats) as bus:
                    for count in turns:
                        found.append((count, await talk(bus, port, count, text)))
                    return await _until_compressed(bus, nats, port, text)

            on_disk = asyncio.run(run())
    results = []
    for count, s in found:
        naive, ratio = s.copied / s.unique, s.stored / s.unique
        note = f"{s.stored:,} bytes, {s.unique:,} unique; {ratio:.2f} uncompressed; baseline: prompts stored whole"
        value = ratio * on_disk
        results.append(
            Result(f"bytes_ratio_{count}", round(value, 3), "ratio", round(naive, 2), round(value / naive, 4), note)
        )
    results.append(_on_a_cluster(model, text))
    last = found[-1][1]
    per, note = last.columns / last.sampled, "ids and log-probs as stored; raw: 4 + 4"
    results.append(Result("bytes_per_sampled_token", round(per, 2), "bytes", 8.0, round(per / 8, 3), note))
    return results


def _on_a_cluster(model: Path, text: str) -> Result:
    """A session of 200 turns on three servers that replicate."""
    with tempfile.TemporaryDirectory(prefix="polar-bench-log-") as name:
        cluster = NatsCluster(Path(name), sync="2m")
        try:
            cluster.start()
            asyncio.run(_replicated(cluster))
            with proxied(cluster, model) as port:

                async def run() -> Sizes:
                    bus = await Bus.connect(cluster.url, "bench")
                    sizes = await talk(bus, port, 200, text)
                    await bus.close()
                    return sizes

                s = asyncio.run(run())
        finally:
            cluster.stop("kill")
    ratio, naive = s.stored / s.unique, s.copied / s.unique
    note = f"{s.stored:,} bytes on each replica, {s.unique:,} unique; baseline: prompts stored whole"
    return Result("bytes_ratio_200_cluster", round(ratio, 3), "ratio", round(naive, 2), round(ratio / naive, 4), note)


async def _replicated(cluster: NatsCluster) -> None:
    """The streams, as soon as there is a leader to make them."""
    bus = await Bus.connect(cluster.url, "bench")
    async with asyncio.timeout(60):
        while True:
            try:
                await apply(bus.js, Topology(replicas=3))
                break
            except (APIError, TimeoutError, nats.errors.Error):
                await asyncio.sleep(0.2)
    await bus.close()


async def _until_compressed(bus: Bus, nats: NatsServer, port: int, text: str) -> float:
    """Go on with sessions of 200 turns until the server has closed a block: its size on disk over that of its content.

    JetStream compresses a block of 8 MB when it is full.
    """
    directory = nats.config.data / "jetstream/$G/streams" / EVENTS / "msgs"
    for number in range(20):
        blocks = sorted(directory.glob("*.blk"), key=lambda p: int(p.stem))
        if len(blocks) > 1:
            await asyncio.sleep(1.0)
            logical = (await bus.js.stream_info(EVENTS)).state.bytes - blocks[-1].stat().st_size
            return sum(b.stat().st_size for b in blocks[:-1]) / logical
        await talk(bus, port, 200, text, f"more{number}")
    sys.exit("the server closed no block")


async def _apply(nats: NatsServer) -> None:
    async with connected(nats):
        return


# -- rates


def completion(number: int) -> CompletionCaptured:
    """About 4 kB, as a turn is."""
    session = session_id(task_id(FIRST_SEGMENT, "bench", f"p{number // 50}"), 0)
    ids = [(number * 7919 + 31 * i) % 49_000 for i in range(400)]
    return CompletionCaptured(
        session=session, attempt=1, run="bench", completion=f"{number:032x}", dialect="openai_chat", stream=False,
        model="policy", request_hash="h", head=HeadRef(hash="h", body={}),
        messages=MessagesRef(new=({"role": "user", "parts": [{"type": "text", "text": "x" * 1500}]},)),
        prompt=PromptRef(new=pack(ids, "i32")[0], length=len(ids)), sampled=pack(ids[:160], "i32")[0],
        logprobs=pack([-0.01 * (i % 97) for i in ids[:160]], "f32")[0], finish="stop", closed=True,
        sampling=SamplingUsed(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=512),
        engine=EngineFacts(name="vllm", replica="r0", model="policy"),
    )  # fmt: skip


async def timed(count: int, at_once: int, work: Callable[[int], Awaitable[object]]) -> tuple[float, float]:
    """Wall and CPU seconds of this process for `count` pieces of work, so many under way."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await work(number)

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    return time.perf_counter() - wall, time.process_time() - cpu


async def publishing(bus: Bus, count: int) -> list[Result]:
    """Our publish against nats-py's own on the same server: each with its acknowledgement awaited, 64 under way."""
    events = [completion(n) for n in range(2 * count)]
    bodies = [e.model_dump_json().encode() for e in events]

    async def plain(number: int) -> None:
        await bus.js.publish(f"polar.events.s1.plain.{time.monotonic_ns()}.{number}", bodies[number])

    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    slices = 4
    for part in range(slices):
        each = count // slices
        theirs.append(await timed(each, 64, plain))
        ours.append(await timed(each, 64, lambda n, at=part * each: bus.once(events[at + n])))  # type: ignore[misc]
    wall, plain_wall = (median([w for w, _ in x]) / (count // slices) for x in (ours, theirs))
    cpu, plain_cpu = (median([c for _, c in x]) / (count // slices) * 1e3 for x in (ours, theirs))
    note = f"{1 / wall:,.0f} and {1 / plain_wall:,.0f} a second, acknowledged means on disk"
    return [
        Result("publish_ratio", round(wall / plain_wall, 3), "ratio", 1.0, round(wall / plain_wall, 3), note),
        Result("publish_cpu_ms", round(cpu, 4), "ms", round(plain_cpu, 4), round(cpu / plain_cpu, 3), "this process"),
    ]


async def sync_cost(count: int) -> Result:
    """What waiting for the disk costs: the same publishes with the server flushing every two minutes."""
    rates = {}
    for sync in ("always", "2m"):
        with server(sync) as nats:
            async with connected(nats) as bus:
                events = [completion(n) for n in range(count)]
                wall, _ = await timed(count, 64, lambda n, e=events, b=bus: b.once(e[n]))  # type: ignore[misc]
                rates[sync] = count / wall
    ratio = rates["always"] / rates["2m"]
    return Result(
        "sync_always_per_s", round(rates["always"]), "1/s", round(rates["2m"]), round(ratio, 3), "64 under way"
    )


async def reading(bus: Bus, messages: int) -> list[Result]:
    """One pass by `scan`, and the same by nats-py's own fetch."""
    began = time.perf_counter()
    count = 0
    async for _ in scan(bus, EVENTS, [">"]):
        count += 1
    ours = count / (time.perf_counter() - began)
    sub = await bus.js.pull_subscribe(">", durable="bench-plain", stream=EVENTS)
    began, plain = time.perf_counter(), 0
    while plain < min(count, 20_000):
        batch = await sub.fetch(512, timeout=2)
        for msg in batch:
            await msg.ack()
        plain += len(batch)
    theirs = plain / (time.perf_counter() - began)
    await bus.js.delete_consumer(EVENTS, "bench-plain")
    return [
        Result("read_per_s", round(ours), "1/s", round(theirs), round(ours / theirs, 2), "baseline: fetch with acks")
    ]


async def filled(bus: Bus, messages: int) -> None:
    """A log of small events, fifty to a session."""
    body = orjson.dumps({"kind": "filler", "schema_version": 1, "pad": "x" * 40})
    for number in range(messages):
        subject = f"polar.events.s1.completion.s1-fill{number // 50}-0.1.{number:020d}.captured"
        await bus.nc.publish(subject, body)
        if number % 2_000 == 0:
            await bus.nc.flush(timeout=60)
    await bus.nc.flush(timeout=60)
    async with asyncio.timeout(600):
        while (await bus.js.stream_info(EVENTS)).state.messages < messages * 0.995:
            await asyncio.sleep(0.5)


async def one_of_many(messages: int) -> list[Result]:
    """Reading a session of 50 completions where the log holds so many messages."""
    with server("2m") as nats:
        async with connected(nats) as bus:
            await filled(bus, messages)
            for number in range(50):
                await bus.once(completion(number))
            session = completion(0).session
            await bus.read_session(session)
            times = []
            for _ in range(60):
                began = time.perf_counter()
                found = await bus.read_session(session)
                times.append((time.perf_counter() - began) * 1e3)
                assert len(found) == 50
            held = (await bus.js.stream_info(EVENTS)).state.messages
            note = f"50 completions of 4 kB among {held:,} messages; bar 5 ms"
            results = [Result("session_read_ms", round(median(times), 3), "ms", None, None, note)]
            return results + await reading(bus, messages)


async def rates(publishes: int, messages: int) -> list[Result]:
    with server() as nats:
        async with connected(nats) as bus:
            results = await publishing(bus, publishes)
    results.append(await sync_cost(max(500, publishes // 4)))
    return results + await one_of_many(messages)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--short", action="store_true", help="20,000 messages instead of a million")
    parser.add_argument("--messages", type=int, default=1_000_000)
    options = parser.parse_args(argv)
    uvloop.install()
    results = sizes_of((10, 50, 200))
    results += asyncio.run(rates(*((800, 20_000) if options.short else (8_000, options.messages))))
    report(results, options.json)


if __name__ == "__main__":
    main()
