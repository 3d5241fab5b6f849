"""Sessions that a real engine really sampled, published and built, for the checks of fidelity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from local_engine_kit import EngineClient
from tests.scripted_sessions import Script

from polar_common import subjects
from polar_common.bus import Bus
from polar_common.ids import FIRST_SEGMENT, task_id
from polar_common.topology import TRACES
from polar_common.traces import Trace, TraceManifest
from polar_reconstructor.handlers import Reconstructor
from polar_reconstructor.rules import BUILT_IN, RuleSet
from polar_train.fidelity.source import Chosen, Loaded, Name, choose, windows

FACTS = {"name": "polar", "dtype": "float32", "logprob_kind": "processed"}


@dataclass
class Talk:
    """One session: each call is sampled by the engine behind its prompt, and recorded as it came."""

    client: EngineClient
    index: int
    run: str = "run"
    script: Script = field(init=False)
    sampled: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        task = task_id(FIRST_SEGMENT, self.run, f"talk-{self.index}")
        self.script = Script(task=task, run=self.run).started()

    @property
    def session(self) -> str:
        return self.script.session

    def call(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        tokens: int = 12,
        sampling: dict[str, Any] | None = None,
        alter: dict[int, float] | None = None,
        engine: dict[str, Any] | None = None,
        versions: Sequence[tuple[str, int]] | None = None,
        **facts: Any,
    ) -> list[int]:
        """The sampled ids. `alter`: index → what is added to its log-prob. `versions` overrides the engine's."""
        asked = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **(sampling or {})}
        seed = self.index * 1000 + len(self.sampled)
        choice = self.client.generate(list(prompt), max_tokens=tokens, seed=seed, **asked)["choices"][0]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        for at, more in (alter or {}).items():
            logprobs[at] += more
        spans = choice["weight_versions"] if versions is None else [{"version": v, "start": s} for v, s in versions]
        self.sampled[name] = choice["token_ids"]
        self.script.call(
            name,
            list(prompt),
            choice["token_ids"],
            logprobs=logprobs,
            sampling=sampling,
            engine=FACTS | (engine or {}),
            versions=[(s["version"], s["start"]) for s in spans],
            **facts,
        )
        return list(choice["token_ids"])

    async def publish(self, bus: Bus, rules: str | RuleSet = "exact", build: str = "live") -> None:
        """The session ends, and its traces are built."""
        await self.script.ended().publish(bus)
        await self.build(bus, rules, build)

    async def build(self, bus: Bus, rules: str | RuleSet, build: str) -> None:
        rule_set = BUILT_IN[rules] if isinstance(rules, str) else rules
        end = await bus.last(subjects.session(self.session, 1, "artifacts"))
        assert end is not None
        await Reconstructor(bus, build, rule_set).on_ended(end)
        fact = await bus.last(subjects.build(build, self.session, "*"))
        assert fact is not None and fact.event.kind == "build.reconstructed", fact


async def traces(bus: Bus, build: str = "live") -> list[Trace]:
    """The build's traces as published."""
    found = await bus.read(TRACES, [subjects.trace_filter(None, build)])
    return [Trace.model_validate_json(m.body) for m in found if m.subject.rpartition(".")[2].isdigit()]


async def loaded(bus: Bus, build: str = "live") -> list[Loaded]:
    """The build's traces as the check reads them."""
    chosen = await choose(bus, build)
    return [one async for window in windows(bus, chosen) for one in window]


async def republish(bus: Bus, trace: Trace, build: str, named: str = "", **changes: Any) -> None:
    """The trace under another build, with changes, and a manifest that names it (or `named` in its place)."""
    changed = trace.model_copy(update={"build": build, **changes})
    subject = subjects.trace(trace.run, build, trace.task, trace.session, changed.number)
    await bus.once_raw(subject, changed.model_dump_json().encode(), changed.trace_id)
    manifest = TraceManifest(
        run=trace.run, build=build, task=trace.task, session=trace.session, attempt=trace.attempt, rules=trace.rules,
        rules_hash=trace.rules_hash, traces=(named or changed.trace_id,), action_tokens=(trace.action_tokens,),
        spans=len(trace.spans), exact_spans=0, excluded={}, log_last=1,
    )  # fmt: skip
    subject = subjects.trace_manifest(trace.run, build, trace.task, trace.session)
    await bus.once_raw(subject, manifest.model_dump_json().encode(), manifest.hash())


def random_ids(seed: int, count: int, below: int = 500) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, below, count)]


__all__ = ["Chosen", "Name", "Talk", "loaded", "random_ids", "republish", "traces"]
