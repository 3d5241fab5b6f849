"""How exact, faithful and continued contexts are, on an engine that makes it hard (DESIGN §11).

Conversations over all four APIs, half of the turns streamed. The engine's journal, not the proxy's word, decides: a
call is exact if the engine received just the ids that were recorded and, where it extends an earlier call, these begin
with that call's prompt and sample; faithful if every text of the harness's request stands in the prompt, in order;
continued if the log names the call that it really extends.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import uvloop
from tokenizers import Tokenizer

from bench.adversary import FEATURES
from bench.clients import CLIENTS, Harness
from bench.load import Client, Result, Spawned, arguments, bench_key, report
from bench.models import model_directory
from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.events import CompletionCaptured
from polar_common.keys import SessionKey, sign
from polar_common.nats_server import NatsConfig, NatsServer, free_port
from polar_common.topology import Topology, apply
from polar_render.messages import Text
from polar_render.records import Echo, ResolvedCompletion, blobs_needed, resolve_session

SECRET = "bench-secret"
STOPS = ("STOP HERE", "###")


@dataclass
class Tally:
    """Counts of one API."""

    sessions: int = 0
    calls: int = 0
    exact: int = 0
    faithful: int = 0
    extending: int = 0
    continued: int = 0
    chains: int = 0
    features: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for name in ("sessions", "calls", "exact", "faithful", "extending", "continued", "chains"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.features += other.features
        self.wrong += other.wrong


def key_of(name: str) -> SessionKey:
    return bench_key(f"s1-{name}")


async def converse(port: int, harness: Harness, key: SessionKey, turns: int, seed: int) -> None:
    """One conversation: questions, and results where tools were called."""
    rng = random.Random(seed)
    client = await Client.connect(port)
    prefix = f"/s/{sign(key, SECRET.encode())}"
    harness.say("Begin, please.")
    for turn in range(turns):
        stream = rng.random() < 0.5
        answer = await client.post(prefix + harness.url(stream), orjson.dumps(harness.body(stream)))
        assert answer.status == 200, answer.body
        harness.took(harness.gathered(events(answer.body)) if stream else orjson.loads(answer.body))
        if harness.calls:
            harness.results()
        else:
            harness.say(f"Go on: step {turn}, {rng.choice(['gently', 'ernsthaft', '很快'])}.")
    client.close()


def events(body: bytes) -> list[dict[str, Any]]:
    return [orjson.loads(line[5:]) for line in body.split(b"\n") if line.startswith(b"data:") and b"{" in line]


async def resolved(bus: Bus, session: str) -> list[ResolvedCompletion]:
    stored = await bus.read_session(session)
    captured = [e for s in stored if ".completion." in s.subject and isinstance(e := s.event, CompletionCaptured)]
    blobs = Blobs(bus, "s1")
    return list(resolve_session(captured, {r.sha256: await blobs.get(r) for r in blobs_needed(captured)}).values())


def judge(calls: list[ResolvedCompletion], journal: dict[str, dict[str, Any]], tokenizer: Tokenizer) -> Tally:
    """One session. The conversation is linear, so each call extends the one before it."""
    tally = Tally(sessions=1, calls=len(calls))
    before: ResolvedCompletion | None = None
    for call in calls:
        heard = journal[call.completion]
        tally.features.update(heard["features"])
        exact = heard["prompt"] == call.prompt.tolist() and heard["sampled"] == call.sampled.tolist()
        if before is not None:
            said = journal[before.completion]
            tally.extending += 1
            start = said["prompt"] + said["sampled"]
            exact = exact and heard["prompt"][: len(start)] == start
            tally.continued += call.event.parent == before.completion
        tally.exact += exact and call.event.context_exact is True
        text = tokenizer.decode(heard["prompt"], skip_special_tokens=False)
        lost = unseen(call, text)
        tally.faithful += call.event.context_faithful and not lost
        tally.chains += not call.event.parent
        if not exact or lost or (before is not None and call.event.parent != before.completion):
            tally.wrong.append(f"{call.event.dialect} {call.event.chain_class} {heard['features']} lost={lost[:1]}")
        before = call
    return tally


def unseen(call: ResolvedCompletion, prompt: str) -> list[str]:
    """Texts of the harness's messages that the prompt doesn't show, in their order."""
    missing, at = [], 0
    for message in call.messages:
        for part in () if isinstance(message, Echo) else message.parts:
            if isinstance(part, Text) and (wanted := part.text.strip()):
                found = prompt.find(wanted, at)
                at = found + len(wanted) if found >= 0 else at
                if found < 0:
                    missing.append(wanted)
    return missing


async def measure(model: Path, sessions: int, turns: int) -> dict[str, Tally]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with tempfile.TemporaryDirectory(prefix="polar-exact-") as name:
        data = Path(name)
        journal = data / "journal"
        nats = NatsServer(NatsConfig(data=data / "js", port=free_port(), name="exact", sync="1s"))
        nats.start()
        bus = await Bus.connect(nats.url, "bench")
        await apply(bus.js, Topology())
        engine = Spawned([sys.executable, "-m", "bench.adversary", "--model", str(model), "--journal", str(journal)])
        env = {
            "POLAR_DATA": str(data), "POLAR_NATS": nats.url, "POLAR_SECRET": SECRET, "POLAR_LOG_LEVEL": "warning",
            "POLAR_READY_FILE": str(data / "ready"), "POLAR_PROXY_MODEL_DIR": str(model),
            "POLAR_PROXY_ENGINES": f'["http://127.0.0.1:{engine.port}"]',
        }  # fmt: skip
        proxy = Spawned([sys.executable, "-c", "from polar_proxy.app import run; run()"], env=env, ready=data / "ready")
        try:
            return await _measure(bus, proxy.port, journal, tokenizer, sessions, turns)
        finally:
            proxy.stop()
            engine.stop()
            await bus.close()
            nats.stop("kill")


async def _measure(
    bus: Bus, port: int, journal: Path, tokenizer: Tokenizer, sessions: int, turns: int
) -> dict[str, Tally]:
    talks = [(api, n) for api in CLIENTS for n in range(sessions)]
    limit = asyncio.Semaphore(8)

    async def one(api: str, number: int) -> None:
        async with limit:
            harness = CLIENTS[api](STOPS, 2000)
            await converse(port, harness, key_of(f"{api}{number}"), turns, number)

    await asyncio.gather(*(one(api, n) for api, n in talks))
    heard = {line["id"]: line for line in map(orjson.loads, journal.read_bytes().splitlines())}
    found: dict[str, Tally] = {}
    for api, number in talks:
        calls = await resolved(bus, key_of(f"{api}{number}").session)
        found.setdefault(api, Tally()).add(judge(calls, heard, tokenizer))
    return found


def results(found: dict[str, Tally]) -> list[Result]:
    total = Tally()
    for tally in found.values():
        total.add(tally)
    out = []
    for name, tally in [("", total), *((f".{api}", t) for api, t in found.items())]:
        rows = (
            ("exact_share", tally.exact, tally.calls),
            ("faithful_share", tally.faithful, tally.calls),
            ("continued_share", tally.continued, tally.extending),
        )
        for what, part, whole in rows:
            out.append(Result(what + name, round(part / max(1, whole), 6), "share", 1.0, None, f"{part} of {whole}"))
        ratio = tally.chains / max(1, tally.sessions)
        out.append(Result(f"samples_per_session{name}", round(ratio, 4), "traces", 1.2, round(ratio / 1.2, 4)))
    for feature in FEATURES:
        out.append(
            Result(f"feature_share.{feature}", round(total.features[feature] / max(1, total.calls), 4), "share", 0.2)
        )
    return out


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__ or "", argv, sessions=10, turns=15)
    count = 2 if options.short else options.sessions
    found = uvloop.run(measure(model_directory(), count, options.turns))
    for api, tally in found.items():
        for line in tally.wrong[:5]:
            print(f"{api}: {line}", file=sys.stderr)
    report(results(found), options.json)


if __name__ == "__main__":
    main()
