"""The trainer's side: closed groups taken from the trace stream, against plainly fetching its messages.

`python -m bench.stream --json`. `traces_per_s`: groups are read, checked against their manifests, unpacked into
arrays, marked as used and saved, one by one, as a trainer does whose updates take no time. The baseline reads the same
stream's messages with nats-py's `fetch` and does nothing with them, counted in traces.
"""

from __future__ import annotations

import time

import uvloop

from bench.load import Result, arguments, report
from bench.session import long_session
from bench.stored import fetched, stored_log
from polar_common.topology import TRACES
from polar_train import TraceStream


async def measure(groups: int, samples: int, turns: int, tokens: int) -> list[Result]:
    made = [long_session(turns, tokens, task=f"t{g}", index=i) for g in range(groups) for i in range(samples)]
    async with stored_log(made, groups=True) as bus:
        messages = (await bus.js.stream_info(TRACES)).state.messages
        stream = TraceStream(bus, trainer="bench", run="bench")
        begun, traces, ids = time.perf_counter(), 0, 0
        for step in range(1, groups + 1):
            group = await stream.next(30.0)
            if group is None:
                raise RuntimeError(f"only {step - 1} of {groups} groups came")
            traces += len(group.traces)
            ids += sum(t.length for t in group.traces)
            stream.used([group], step=step)
            await stream.saved(stream.state_dict())
        rate = traces / (time.perf_counter() - begun)
        await stream.close()
        plain = await fetched(bus, TRACES, "polar.traces.>") * traces / messages
    note = f"{groups} groups of {samples} sessions, {turns} turns, {ids // traces:,} tokens a trace"
    return [Result("traces_per_s", rate, "1/s", plain, rate / plain, note)]


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__ or "", argv, groups=50, samples=8, turns=20, tokens=12_000)
    groups = min(options.groups, 8) if options.short else options.groups
    report(uvloop.run(measure(groups, options.samples, options.turns, options.tokens)), options.json)


if __name__ == "__main__":
    main()
