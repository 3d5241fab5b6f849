"""Reconstruction: from stored bytes to traces, and replay against plainly reading the log.

`python -m bench.reconstruct --json`. Times of `ms_*` are CPU milliseconds of one core, medians; the baseline beside
them is the paper's rule stated plainly, in lists over whole prompts. `replay_ratio` is messages a second of a replay
that reads, builds and packs over messages a second of reading the same stream and doing nothing; `replay_cpu_us` is
the same in CPU time of one process, which a busy machine disturbs less; `replay_published_ratio` is the whole replay,
with every published message synced as a house does by default. Reading is our own, by callback, or where the name says
`nats_py` the client library's `fetch`.
"""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import orjson
import uvloop

from bench.load import Result, arguments, median, report
from bench.session import END, LongSession, long_session
from bench.stored import fetched, stored_log
from polar_common.bus import Bus, Stored, scan
from polar_common.ids import FIRST_SEGMENT
from polar_common.packing import Column, unpack
from polar_common.topology import events_stream
from polar_reconstructor.build import Built, build_session, prepare
from polar_reconstructor.domain import select
from polar_reconstructor.origins import Log
from polar_reconstructor.pool import Processes
from polar_reconstructor.publish import outgoing
from polar_reconstructor.replay import Replay
from polar_reconstructor.rules import BUILT_IN

SIZES = ((50, 38_000), (100, 98_000), (200, 128_000))
EXACT = BUILT_IN["exact"]


def fresh(session: LongSession) -> list[Stored]:
    """Messages as they come from the server: nothing decoded yet."""
    return session.stored()


def ours(session: str, stored: Sequence[Stored], blobs: Mapping[str, bytes]) -> Built:
    selection = select(session, stored)
    if selection is None:
        raise RuntimeError("the session isn't over")
    return build_session(prepare(selection), blobs, EXACT)


def plainly(stored: Sequence[Stored], blobs: Mapping[str, bytes]) -> tuple[list[int], list[int], list[int]]:
    """The paper's rule over validated events and whole prompts in lists: (prompt, response, mask)."""

    def numbers(column: Column) -> list[int]:
        found: list[int] = unpack(column, blobs[column.blob.sha256] if column.blob else None).tolist()
        return found

    contexts: dict[str, list[int]] = {}
    calls: list[tuple[list[int], list[int]]] = []
    for message in stored:
        if ".completion." not in message.subject:
            continue
        event = message.event
        base = contexts.get(event.prompt.via[-1] if event.prompt.via else event.prompt.base, [])  # type: ignore[attr-defined]
        prompt = base[: event.prompt.shared] + numbers(event.prompt.new)  # type: ignore[attr-defined]
        sampled = numbers(event.sampled)  # type: ignore[attr-defined]
        contexts[event.completion] = prompt + sampled  # type: ignore[attr-defined]
        calls.append((prompt, sampled))
    response, mask = list(calls[0][1]), [1] * len(calls[0][1])
    for (before, sample), (prompt, following) in pairwise(calls):
        if prompt[: len(before)] != before:
            raise RuntimeError("not a continuation")
        tail = prompt[len(before) :]
        at = tail.index(END)
        gap = tail[at + 1 :] if sample[-1] == END else tail[at:]
        response += gap + following
        mask += [0] * len(gap) + [1] * len(following)
    return calls[0][0], response, mask


def cpu_ms(work: Callable[[list[Stored]], object], session: LongSession, times: int) -> float:
    found = []
    for _ in range(times):
        stored = fresh(session)
        gc.collect()
        begun = time.process_time()
        work(stored)
        found.append((time.process_time() - begun) * 1e3)
    return median(found)


