"""What the chaos run counts by itself, from what the engine and the harnesses wrote down, beside `polar verify`.

The log is read raw here: columns and references are resolved by a few lines of this file's own, so that a mistake in
the library's doesn't excuse itself.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import zstandard

from polar_common.bus import Bus, scan

__all__ = ["Count", "count"]


@dataclass(slots=True)
class Count:
    """`lost`, `doubled`, `stuck`: one line each. `facts`: what there was."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    facts: Counter[str] = field(default_factory=Counter)
    recoveries_s: list[float] = field(default_factory=list)
    """From a gateway's kill to the `lost` of each attempt that it held."""


@dataclass(slots=True)
class _Log:
    accepted: dict[str, list[str]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    captured: dict[str, dict[str, Any]] = field(default_factory=dict)
    closed: Counter[str] = field(default_factory=Counter)
    built: Counter[str] = field(default_factory=Counter)
    trained: Counter[str] = field(default_factory=Counter)
    blobs: dict[str, bytes] = field(default_factory=dict)
    subjects: Counter[str] = field(default_factory=Counter)
    owners: dict[tuple[str, str], str] = field(default_factory=dict)
    lost_at: dict[tuple[str, str], float] = field(default_factory=dict)


async def count(
    bus: Bus,
    tasks: dict[str, list[str]],
    callbacks: dict[str, Counter[bytes]],
    journals: Path,
    engine: Path,
    killed_at: dict[int, float],
) -> Count:
    """`tasks`: what ingest acknowledged, task → sessions. `callbacks`: key → bodies received. `killed_at`: by pid."""
    log = await _read(bus)
    found = Count()
    _ends(found, log, tasks)
    _harnesses(found, log, _lines(sorted(journals.glob("*.jsonl"))))
    _engine(found, log, _lines([engine]))
    for attempt, at in log.lost_at.items():
        # A gateway's name holds its process id.
        pid = log.owners.get(attempt, "").split("-")[-2:-1]
        if pid and (killed := killed_at.get(int(pid[0]))):
            found.recoveries_s.append(at - killed)
    for subject, times in log.subjects.items():
        if times > 1:
            found.doubled.append(f"{subject} holds {times} messages")
    for completion, times in log.trained.items():
        if times > 1:
            found.doubled.append(f"completion {completion} is trained {times} times")
    for task in tasks:
        bodies = callbacks.get(f"{task}.closed", Counter())
        if not bodies:
            found.stuck.append(f"{task}: no callback")
        if len(bodies) > 1:
            found.doubled.append(f"{task}: {len(bodies)} different callbacks under one key")
        found.facts["callback_repeats"] += sum(bodies.values()) - 1 if bodies else 0
    return found


async def _read(bus: Bus) -> _Log:
    log = _Log()
    async for stored in scan(bus, "POLAR_BLOBS_s1", [">"]):
        log.subjects[stored.subject] += 1
        log.blobs[stored.subject.split(".")[3]] = stored.body
    async for stored in scan(bus, "POLAR_TRACES", [">"]):
        log.subjects[stored.subject] += 1
        body = orjson.loads(stored.body)
        for span in body.get("spans", ()) if isinstance(body.get("spans"), list) else ():
            log.trained[span["completion"]] += bool(span["trained"])
    async for stored in scan(bus, "POLAR_EVENTS_s1", [">"]):
        log.subjects[stored.subject] += 1
        _event(log, stored.subject.split("."), orjson.loads(stored.body), stored.time.timestamp())
    return log


def _event(log: _Log, tokens: list[str], body: dict[str, Any], at: float) -> None:
    match tokens[3:]:
        case ["task", task, "accepted"]:
            log.accepted[task] = body["sessions"]
        case ["session", session, "0", "completed" | "failed" | "cancelled"]:
            log.ends[session] += 1
        case ["session", session, attempt, "claimed"]:
            log.owners[session, attempt] = str(body["gateway"])
        case ["session", session, attempt, "lost"]:
            log.lost_at[session, attempt] = at
        case ["completion", session, attempt, completion, "captured"]:
            log.captured[completion] = body | {"where": (session, int(attempt))}
        case ["build", "live", session, _]:
            log.built[session] += 1
        case ["group", task, "closed"]:
            log.closed[task] += 1


def _lines(paths: Iterable[Path]) -> Iterable[dict[str, Any]]:
    for path in paths:
        for line in path.read_bytes().splitlines():
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError:
                # The last line of a process that was killed in mid-write; what it says wasn't seen by anybody.
                continue


def _ends(found: Count, log: _Log, tasks: dict[str, list[str]]) -> None:
    for task, sessions in tasks.items():
        if log.accepted.get(task) != sessions:
            found.lost.append(f"task {task} was acknowledged and is on the log as {log.accepted.get(task)}")
        for session in sessions:
            if log.ends[session] == 0:
                found.stuck.append(f"{session} has no end")
            if log.ends[session] > 1:
                found.doubled.append(f"{session} has {log.ends[session]} ends")
            if log.built[session] == 0:
                found.stuck.append(f"{session} isn't built")
            if log.built[session] > 1:
                found.doubled.append(f"{session} is built {log.built[session]} times")
        if log.closed[task] == 0:
            found.stuck.append(f"group {task} isn't closed")
    found.facts["sessions"] = sum(map(len, tasks.values()))
    found.facts["events"] = sum(n for s, n in log.subjects.items() if s.startswith("polar.events."))


def _harnesses(found: Count, log: _Log, lines: Iterable[dict[str, Any]]) -> None:
    """Whatever a harness could act upon is on the log, in its session and attempt."""
    calls: dict[str, set[tuple[str, int, int]]] = {}
    for line in lines:
        found.facts[f"harness_{line['event']}"] += 1
        if line["event"] != "saw":
            continue
        completion = line["id"].removeprefix("chatcmpl-")
        where = (line["session"], line["attempt"])
        captured = log.captured.get(completion)
        if captured is None or captured["where"] != where:
            found.lost.append(f"{where} saw the end of {completion}; the log has {captured and captured['where']}")
        elif line["tokens"] is not None and line["tokens"] != captured["sampled"]["n"]:
            found.lost.append(f"{completion}: {line['tokens']} tokens seen, {captured['sampled']['n']} on the log")
        calls.setdefault(completion, set()).add((*where, line["turn"]))
    for completion, places in calls.items():
        if len(places) > 1:
            found.doubled.append(f"{completion} answered different calls: {sorted(places)}")


def _engine(found: Count, log: _Log, lines: Iterable[dict[str, Any]]) -> None:
    """What the log says was sampled, in which context, is what the engine says."""
    said = {line["request"].removeprefix("generate-tokens-"): line for line in lines if line["finish"] != "abort"}
    found.facts["engine_answers"] = sum(len(line["prompt"]) > 1 for line in said.values())
    found.facts["captured"] = len(log.captured)
    contexts: dict[str, list[int]] = {}
    for completion, body in log.captured.items():
        sampled = _ids(log, body["sampled"])
        contexts[completion] = prompt = _prompt(log, body, contexts)
        contexts[completion] = [*prompt, *sampled]
        engine = said.get(completion)
        if engine is None:
            found.lost.append(f"{completion} is on the log, and the engine never said it")
        elif engine["sampled"] != sampled:
            found.lost.append(f"{completion}: the engine sampled other ids")
        elif engine["prompt"] != prompt:
            found.lost.append(f"{completion}: the engine saw another prompt")


def _ids(log: _Log, column: dict[str, Any]) -> list[int]:
    blob = column.get("blob")
    raw = log.blobs[blob["sha256"]] if blob else base64.b64decode(column["data"])
    return [int(i) for i in np.frombuffer(zstandard.decompress(raw), dtype="<i4")]


def _prompt(log: _Log, body: dict[str, Any], contexts: dict[str, list[int]]) -> list[int]:
    """`captured` is in the log's order, so whatever is named comes before."""
    prompt = body["prompt"]
    before: list[int] = []
    if prompt.get("via"):
        for name in prompt["via"]:
            earlier = log.captured[name]
            before += _ids(log, earlier["prompt"]["new"]) + _ids(log, earlier["sampled"])
    elif prompt.get("base"):
        before = contexts[prompt["base"]]
    return before[: prompt.get("shared", 0)] + _ids(log, prompt["new"])
