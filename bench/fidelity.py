"""Recomputed log-probs after a short real run: exact contexts beside the paper's merging of native ones.

`python -m bench.fidelity --json`. A small real model talks for a few turns, twice: through the proxy in exact context
(value), and with every prompt rendered anew from the messages, merged by the paper's rule (baseline). Both builds are
recomputed with the same weights, so each ratio should be 1. `native_gap` is the share of later calls of the exact run
whose prompt a plain engine would have shown in other ids.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from bench.load import Result, arguments, report
from polar_common import subjects
from polar_common.bus import Bus
from polar_common.events import (
    CompletionCaptured,
    EngineFacts,
    HeadRef,
    MessagesRef,
    PromptRef,
    SamplingUsed,
    SessionArtifacts,
    SessionExited,
    SessionInitialized,
    SessionSealed,
    VersionSpan,
)
from polar_common.ids import FIRST_SEGMENT, new_id, session_id, task_id
from polar_common.keys import SessionKey, sign
from polar_common.nats_server import NatsConfig, NatsServer, free_port
from polar_common.packing import pack
from polar_common.tasks import cancel_and_wait, spawn
from polar_common.topology import Topology, apply
from polar_engine.testing import EngineThread, engine_thread
from polar_proxy.app import Proxy
from polar_proxy.settings import ProxySettings
from polar_reconstructor.handlers import Reconstructor
from polar_reconstructor.rules import BUILT_IN
from polar_render import load_renderer, profile_for
from polar_render.base import Head, Renderer
from polar_render.messages import Message, Text
from polar_train.fidelity import Options, Policies, Report, check, deployment_gap

SECRET = "bench"
TOPICS = (
    "a lighthouse keeper who collects words", "how bread rises", "three rules of a board game about rivers",
    "why the sky is blue", "a recipe that a robot invented", "a letter from a retired ship",
)  # fmt: skip
TURNS = (
    "Tell me about {topic}.",
    "Go on.",
    "Say it as a list.",
    "Now with numbers.",
    "And in one odd sentence?",
    "End.",
)


def said_by_user(index: int, turn: int) -> str:
    return TURNS[turn % len(TURNS)].format(topic=TOPICS[index % len(TOPICS)])


class Session:
    """Ids of one session and the events at its end."""

    def __init__(self, run: str, index: int) -> None:
        self.run = run
        self.task = task_id(FIRST_SEGMENT, run, f"task-{index}")
        self.name = session_id(self.task, 0)
        self.common: dict[str, Any] = {"run": run, "task": self.task, "session": self.name, "attempt": 1}

    async def end(self, bus: Bus, rules: str) -> None:
        facts = {"runtime": "local", "isolation": "none", "harness": "bench", "harness_version": "1"}
        await bus.once(SessionInitialized(**self.common, **facts, harness_config_hash="", init_s=0.0))
        await bus.once(SessionSealed(**self.common, reason="exited"))
        await bus.once(SessionExited(**self.common, exit_code=0))
        await bus.once(SessionArtifacts(**self.common))
        stored = await bus.last(subjects.session(self.name, 1, "artifacts"))
        assert stored is not None
        await Reconstructor(bus, rules, BUILT_IN[rules]).on_ended(stored)


@asynccontextmanager
async def proxied(url: str, engine: EngineThread, data: Path) -> AsyncIterator[str]:
    """A proxy's URL."""
    settings = ProxySettings(
        data=data, nats=url, secret=SECRET, proxy_engines=(engine.url,), proxy_model_dir=engine.host.model.path,
        log_level="warning",
    )  # fmt: skip
    proxy = Proxy(settings)
    task = spawn(proxy.run(), name="proxy")
    try:
        while "port" not in proxy.house.facts or not (proxy.service and proxy.service.seals.ready):
            if task.done():
                raise RuntimeError("the proxy ended") from task.exception()
            await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{proxy.house.facts['port']}"
    finally:
        proxy.house.stop.set()
        await asyncio.wait([task], timeout=15)
        await cancel_and_wait(task)


async def exact_session(bus: Bus, proxy: str, index: int, turns: int, tokens: int) -> None:
    """A harness that sends back what it was told."""
    session = Session("exact", index)
    key = SessionKey(
        session=session.name, task=session.task, run=session.run, attempt=1, model="policy",
        expires=int(time.time()) + 3600,
    )  # fmt: skip
    url = f"{proxy}/s/{sign(key, SECRET.encode())}/v1/chat/completions"
    messages: list[dict[str, Any]] = []
    async with httpx.AsyncClient(timeout=600) as client:
        for turn in range(turns):
            messages.append({"role": "user", "content": said_by_user(index, turn)})
            answer = await client.post(url, json={"model": "policy", "messages": messages, "max_tokens": tokens})
            answer.raise_for_status()
            message = answer.json()["choices"][0]["message"]
            messages.append({"role": "assistant", "content": message["content"] or ""})
    await session.end(bus, "exact")


