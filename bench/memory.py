"""The proxy's memory over many sessions that end: 100,000 calls of 1,000 sessions, 16 of them at a time.

Each session has ten conversations of ten turns and is sealed after its last call, as a gateway seals it. Growth is
resident memory at the end against that after the first twentieth of the sessions, when everything has been warm once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import orjson
import uvloop

from bench.load import Client, Result, arguments, bench_key, chat_path, report, resident_mb
from bench.models import model_directory
from bench.proxy import SECRET, WORDS, House, house, said
from polar_common.bus import Bus
from polar_common.events import SessionSealed

CLIENTS = 16
CALLS = 100
TURNS = 10
BAR_MB = 50


@dataclass
class Course:
    """How far it is. `samples`: (sessions ended, MB)."""

    sessions: int
    ended: int = 0
    samples: list[tuple[int, float]] = field(default_factory=list)


async def _session(home: House, bus: Bus, client: Client, number: int) -> None:
    """All calls of one session, then its seal."""
    key = bench_key(f"s1-mem{number:09d}")
    path = chat_path(key, SECRET)
    for talk in range(CALLS // TURNS):
        messages = [{"role": "system", "content": f"{WORDS} {talk}"}, {"role": "user", "content": f"Go {number}."}]
        for turn in range(TURNS):
            stream = (number + turn) % 2 == 0
            body = {"model": "policy", "messages": messages, "max_tokens": 32, "stream": stream}
            answer = await client.post(path, orjson.dumps(body))
            assert answer.status == 200, answer.body
            if stream:
                text = said(answer.body)
            else:
                text = orjson.loads(answer.body)["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And on."}]
    await bus.once(SessionSealed(session=key.session, attempt=1, run="bench", task=key.task, reason="exited"))


async def _worker(home: House, bus: Bus, numbers: Iterator[int], course: Course) -> None:
    client = await Client.connect(home.proxy.port)
    for number in numbers:
        await _session(home, bus, client, number)
        course.ended += 1
        if course.ended % max(1, course.sessions // 20) == 0:
            course.samples.append((course.ended, resident_mb(home.proxy.pid)))
    client.close()


async def run(home: House, sessions: int) -> tuple[Course, int]:
    """Returns the course and how many sessions the proxy still holds two seconds after the last seal."""
    course = Course(sessions)
    bus = await Bus.connect(home.nats.url, "bench-memory")
    numbers = iter(range(sessions))
    await asyncio.gather(*(_worker(home, bus, numbers, course) for _ in range(CLIENTS)))
    await bus.close()
    await asyncio.sleep(2)
    course.samples.append((sessions, resident_mb(home.proxy.pid)))
    async with httpx.AsyncClient() as client:
        held = (await client.get(f"http://127.0.0.1:{home.proxy.port}/health")).json()["sessions"]
    return course, int(held)


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__ or "", argv, sessions=1000)
    uvloop.install()
    sessions = 40 if options.short else options.sessions
    with house(model_directory()) as home:
        start = time.monotonic()
        course, held = asyncio.run(run(home, sessions))
        wall = time.monotonic() - start
    warm, last = course.samples[0][1], course.samples[-1][1]
    peak = max(mb for _, mb in course.samples)
    note = f"bar {BAR_MB} MB; {sessions * CALLS} calls in {wall:.0f} s, peak {peak:.0f} MB"
    report(
        [
            Result("memory_growth_mb", round(last - warm, 1), "MB", round(warm, 1), round(last / warm, 3), note),
            Result("memory_sessions_held", held, "sessions", 0, None, "after the last seal"),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
