"""Agent CLIs through a whole house, and what became of each: from the log, and independently from the engine's journal.

One house plays every part: a task's instruction carries orders for the scripted engine (`polar_engine.script`), so that
all CLIs and all variants of the job are tasks of one run.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from house_kit import Live, running_house
from tokenizers import Tokenizer

from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.cli.tasks import Ingest
from polar_common.events import CompletionAborted, CompletionCaptured, CompletionRejected, Event
from polar_common.house.layout import find_house
from polar_common.ids import FIRST_SEGMENT
from polar_common.settings import cache_dir
from polar_reconstructor.traces import Read, find_traces
from polar_render.messages import Text
from polar_render.records import Echo, ResolvedCompletion, blobs_needed, resolve_session

PROBE = 4
"""Prompts this short are the proxy asking the engine what it can."""


@dataclass(frozen=True)
class Cli:
    """A harness as a task names it."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    sub_agents: Literal["none", "named", "nameless"] = "none"
    """Whether it has any, and whether its requests tell them apart."""
    role: str = "subagent"
    """Theirs, as the scripted engine asks for them; that of a harness which has only one kind."""
    sides: int = 0
    """Calls beside the conversation (a title)."""
    additions: frozenset[str] = frozenset()
    """What its contexts hold beside its messages."""


@dataclass(frozen=True)
class Variant:
    """What the engine is told to do, and what that makes of the job."""

    script: str
    faults: str = ""
    files: tuple[str, ...] = ("hello.txt",)

    @property
    def broken(self) -> int:
        return len(self.faults.split(",")) if self.faults else 0


PI = "pi"
CLIS = {
    "pi-chat": Cli(PI, {"api": "openai-chat"}),
    "pi-responses": Cli(PI, {"api": "openai-responses"}),
    "pi-anthropic": Cli(PI, {"api": "anthropic"}),
    "pi-google": Cli(PI, {"api": "google"}),
    "claude": Cli("claude_code", sub_agents="named", role="general-purpose", additions=frozenset({"stripped_header"})),
    "codex": Cli("codex", sub_agents="named"),
    "qwen": Cli("qwen_code", sub_agents="nameless", role="general-purpose"),
    "gemini": Cli("gemini_cli", sub_agents="nameless", role="generalist"),
    "opencode": Cli("opencode", sub_agents="named", role="general", sides=1),
}
VARIANTS = {
    "plain": Variant("file"),
    "twotools": Variant("file,twotools,spaced,split", files=("hello.txt", "second.txt")),
    "think": Variant("file,think,split"),
    "subagents": Variant("file,subagents"),
    # Before the first answer, and within the last one's words.
    "faults": Variant("file", faults="500-1,429-2,cut-4"),
    # Within thinking, and within a tool call.
    "cut": Variant("file,think", faults="cut-1,late-2"),
}


@dataclass(frozen=True)
class Job:
    cli: str
    variant: str

    @property
    def id(self) -> str:
        return f"{self.cli}-{self.variant}"


def task_of(job: Job, cli: Cli, variant: Variant) -> dict[str, Any]:
    orders = f"polar.script={variant.script} polar.job={job.id}"
    if variant.faults:
        orders += f" polar.faults={variant.faults}"
    test = " && ".join(f'test "$(cat {name})" = hi' for name in variant.files)
    return {
        "id": job.id,
        "instruction": f"Create hello.txt containing hi. {orders}",
        "harness": {"name": cli.name, "args": cli.args},
        "evaluator": {"kind": "command", "command": test},
        "limits": {"attempt_s": 300, "session_s": 500, "attempts": 1, "calls": 40},
    }


@dataclass
class Told:
    """One session as the log has it, and the engine's own account of it."""

    job: Job
    row: dict[str, Any]
    shown: dict[str, Any]
    calls: list[ResolvedCompletion]
    aborted: list[CompletionAborted]
    rejected: list[CompletionRejected]
    traces: list[Read]
    excluded: dict[str, str]
    journal: dict[str, dict[str, Any]]
    tokenizer: Tokenizer

    @cached_property
    def texts(self) -> dict[str, str]:
        """Prompts by completion, as the engine saw them."""
        return {
            name: self.tokenizer.decode(entry["prompt"], skip_special_tokens=False)
            for name, entry in self.journal.items()
            if "prompt" in entry
        }

    def turns(self, name: str) -> int:
        """Answers that the prompt of a call shows."""
        return self.texts[name].count("<|im_start|>assistant\n") - 1

    def continues(self, name: str) -> bool:
        """Whether the prompt is, id for id, what an earlier call had and sampled, and so on to the first one."""
        prompt, turns = self.journal[name]["prompt"], self.turns(name)
        if turns == 0:
            return True
        for other, entry in self.journal.items():
            if other != name and "sampled" in entry and self.turns(other) < turns:
                before = entry["prompt"] + entry["sampled"]
                if prompt[: len(before)] == before and self.turns(other) == turns - 1:
                    return self.continues(other)
        return False

    def shares(self) -> dict[str, tuple[int, int]]:
        """exact, faithful, continued: how many of how many."""
        spans = [s for t in self.traces for s in t.trace.spans]
        extending = [c.completion for c in self.calls if self.turns(c.completion)]
        events = [c.event for c in self.calls]
        return {
            "exact": (
                sum(e.context_exact is True for e in events) + sum(s.context_exact for s in spans),
                len(events) + len(spans),
            ),
            "faithful": (
                sum(e.context_faithful for e in events) + sum(s.context_faithful for s in spans),
                len(events) + len(spans),
            ),
            "continued": (sum(map(self.continues, extending)), len(extending)),
        }