async def native_session(
    bus: Bus, engine: EngineThread, renderer: Renderer, index: int, turns: int, tokens: int
) -> None:
    """The same talk with every prompt rendered from its messages, as an engine's own chat endpoint would."""
    session = Session("native", index)
    messages: list[Message] = []
    parent = ""
    async with httpx.AsyncClient(base_url=engine.url, timeout=600) as client:
        for turn in range(turns):
            messages.append(Message("user", (Text(said_by_user(index, turn)),)))
            prompt = renderer.render(messages, Head())
            params = {"max_tokens": tokens, "temperature": 1.0, "logprobs": 0, "stop_token_ids": renderer.stop_ids}
            answer = await client.post("/inference/v1/generate", json={"token_ids": prompt, "sampling_params": params})
            answer.raise_for_status()
            choice = answer.json()["choices"][0]
            event = native_call(session, prompt, choice, parent, renderer, tokens)
            await bus.once(event)
            parent = event.completion
            messages.append(Message("assistant", renderer.parse(choice["token_ids"], Head()).parts))
    await session.end(bus, "prefix_merging")


def native_call(
    session: Session, prompt: list[int], choice: dict[str, Any], parent: str, renderer: Renderer, tokens: int
) -> CompletionCaptured:
    ids: list[int] = choice["token_ids"]
    closed = bool(ids) and ids[-1] in renderer.stop_ids
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    columns = (pack(prompt, "i32")[0], pack(ids, "i32")[0], pack(logprobs, "f32")[0])
    return CompletionCaptured(
        **session.common,
        completion=new_id(),
        dialect="openai_chat",
        stream=False,
        model="policy",
        request_hash=new_id(),
        head=HeadRef(hash="none", body={}),
        messages=MessagesRef(),
        prompt=PromptRef(new=columns[0], length=len(prompt)),
        sampled=columns[1],
        logprobs=columns[2],
        finish="stop" if closed else "length",
        closed=closed,
        context="native",
        parent=parent,
        parent_by="longest" if parent else "none",
        chain_class="native",
        native_equal=True,
        sampling=SamplingUsed(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=tokens),
        versions=tuple(VersionSpan(version=v["version"], start=v["start"]) for v in choice["weight_versions"]),
        engine=EngineFacts(
            name="polar", replica="r0", model="policy", dtype="float32", end_of_turn=renderer.stop_ids,
            tokenizer_hash=renderer.provenance.tokenizer_hash,
        ),
    )  # fmt: skip


async def measure(engine: EngineThread, data: Path, sessions: int, turns: int, tokens: int) -> list[Result]:
    server = NatsServer(NatsConfig(data=data / "nats", port=free_port(), name=f"bench-{new_id()[:8]}"))
    server.start()
    bus = await Bus.connect(server.url, "bench")
    try:
        await apply(bus.js, Topology())
        renderer = load_renderer(replace(profile_for(engine.host.model.path), thinking="follow"))
        async with proxied(server.url, engine, data) as proxy:
            await asyncio.gather(*(exact_session(bus, proxy, i, turns, tokens) for i in range(sessions)))
        await asyncio.gather(*(native_session(bus, engine, renderer, i, turns, tokens) for i in range(sessions)))
        policies = Policies({}, engine.host.model.path)
        began = time.perf_counter()
        exact = await check(bus, Options("exact"), policies)
        seconds = time.perf_counter() - began
        merged = await check(bus, Options("prefix_merging"), policies)
        gap = (await deployment_gap(bus, Options("exact"), lambda _: renderer)).total
        return results(exact, merged, gap.different / gap.later if gap.later else 0.0, exact.tokens / seconds)
    finally:
        await bus.close()
        server.stop()


def results(exact: Report, merged: Report, gap: float, speed: float) -> list[Result]:
    ours, theirs = exact.in_scope, merged.in_scope
    note = f"{ours.spans} spans in {exact.traces} traces; {theirs.spans} in {merged.traces}, {_drifted(merged)} drifted"

    def beside(name: str, value: float | None, baseline: float | None, unit: str, note: str = "") -> Result:
        ratio = value / baseline if value is not None and baseline else None
        return Result(name, value or 0.0, unit, baseline, ratio, note)

    return [
        beside("recomputed_share", ours.share, theirs.share, "share within 1e-4", note),
        beside("recomputed_max_abs", ours.max_abs, theirs.max_abs, "log-prob"),
        beside("recomputed_mean_abs", ours.mean_abs, theirs.mean_abs, "log-prob"),
        beside("ratio_min", ours.ratio_min, theirs.ratio_min, "sequence ratio"),
        beside("ratio_max", ours.ratio_max, theirs.ratio_max, "sequence ratio"),
        Result("native_gap", gap, "share of later calls"),
        Result("recompute_rate", speed, "trained tokens/s", note="loading the model included"),
    ]


def _drifted(found: Report) -> int:
    return sum(found.context(c).spans for c in found.contexts if c != "exact")


def main(argv: list[str] | None = None) -> None:
    args = arguments(__doc__ or "", argv, sessions=8, turns=5, tokens=48)
    sessions, turns = (min(args.sessions, 3), min(args.turns, 4)) if args.short else (args.sessions, args.turns)
    with (
        tempfile.TemporaryDirectory(prefix="polar-bench-") as data,
        engine_thread(model="smollm2-135m", max_model_len=4096) as engine,
    ):
        found = asyncio.run(measure(engine, Path(data), sessions, turns, args.tokens))
    report(found, args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