def sizes(times: int) -> list[Result]:
    results = []
    for turns, tokens in SIZES:
        session = long_session(turns, tokens)
        blobs = session.bodies()
        made = ours(session.session, fresh(session), blobs)
        prompt, response, mask = plainly(fresh(session), blobs)
        draft = made.traces[0].draft
        if (draft.prompt.tolist(), draft.response.tolist(), draft.mask.tolist()) != (prompt, response, mask):
            raise RuntimeError("the two disagree")
        value = cpu_ms(lambda stored, s=session, b=blobs: ours(s.session, stored, b), session, times)  # type: ignore[misc]
        baseline = cpu_ms(lambda stored, b=blobs: plainly(stored, b), session, max(1, times // 5))  # type: ignore[misc]
        note = f"{session.tokens:,} tokens, {sum(len(s.body) for s in fresh(session)):,} stored bytes"
        results.append(Result(f"ms_{turns}", value, "ms", baseline, value / baseline, note))
        if turns == 200:
            packing = cpu_ms(lambda _, m=made: outgoing(m, "bench"), session, times)  # type: ignore[misc]
            results.append(Result("pack_ms_200", packing, "ms", note="compressing for publication, apart"))
            results.append(Result("memory_mb_200", peak_mb(session, blobs), "MB", note="peak of Python's allocations"))
    return results


def peak_mb(session: LongSession, blobs: Mapping[str, bytes]) -> float:
    stored = fresh(session)
    tracemalloc.start()
    ours(session.session, stored, blobs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


async def replaying(sessions: int, turns: int, tokens: int, processes: int) -> list[Result]:
    made = [long_session(turns, tokens, index=n) for n in range(sessions)]
    async with stored_log(made) as bus:
        note = f"{processes} processes, {sessions} sessions of {turns} turns, {tokens:,} tokens"
        return await measured(bus, str(bus.nc.connected_url.geturl()), processes, note)


async def measured(bus: Bus, url: str, processes: int, note: str) -> list[Result]:
    stream = events_stream(FIRST_SEGMENT)
    rates, costs = [], []
    for _ in range(3):
        begun, cpu, count = time.perf_counter(), time.process_time(), 0
        async for _stored in scan(bus, stream, ["polar.events.>"]):
            count += 1
        rates.append(count / (time.perf_counter() - begun))
        costs.append((time.process_time() - cpu) / count * 1e6)
    read, theirs = max(rates), max([await fetched(bus, stream, "polar.events.>") for _ in range(3)])
    cpu = time.process_time()
    alone = await Replay(bus, "bench", EXACT, Log(bus, FIRST_SEGMENT), dry=True).run()
    cost = (time.process_time() - cpu) / alone.messages * 1e6
    dry = await _replayed(bus, url, processes, dry=True)
    whole = await _replayed(bus, url, processes, dry=False)
    return [
        Result(
            "replay_cpu_us", cost, "µs", min(costs), cost / min(costs), "CPU a message in one process, server apart"
        ),
        Result("replay_ratio", dry, "messages/s", read, dry / read, f"publishing apart; {note}"),
        Result("replay_nats_py_ratio", dry, "messages/s", theirs, dry / theirs, "against nats-py's pull and fetch"),
        Result("replay_published_ratio", whole, "messages/s", read, whole / read, f"each message synced; {note}"),
    ]


async def _replayed(bus: Bus, url: str, processes: int, *, dry: bool) -> float:
    builders = Processes(url, "bench", EXACT, processes, dry=dry) if processes else None
    if builders is not None:
        # The processes start before the clock does.
        await asyncio.gather(*(builders.build([]) for _ in range(processes)))
    begun = time.perf_counter()
    done = await Replay(bus, "bench", EXACT, Log(bus, FIRST_SEGMENT), builders=builders, dry=dry).run()
    took = time.perf_counter() - begun
    if builders is not None:
        builders.close()
    if done.results["failed"] or done.results["open"]:
        raise RuntimeError(orjson.dumps(done.results).decode())
    return done.messages / took


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__ or "", argv, sessions=800, turns=20, tokens=12_000, processes=2)
    results = sizes(7 if options.short else 25)
    sessions = min(options.sessions, 40) if options.short else options.sessions
    results += uvloop.run(replaying(sessions, options.turns, options.tokens, options.processes))
    report(results, options.json)


if __name__ == "__main__":
    main()