def unseen(call: ResolvedCompletion, prompt: str) -> list[str]:
    """Texts of the harness's messages that the prompt doesn't show, in their order."""
    missing, at = [], 0
    for message in call.messages:
        for part in () if isinstance(message, Echo) else message.parts:
            if isinstance(part, Text) and (wanted := part.text.strip()):
                found = prompt.find(wanted, at)
                if found < 0:
                    missing.append(wanted)
                else:
                    at = found + len(wanted)
    return missing


def jobs_of(*clis: str) -> list[Job]:
    """Every variant of each of them that it has."""
    every = [Job(cli, variant) for variant in VARIANTS for cli in clis]
    return [j for j in every if j.variant != "subagents" or CLIS[j.cli].sub_agents != "none"]


@contextlib.contextmanager
def cli_house() -> Iterator[tuple[Live, Path]]:
    """A house whose scripted engine takes orders, and its journal."""
    settings = {
        "ENGINE_SCRIPT": "file,orders",
        # Long enough for the longest first prompt in a vocabulary of 512; a token at a time, so that streams stream.
        "ENGINE_MAX_MODEL_LEN": "262144",
        "ENGINE_SCRIPT_TOKEN_MS": "1",
    }
    with tempfile.TemporaryDirectory(prefix="polar-clis-") as directory:
        journal = Path(directory) / "journal.jsonl"
        options = [x for k, v in settings.items() for x in ("--setting", f"POLAR_{k}={v}")]
        options += ["--setting", f"POLAR_ENGINE_JOURNAL={journal}", "--slots", "3"]
        with running_house(Path(directory) / "house", "--model", "tiny", *options) as live:
            yield live, journal


def run_jobs(live: Live, directory: Path, run: str, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """All jobs as one task file, to their end; their summary rows."""
    path = directory / f"{run}.yaml"
    path.write_text(yaml.safe_dump({"tasks": [task_of(j, CLIS[j.cli], VARIANTS[j.variant]) for j in jobs]}))
    return live.polar("run", str(path), "--run", run, "--timeout", "900", timeout=960)


async def tell(live: Live, jobs: Iterable[Job], rows: list[dict[str, Any]], journal: Path) -> dict[Job, Told]:
    """Everything about each job's session."""
    entries = read_journal(journal)
    tokenizer = Tokenizer.from_file(str(next((cache_dir() / "models").glob("tiny-*/tokenizer.json"))))
    by_id = {row["id"]: row for row in rows}
    house = find_house(live.data)
    bus = await Bus.connect(house.nats, "test/clis")
    found = {}
    try:
        for job in jobs:
            row = by_id[job.id]
            found[job] = await _told(bus, live, job, row, entries, tokenizer)
    finally:
        await bus.close()
    return found


async def _told(
    bus: Bus, live: Live, job: Job, row: dict[str, Any], entries: dict[str, dict[str, Any]], tokenizer: Tokenizer
) -> Told:
    session = row["session_ids"][0]
    events: list[Event] = [s.event for s in await bus.read_session(session)]
    captured = [e for e in events if isinstance(e, CompletionCaptured)]
    blobs = Blobs(bus, FIRST_SEGMENT)
    calls = resolve_session(captured, {r.sha256: await blobs.get(r) for r in blobs_needed(captured)})
    aborted = [e for e in events if isinstance(e, CompletionAborted)]
    names = [e.completion for e in events if isinstance(e, CompletionCaptured | CompletionAborted)]
    traces = await find_traces(bus, session, "live") if row["traces"] else []
    shown = Ingest(find_house(live.data)).get(f"/v1/sessions/{session}")
    builds = [b for b in shown["builds"] if b["build"] == "live"]
    return Told(
        job=job,
        row=row,
        shown=shown,
        calls=list(calls.values()),
        aborted=aborted,
        rejected=[e for e in events if isinstance(e, CompletionRejected)],
        traces=traces,
        excluded=builds[0]["excluded"] if builds else {},
        journal={n: e for n, e in entries.items() if n in names},
        tokenizer=tokenizer,
    )


def read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """The engine's account by completion, in order of time; a fault and the answer it broke are one entry."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if len(entry.get("prompt", "fault")) <= PROBE:
            continue
        found.setdefault(entry["request"].rpartition("-")[2], {}).update(entry)
    return found


def same_ids(left: Sequence[int], right: Any) -> bool:
    return bool(np.array_equal(np.asarray(left, dtype=np.int32), right))
