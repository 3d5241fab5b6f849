"""The smoke task of a harness: what it is, where it runs, and what the log says of it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polar_common.bus import Bus
from polar_common.cli.ingest import Ingest
from polar_common.cli.output import warn
from polar_common.cli.waiting import watch
from polar_common.errors import ConfigError, PolarError
from polar_common.events import CompletionAborted, CompletionCaptured, Event
from polar_common.house.layout import Endpoint, find_house
from polar_common.ids import new_id
from polar_common.settings import inherited_environment
from polar_common.task_spec import EvaluatorSpec, HarnessSpec, Limits, TaskSpec
from polar_gateway.harnesses.base import Harness

__all__ = ["house_of", "jobs_of", "summary", "tried"]

INSTRUCTION = "Create hello.txt containing hi"
_NEEDS: dict[str, dict[str, Any]] = {"aider": {"files": ["hello.txt"]}}
_CANCEL_S = 20
_WITHOUT = ("command", "lm_eval")
"""These run what a user names; there is nothing they'd do by themselves."""
# Long enough for any harness's first prompt in the small vocabulary of the scripted engine.
_SETTINGS = {"POLAR_ENGINE_SCRIPT": "file", "POLAR_ENGINE_MAX_MODEL_LEN": "262144"}


def jobs_of(name: str, harness: Harness) -> list[tuple[str, TaskSpec]]:
    """The task, once for each API that can be chosen. `name` as the user gave it. Empty where there is none."""
    if harness.name in _WITHOUT:
        return []
    # One of a user's own needn't say which it speaks.
    apis = (harness.apis if "api" in harness.known_args else harness.apis[:1]) or ("any",)
    return [(api, _task(name, harness, api)) for api in apis]


def _task(name: str, harness: Harness, api: str) -> TaskSpec:
    args = dict(_NEEDS.get(harness.name, {}))
    if "api" in harness.known_args:
        args["api"] = api
    return TaskSpec(
        id=api,
        instruction=INSTRUCTION,
        harness=HarnessSpec(name=name, args=args),
        evaluator=EvaluatorSpec(command='test "$(cat hello.txt)" = hi'),
        # A small model may go on for ever; one that can do this needs a fraction.
        limits=Limits(attempt_s=600, session_s=900, attempts=1, calls=20, max_tokens_per_call=1024, total_tokens=4096),
    )


@contextlib.contextmanager
def house_of(data: Path | None) -> Iterator[tuple[Endpoint, bool]]:
    """The house that runs, or a temporary one (True) with the scripted engine, which is stopped at the end."""
    try:
        found = find_house(data)
    except ConfigError:
        if data is not None:
            raise
    else:
        yield found, False
        return
    with tempfile.TemporaryDirectory(prefix="polar-harness-") as directory:
        here = Path(directory) / "house"
        settings = [x for k, v in _SETTINGS.items() for x in ("--setting", f"{k}={v}")]
        try:
            _polar("up", "--detach", "--data", str(here), "--model", "tiny", *settings)
            yield find_house(here), True
        finally:
            _polar("down", "--data", str(here))


def _polar(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "polar_common.cli", *arguments, "--json"],
        env=inherited_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise PolarError(f"`polar {arguments[0]}`: {(done.stderr or done.stdout).strip()[-1500:]}")


def tried(
    house: Endpoint, name: str, harness: Harness, timeout_s: float, *, quiet: bool = False
) -> list[dict[str, Any]]:
    """Run the task over every API, telling how it goes unless `quiet`, and say what became of each. What it hands in
    is cancelled at the timeout and at an interrupt. Raises PolarError where a house doesn't answer."""
    jobs = jobs_of(name, harness)
    ingest = Ingest(house)
    run = f"harness-{harness.name.replace('_', '-')}-{new_id()[:8]}"
    try:
        handed_in = ingest.submit(run, [task for _, task in jobs])
        if not watch(ingest, run, len(jobs), timeout_s, quiet=quiet):
            warn(f"not over after {timeout_s:.0f} s; what still runs is cancelled")
            _cancel(ingest, run, jobs)
            watch(ingest, run, len(jobs), _CANCEL_S, quiet=True)
    except KeyboardInterrupt:
        # Nobody else wants these sessions.
        _cancel(ingest, run, jobs)
        warn(f"interrupted; the sessions of run {run} are cancelled")
        raise
    sessions = [ingest.get(f"/v1/sessions/{t['sessions'][0]}") for t in handed_in]
    events = asyncio.run(_events(house, [s["session"] for s in sessions]))
    return [
        {"harness": harness.name, "version": harness.version, "run": run, "api": api, **summary(session, told)}
        for (api, _), session, told in zip(jobs, sessions, events, strict=True)
    ]


def _cancel(ingest: Ingest, run: str, jobs: list[tuple[str, TaskSpec]]) -> None:
    for _, task in jobs:
        if (found := ingest.find(f"/v1/tasks/{task.id}?run={run}")) is not None:
            ingest.post(f"/v1/tasks/{found['task']}/cancel", {})


async def _events(house: Endpoint, sessions: list[str]) -> list[list[Event]]:
    bus = await Bus.connect(house.nats, "cli", wait_s=5.0)
    try:
        return [[s.event for s in await bus.read_session(session)] for session in sessions]
    finally:
        await bus.close()


def summary(session: dict[str, Any], events: list[Event]) -> dict[str, Any]:
    """What a session tells: `session` as ingest shows it, its events as the log has them."""
    calls = [e for e in events if isinstance(e, CompletionCaptured)]
    lost = [e for e in events if isinstance(e, CompletionAborted)]
    builds = [b for b in session["builds"] if b["build"] == "live"]
    spans = sum(b["exact_spans"] + b["drifted_spans"] for b in builds)
    exact = sum(b["exact_spans"] for b in builds) / spans if spans else None
    last = session["attempts"][-1] if session["attempts"] else {}
    code = last.get("exit_code")
    return {
        "session": session["session"],
        "calls": len(calls),
        "aborted": len(lost),
        "spoken": ", ".join(sorted({c.dialect for c in calls})) or "-",
        "streamed": all(c.stream for c in calls) if calls else None,
        "exit": code,
        "outcome": session["outcome"] or session["phase"],
        "exact": exact,
        "continued": sum(c.chain_class == "continued" for c in calls),
        "traces": sum(b["traces"] for b in builds),
        "seconds": last.get("run_s"),
        "ok": bool(calls) and code == 0 and exact == 1.0 and all(c.context_exact for c in calls),
        "detail": " ".join(filter(None, (last.get("cause"), last.get("detail")))),
    }
