"""`polar run`, `submit`, `task`: hand in work, watch it, look at what became of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from polar_common.errors import ConfigError, PolarError
from polar_common.house import find_house
from polar_common.ids import new_id
from polar_common.taskfile import load_tasks

from .house import _DATA, DataOption, JsonOption
from .ingest import Ingest
from .output import console, emit, table, warn
from .sessions import runs_of
from .waiting import Interrupted, interruptible, watch

__all__ = ["Ingest", "run", "submit", "task"]

_JUDGED = ("passed", "failed", "no_action", "budget_exhausted")
_SHOWN = 20
_NAMED = 8
RunOption = Annotated[str, typer.Option("--run", help="Name of the run; by default the file's, else a new one.")]


def _handed_in(file: Path, run: str, data: Path) -> tuple[Ingest, str, list[dict[str, Any]]]:
    named, tasks = load_tasks(file)
    ingest = Ingest(find_house(data if data != _DATA else None))
    name = run or named or f"run-{new_id()[:8]}"
    before = ingest.tasks_of(name)
    try:
        with interruptible():
            handed_in = ingest.submit(name, tasks)
    except Interrupted as stopped:
        warn(f"what run {name} has taken goes on; the same command with --run {name} hands in the rest")
        raise typer.Exit(stopped.code) from None
    repeated = len(handed_in) - (ingest.tasks_of(name) - before)
    if before and repeated > 0:
        warn(f"handed in before under run {name}: {repeated} of {len(handed_in)} tasks; they don't run again")
    return ingest, name, handed_in


def submit(
    file: Annotated[Path, typer.Argument(help="Task file (YAML).")],
    run: RunOption = "",
    data: DataOption = _DATA,
    json: JsonOption = False,
) -> None:
    """Hand in a task file and return. The same file under the same run is the same work: nothing runs twice.

    Example: polar submit tasks.yaml --run nightly
    """
    _, name, tasks = _handed_in(file, run, data)
    if json:
        emit({"run": name, "tasks": tasks})
        return
    table(f"run {name}", ["id", "task", "sessions"], [[t["id"], t["task"], len(t["sessions"])] for t in tasks])


def run(
    file: Annotated[Path, typer.Argument(help="Task file (YAML).")],
    run: RunOption = "",
    timeout_s: Annotated[float, typer.Option("--timeout", help="Give up waiting after this many seconds.")] = 86_400,
    data: DataOption = _DATA,
    json: JsonOption = False,
) -> None:
    """Hand in a task file, watch it to the end, and sum it up.

    Exit code 0: every session says something of the model (passed, failed, no_action, budget_exhausted). 1: one ended
    as harness_error, infra_error or cancelled, or not everything ended in time.

    Example: polar run examples/quickstart/tasks.yaml
    """
    ingest, name, tasks = _handed_in(file, run, data)
    try:
        with interruptible():
            finished = watch(ingest, name, sum(len(t["sessions"]) for t in tasks), timeout_s, quiet=json)
    except Interrupted as stopped:
        _goes_on(ingest, name, tasks)
        raise typer.Exit(stopped.code) from None
    rows = [_task_row(ingest, t) for t in tasks]
    if json:
        for row in rows:
            emit({"run": name, **row})
    else:
        _print_summary(name, rows)
    if not finished:
        _goes_on(ingest, name, tasks)
    if not finished or any(outcome not in _JUDGED for row in rows for outcome in row["outcomes"]):
        raise typer.Exit(1)


def _goes_on(ingest: Ingest, run: str, tasks: list[dict[str, Any]]) -> None:
    """What is left behind by who stops watching, and how to end it."""
    try:
        state = ingest.get(f"/v1/runs/{run}")
    except (PolarError, httpx.HTTPError):
        state = {"finished": False, "phases": {}}
    if state["finished"]:
        return
    live = ", ".join(f"{n} {phase}" for phase, n in sorted(state["phases"].items()))
    warn(f"run {run} goes on{f' ({live})' if live else ''}; the same command with --run {run} watches it again")
    warn(f"to end it, cancel its tasks ({', '.join(t['id'] for t in tasks[:_NAMED])}{' …' * (len(tasks) > _NAMED)}):")
    warn(f"  polar task {tasks[0]['id']} --run {run} --cancel")


def _task_row(ingest: Ingest, handed_in: dict[str, Any]) -> dict[str, Any]:
    """Sums over a task's sessions, each read from the log."""
    sessions = [ingest.get(f"/v1/sessions/{s}") for s in handed_in["sessions"]]
    builds = [b for s in sessions for b in s["builds"] if b["build"] == "live"]
    rewards = [s["reward"] for s in sessions if s["reward"] is not None]
    spans = sum(b["exact_spans"] + b["drifted_spans"] for b in builds)
    seconds = [a["run_s"] for s in sessions for a in s["attempts"] if a["run_s"] is not None]
    return {
        "id": handed_in["id"],
        "task": handed_in["task"],
        "sessions": len(sessions),
        "outcomes": dict(Counter(s["outcome"] or s["phase"] for s in sessions)),
        "rewards": rewards,
        "attempts": sum(len(s["attempts"]) for s in sessions),
        "completions": sum(s["completions"].get("captured", 0) for s in sessions),
        "traces": sum(b["traces"] for b in builds),
        "exact_spans": sum(b["exact_spans"] for b in builds),
        "exact_share": sum(b["exact_spans"] for b in builds) / spans if spans else None,
        "sampled_tokens": sum(b["sampled_tokens"] for b in builds),
        "mean_run_s": sum(seconds) / len(seconds) if seconds else None,
        "session_ids": handed_in["sessions"],
        "not_passed": [_why(s) for s in sessions if s["outcome"] != "passed"],
    }


