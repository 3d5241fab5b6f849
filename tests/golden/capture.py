"""Write `tests/golden/`: real agent CLIs on a whole house with the scripted engine, their sessions in the form of
`golden_kit`. Minutes of work and installed CLIs: run it by hand (`python tests/golden/capture.py [NAME...]`) when a
harness's way of talking, or what completions record, has changed. Where only the rules have changed, `--again` makes
the traces of the stored sessions anew. Read the difference before it is committed.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import yaml

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]

from clis_kit import CLIS, VARIANTS, Job, Variant, cli_house, task_of  # noqa: E402
from house_kit import Live  # noqa: E402
from tests.golden_kit import FOLDER, Golden, golden_files, told  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from polar_common.blobs import Blobs  # noqa: E402
from polar_common.bus import Bus, Stored  # noqa: E402
from polar_common.events import CompletionCaptured, SessionInitialized  # noqa: E402
from polar_common.house.layout import find_house  # noqa: E402
from polar_common.ids import FIRST_SEGMENT  # noqa: E402
from polar_common.settings import cache_dir  # noqa: E402
from polar_reconstructor.rules import BUILT_IN  # noqa: E402
from polar_render.records import ResolvedCompletion, blobs_needed, resolve_session  # noqa: E402

NATIVE = Variant("file,think,split")
JOBS = [
    *(Job("pi-chat", v) for v in ("plain", "think", "cut", "native")),
    Job("pi-google", "twotools"),
    *(Job("claude", v) for v in ("plain", "faults", "subagents", "native")),
    *(Job("codex", v) for v in ("twotools", "subagents", "native")),
    Job("gemini", "subagents"),
    Job("qwen", "subagents"),
    Job("opencode", "plain"),
]
KEPT = 12
"""Ids left at each end of what a harness said in one message."""
_CAPTURED = frozenset(
    ("finish", "closed", "untrainable", "untrainable_at", "context", "parent", "parent_by", "parent_ambiguous",
     "chain_class", "context_exact", "context_faithful", "additions", "native_equal", "choice", "parallel_of",
     "prefill_tokens", "sampling", "constrained", "versions", "policy_seq", "kv_mixed", "agent", "parent_agent",
     "agent_role", "spawned_by", "delivered", "replay_of", "dialect", "stream", "model")
)  # fmt: skip
_OTHERS: dict[str, frozenset[str]] = {
    "aborted": frozenset(("dialect", "stream", "reason")),
    "undelivered": frozenset(),
    "initialized": frozenset(("runtime", "isolation", "harness", "harness_version", "init_s")),
    "sealed": frozenset(("reason",)),
    "exited": frozenset(("exit_code", "fault", "cause", "timed_out", "cancelled")),
    "artifacts": frozenset(),
}


class Shortener:
    """Prompts with the middles of the harness's long messages replaced by a few ids that depend on them.

    Messages end before a prompt does, and what the model said is never touched: so a prompt that began with another
    call's context still does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._start, self._end = (tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
        self._assistant = tokenizer.encode("assistant", add_special_tokens=False).ids
        self._size = tokenizer.get_vocab_size()

    def __call__(self, ids: list[int]) -> list[int]:
        found: list[int] = []
        at = 0
        while at < len(ids):
            stop = next((i for i in range(at + 1, len(ids)) if ids[i] == self._start), len(ids))
            found += self._message(ids[at:stop])
            at = stop
        return found

    def _message(self, ids: list[int]) -> list[int]:
        ours = ids[1 : 1 + len(self._assistant)] == self._assistant
        if ours or self._end not in ids or len(ids) <= 2 * KEPT + 4:
            return ids
        middle = hashlib.sha256(repr(ids[KEPT:-KEPT]).encode()).digest()
        return [*ids[:KEPT], *(10 + b % (self._size - 20) for b in middle[:4]), *ids[-KEPT:]]


class Names:
    """Plain names in the order of first use: `c1`, `agent1`, …; within longer ids (tool calls) as well."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def give(self, name: str, prefix: str) -> str:
        if name and name not in self._known:
            count = sum(1 for known in self._known.values() if known.rstrip("0123456789") == prefix)
            self._known[name] = f"{prefix}{count + 1}"
        return self._known.get(name, "")

    def plain(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: self.plain(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.plain(v) for v in value]
        if not isinstance(value, str):
            return value
        if value in self._known:
            return self._known[value]
        for name, given in self._known.items():
            if len(name) >= 16 and name in value:
                value = value.replace(name, given)
        return value


def compact(
    messages: list[Stored], resolved: dict[str, ResolvedCompletion], shorten: Shortener
) -> list[dict[str, Any]]:
    """The session's events in the form of `golden_kit`."""
    names = Names()
    for m in messages:
        if ".completion." in m.subject:
            names.give(m.subject.split(".")[6], "c")
    short = {name: shorten(one.prompt.tolist()) for name, one in resolved.items()}
    begun = min((r.event.started for r in resolved.values()), default=0.0)
    facts: list[dict[str, Any]] = []
    for m in messages:
        kind = m.subject.rpartition(".")[2]
        value = m.event.model_dump(mode="json")
        if isinstance(m.event, CompletionCaptured):
            facts.append(_captured(m.event, value, resolved, short, names, begun))
        elif kind in _OTHERS:
            fact = {"kind": kind} | {k: value[k] for k in _OTHERS[kind]}
            if kind == "initialized":
                fact["init_s"], fact["harness_config_hash"] = 0.0, "config"
            if "completion" in value:
                fact["completion"] = names.plain(value["completion"])
            if kind == "aborted":
                fact |= _aborted(value, resolved, shorten, names)
            facts.append(dict(sorted(fact.items())))
    return facts


