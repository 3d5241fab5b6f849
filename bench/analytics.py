"""Analytics: events projected into the embedded ClickHouse engine, and its questions over a million events.

`python -m bench.analytics --json`. `events_per_s`: both streams are followed, decoded and inserted until the tables
are complete; the baseline fetches the log's messages with nats-py and does nothing. `view_ms_1m`: the slowest of the
questions below, each the median of three, over the same tables multiplied to a million events; the baseline is a plain
sum over the same completions.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import clickhouse_connect
import uvloop

from bench.load import Result, arguments, median, report
from bench.session import long_session
from bench.stored import fetched, stored_log
from polar_analytics.handlers import Projector
from polar_analytics.schema import TABLES
from polar_analytics.store import Store
from polar_common.bus import Bus
from polar_common.ids import FIRST_SEGMENT
from polar_common.topology import TRACES, events_stream

PLAIN = "SELECT count(), sum(sampled_tokens) FROM completions"
QUESTIONS = {
    "sessions": "SELECT harness, outcome, count(), avg(reward) FROM sessions GROUP BY harness, outcome",
    "policy_age": "SELECT age, count() FROM policy_age GROUP BY age ORDER BY age",
    "session_length": "SELECT quantiles(0.5, 0.95)(completions), avg(sampled_tokens) FROM session_length",
    "reward_distribution": "SELECT task, mean_reward, spread FROM reward_distribution ORDER BY spread DESC LIMIT 200",
    "outcomes": "SELECT outcome, sum(sessions), sum(attempts) FROM outcomes GROUP BY outcome",
}
_NAMES = ("session", "task", "completion", "parent", "trace", "event_id")


async def project(bus: Bus, store: Store) -> tuple[int, float]:
    """Messages, and the seconds until all of them are in the tables."""
    streams = {events_stream(FIRST_SEGMENT): "polar.events.>", TRACES: "polar.traces.>"}
    count = sum([(await bus.js.stream_info(name)).state.messages for name in streams])
    stop = asyncio.Event()
    begun = time.perf_counter()
    both = [Projector(bus, store, name, subject, batch=2000, linger_s=0.5) for name, subject in streams.items()]
    running = [asyncio.ensure_future(p.run(stop)) for p in both]
    await asyncio.gather(*(p.caught_up.wait() for p in both))
    took = time.perf_counter() - begun
    stop.set()
    await asyncio.gather(*running)
    return count, took


def multiply(path: Path, events: int) -> int:
    """Every row again under other names until there are so many events; how many there are."""
    client = clickhouse_connect.get_client(interface="chdb", path=str(path))
    try:
        have, last = client.query("SELECT count(), max(seq) FROM events").result_rows[0]
        copies = -(-events // have) - 1
        for table in TABLES:
            changed = [f"concat({c}, 'x', toString(n)) AS {c}" for c in _NAMES if c in table.columns]
            if not changed:
                continue
            changed += [f"seq + {last} * n AS seq"] if "seq" in table.columns else []
            client.command(
                f"INSERT INTO {table.name} SELECT * EXCEPT n REPLACE ({', '.join(changed)}) FROM "
                f"(SELECT t.*, m.number + 1 AS n FROM {table.name} AS t CROSS JOIN numbers({copies}) AS m)"
            )
        return int(client.query("SELECT count() FROM events").result_rows[0][0])
    finally:
        client.close()


async def asked(store: Store, sql: str) -> float:
    """Milliseconds, the median of three after one that warms up."""
    found = []
    for _ in range(4):
        begun = time.perf_counter()
        await store.query(sql)
        found.append((time.perf_counter() - begun) * 1e3)
    return median(found[1:])


async def measure(groups: int, samples: int, turns: int, tokens: int, events: int) -> list[Result]:
    made = [long_session(turns, tokens, task=f"t{g}", index=i) for g in range(groups) for i in range(samples)]
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as directory:
        path = Path(directory) / "chdb"
        async with stored_log(made, groups=True) as bus:
            store = Store(path)
            await store.open()
            count, took = await project(bus, store)
            await store.close()
            plain = await fetched(bus, events_stream(FIRST_SEGMENT), "polar.events.>")
        rows = await asyncio.to_thread(multiply, path, events)
        store = Store(path)
        await store.open()
        base = await asked(store, PLAIN)
        times = {name: await asked(store, sql) for name, sql in QUESTIONS.items()}
        await store.close()
    slowest = max(times, key=lambda name: times[name])
    rate = count / took
    return [
        Result("events_per_s", rate, "1/s", plain, rate / plain, f"{count:,} messages of both streams"),
        Result("view_ms_1m", times[slowest], "ms", base, times[slowest] / base, f"{slowest}; {rows:,} events"),
        *(Result(f"view_ms_1m.{name}", value, "ms", base, value / base) for name, value in times.items()),
    ]


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__ or "", argv, groups=50, samples=8, turns=20, tokens=12_000, events=1_000_000)
    groups, events = (8, 100_000) if options.short else (options.groups, options.events)
    results = uvloop.run(measure(groups, options.samples, options.turns, options.tokens, events))
    report(results, options.json)


if __name__ == "__main__":
    main()