def _why(session: dict[str, Any]) -> dict[str, Any]:
    """What there is to say of a session that didn't pass: its own cause, else its last attempt's, else the judge's."""
    attempt = session["attempts"][-1] if session["attempts"] else {}
    judged = (session["evaluation"] or {}).get("detail", "")
    last_words = attempt.get("log_tail", "").strip().rpartition("\n")[2]
    # The cause and its own words; what the judge said of the remains comes after them.
    known = next((x for x in (session, attempt) if x.get("cause")), {})
    detail = known.get("detail") or session["detail"] or attempt.get("detail", "")
    return {
        "session": session["session"],
        "outcome": session["outcome"] or session["phase"],
        "cause": known.get("cause", ""),
        "detail": detail or judged or last_words,
    }


def _print_summary(run: str, rows: list[dict[str, Any]]) -> None:
    shown = []
    for row in rows:
        outcomes = "  ".join(f"{n} {name}" for name, n in sorted(row["outcomes"].items()))
        rewards = " ".join(f"{r:.2g}" for r in row["rewards"]) or "-"
        counts = [row["completions"], row["traces"], row["exact_share"], row["sampled_tokens"], row["mean_run_s"]]
        shown.append([row["id"], row["sessions"], outcomes, rewards, *counts])
    totals = [sum(r[k] for r in rows) for k in ("completions", "traces", "sampled_tokens", "exact_spans")]
    names = Counter[str]()
    for row in rows:
        names.update(row["outcomes"])
    everything = "  ".join(f"{n} {name}" for name, n in sorted(names.items()))
    every = [r for row in rows for r in row["rewards"]]
    mean = f"mean {sum(every) / len(every):.3f}" if every else "-"
    shown.append(
        ["all", sum(r["sessions"] for r in rows), everything, mean, totals[0], totals[1], None, totals[2], None]
    )
    heads = ["task", "sessions", "outcomes", "rewards", "calls", "traces", "exact", "tokens", "mean s"]
    table(f"run {run}", heads, shown)
    _print_not_passed(run, rows)


def _print_not_passed(run: str, rows: list[dict[str, Any]]) -> None:
    """Which sessions didn't pass and why: first those that say nothing about the model."""
    found = [(row["id"], why) for row in rows for why in row["not_passed"]]
    found.sort(key=lambda pair: pair[1]["outcome"] in _JUDGED)
    if not found:
        return
    shown = [[w["session"], id, w["outcome"], w["cause"], " ".join(w["detail"].split())[:200]] for id, w in found]
    table("not passed", ["session", "task", "outcome", "cause", "detail"], shown[:_SHOWN])
    if len(shown) > _SHOWN:
        console.print(f"… and {len(shown) - _SHOWN} more: polar session list --run {run}", markup=False)


def task(
    id: Annotated[str, typer.Argument(help="Polar's task id, or your own.")],
    run: Annotated[str, typer.Option("--run", help="The run of your own id, where several have it.")] = "",
    cancel: Annotated[bool, typer.Option("--cancel", help="Ask all its sessions to end.")] = False,
    data: DataOption = _DATA,
    json: JsonOption = False,
) -> None:
    """Show a task and its sessions, or cancel it.

    Example: polar task mend-greet --run quickstart
    """
    ingest = Ingest(find_house(data if data != _DATA else None))
    found = _found(ingest, id, run, data)
    if cancel:
        told = ingest.post(f"/v1/tasks/{found['task']}/cancel", {})
        if json:
            emit(told)
        else:
            console.print(f"asked to end: {told['requested']} of {told['sessions']} sessions", markup=False)
        return
    if json:
        emit(found)
        return
    title = f"{found['id']} ({found['task']}), run {found['run']}, harness {found['spec']['harness']['name']}"
    rows = [[s["session"], s["phase"], s["outcome"], s["reward"], s["attempts"], s["cause"]] for s in found["sessions"]]
    table(title, ["session", "phase", "outcome", "reward", "attempts", "cause"], rows)


def _found(ingest: Ingest, task: str, run: str, data: Path) -> dict[str, Any]:
    """A task by Polar's id, or by the user's own in its run; without one, in the only run that has it."""
    if not run and (found := ingest.find(f"/v1/tasks/{task}")) is not None:
        return found
    runs = [run] if run else runs_of(task, data)
    if len(runs) > 1:
        raise ConfigError(f"several runs have a task {task!r}; say which by --run: {', '.join(runs)}", "run")
    return ingest.get(f"/v1/tasks/{task}", **({"run": runs[0]} if runs else {}))