def _captured(
    event: CompletionCaptured, value: dict[str, Any], resolved: dict[str, ResolvedCompletion],
    short: dict[str, list[int]], names: Names, begun: float,
) -> dict[str, Any]:  # fmt: skip
    one = resolved[event.completion]
    names.give(event.agent, "agent")
    fact = names.plain({k: v for k, v in value.items() if k in _CAPTURED and v != _default(k)})
    base = event.prompt.via[-1] if event.prompt.via else event.prompt.base
    prompt, shared = short[event.completion], 0
    if base:
        context = short[base] + resolved[base].sampled.tolist()
        differs = (i for i, (a, b) in enumerate(zip(context, prompt, strict=False)) if a != b)
        shared = next(differs, min(len(context), len(prompt)))
    tools = value["head"]["body"]
    echoes = [{"echo": names.plain(m["echo"])} for m in value["messages"]["new"] if "echo" in m]
    return {
        "kind": "captured",
        "completion": names.plain(event.completion),
        **fact,
        "request_hash": names.give(event.request_hash, "request"),
        "head": {"hash": names.give(event.head.hash, "head")}
        | ({} if tools is None else {"body": {"tools": [{}] if tools.get("tools") else []}}),
        "messages": {"new": echoes},
        "prompt": {"base": names.plain(base), "shared": shared, "new": prompt[shared:], "length": len(prompt)},
        "sampled": one.sampled.tolist(),
        "logprobs": None if one.logprobs is None else [round(float(x), 4) for x in one.logprobs],
        "started": round(event.started - begun, 2),
        "duration_s": round(event.duration_s, 2),
    }


def _default(field: str) -> Any:
    default = CompletionCaptured.model_fields[field].default
    return list(default) if isinstance(default, tuple) else default


def _aborted(
    value: dict[str, Any], resolved: dict[str, ResolvedCompletion], shorten: Shortener, names: Names
) -> dict[str, Any]:
    """A cut call has no prompt on the log; the call that went on with it shows where its sample begins."""
    heirs = [r for r in resolved.values() if r.event.parent == value["completion"]]
    length = len(shorten(heirs[0].prompt.tolist()[: value["prompt_tokens"]])) if heirs else 0
    return {"request_hash": names.give(value["request_hash"], "request"), "prompt_tokens": length}


async def read(live: Live, session: str, shorten: Shortener) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """Facts, engine and the harness's version of one session."""
    bus = await Bus.connect(find_house(live.data).nats, "test/golden")
    try:
        messages = await bus.read_session(session)
        captured = [m.event for m in messages if isinstance(m.event, CompletionCaptured)]
        blobs = Blobs(bus, FIRST_SEGMENT)
        bodies = {r.sha256: await blobs.get(r) for r in blobs_needed(captured)}
    finally:
        await bus.close()
    version = next(m.event.harness_version for m in messages if isinstance(m.event, SessionInitialized))
    engine = captured[0].engine.model_dump(mode="json", exclude_defaults=True) | {"replica": "r0"}
    return compact(messages, resolve_session(captured, bodies), shorten), engine, version


def run(live: Live, jobs: list[Job]) -> dict[Job, str]:
    """Each job's session."""
    tasks = []
    for job in jobs:
        task = task_of(job, CLIS[job.cli], VARIANTS.get(job.variant, NATIVE))
        tasks.append(task | ({"sampling": {"context": "native"}} if job.variant == "native" else {}))
    with tempfile.TemporaryDirectory(prefix="polar-golden-") as directory:
        path = Path(directory) / "golden.yaml"
        path.write_text(yaml.safe_dump({"tasks": tasks}))
        rows = live.polar("run", str(path), "--run", "golden", "--timeout", "900", timeout=960)
    by_id = {row["id"]: row["session_ids"][0] for row in rows}
    return {job: by_id[job.id] for job in jobs}


def main(wanted: Callable[[Job], bool]) -> None:
    jobs = [job for job in JOBS if wanted(job)]
    tokenizer = Tokenizer.from_file(str(next((cache_dir() / "models").glob("tiny-*/tokenizer.json"))))
    with cli_house() as (live, _):
        for job, session in run(live, jobs).items():
            facts, engine, version = asyncio.run(read(live, session, Shortener(tokenizer)))
            write(Golden(job.id, CLIS[job.cli].name, version, facts, engine, {}))


def write(golden: Golden) -> None:
    """The session with the traces that the code makes of it now."""
    expected = {rules: told(golden.built(rules)) for rules in BUILT_IN}
    path = FOLDER / f"{golden.name}.json"
    path.write_bytes(_lines(asdict(golden) | {"expected": expected}))
    calls = sum(f["kind"] == "captured" for f in golden.facts)
    sys.stdout.write(f"{path.name}: {calls} calls, {path.stat().st_size:,} bytes\n")


def _lines(body: dict[str, Any]) -> bytes:
    """One fact and one rule's traces a line: small, and a difference can be read."""

    def one(value: Any) -> str:
        return orjson.dumps(value).decode()

    facts = ",\n".join(map(one, body["facts"]))
    expected = ",\n".join(f"{one(k)}:{one(v)}" for k, v in body["expected"].items())
    head = ",\n".join(f"{one(k)}:{one(body[k])}" for k in ("cli", "version", "engine"))
    return f'{{{head},\n"facts":[\n{facts}\n],\n"expected":{{\n{expected}\n}}}}\n'.encode()


if __name__ == "__main__":
    if sys.argv[1:] == ["--again"]:
        for file in golden_files():
            write(Golden.load(file))
    else:
        main(lambda job: not sys.argv[1:] or job.id in sys.argv[1:])
