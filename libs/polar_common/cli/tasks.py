"""`polar run`, `submit`, `task`, `session`: hand in work, watch it, look at what became of it."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from polar_common.errors import ConfigError, PolarError
from polar_common.house import find_house
from polar_common.house.layout import Endpoint
from polar_common.ids import new_id
from polar_common.task_spec import TaskSpec
from polar_common.taskfile import load_tasks

from .house import _DATA, DataOption, JsonOption
from .output import console, emit, table

__all__ = ["run", "session", "submit", "task"]

RunOption = Annotated[str, typer.Option("--run", help="Name of the run; by default the file's, else a new one.")]
_CHUNK = 50


class Ingest:
    """The HTTP client of ingest."""

    def __init__(self, where: Endpoint) -> None:
        self._client = httpx.Client(base_url=where.ingest, headers=where.headers, timeout=60)

    def get(self, path: str, **params: str) -> dict[str, Any]:
        return self._body(self._client.get(path, params=params))

    def post(self, path: str, body: object) -> dict[str, Any]:
        return self._body(self._client.post(path, json=body))

    def submit(self, run: str, tasks: list[TaskSpec], wait_s: float = 600) -> list[dict[str, Any]]:
        """Hand in all tasks; a full house is asked again after the time it names."""
        done: list[dict[str, Any]] = []
        deadline = time.monotonic() + wait_s
        for start in range(0, len(tasks), _CHUNK):
            body = {"run": run, "tasks": [t.model_dump(mode="json") for t in tasks[start : start + _CHUNK]]}
            while True:
                answer = self._client.post("/v1/tasks", json=body)
                if answer.status_code != 429 or time.monotonic() > deadline:
                    break
                time.sleep(min(30.0, float(answer.headers.get("retry-after", "1"))))
            done += self._body(answer)["tasks"]
        return done

    @staticmethod
    def _body(answer: httpx.Response) -> dict[str, Any]:
        try:
            body: dict[str, Any] = answer.json()
        except ValueError as error:
            raise PolarError(f"{answer.request.url}: {answer.status_code} {answer.text[:200]}") from error
        if answer.is_success:
            return body
        told = body.get("error", {})
        raise ConfigError(f"{told.get('message', answer.text)} ({answer.status_code})", str(told.get("where", "")))


def _handed_in(file: Path, run: str, data: Path) -> tuple[Ingest, str, list[dict[str, Any]]]:
    named, tasks = load_tasks(file)
    ingest = Ingest(find_house(data if data != _DATA else None))
    name = run or named or f"run-{new_id()[:8]}"
    return ingest, name, ingest.submit(name, tasks)


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
    """Hand in a task file, watch it to the end, and sum it up. Exit code 1 if not everything ended in time.

    Example: polar run examples/quickstart/tasks.yaml
    """
    ingest, name, tasks = _handed_in(file, run, data)
    finished = _watch(ingest, name, sum(len(t["sessions"]) for t in tasks), timeout_s, quiet=json)
    rows = [_task_row(ingest, t) for t in tasks]
    if json:
        for row in rows:
            emit({"run": name, **row})
    else:
        _print_summary(name, rows)
    if not finished:
        raise typer.Exit(1)


def _watch(ingest: Ingest, run: str, sessions: int, timeout_s: float, *, quiet: bool) -> bool:
    """Progress until every group is closed. False at the timeout."""
    deadline = time.monotonic() + timeout_s
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=quiet, transient=True) as progress:
        bar = progress.add_task("sessions", total=sessions)
        told = ""
        while time.monotonic() < deadline:
            state = ingest.get(f"/v1/runs/{run}")
            ended = sum(state["outcomes"].values())
            live = "  ".join(f"{n} {phase}" for phase, n in sorted(state["phases"].items()))
            progress.update(bar, completed=ended, description=live or "closing groups")
            # A pipe shows no bar: a line whenever something changed keeps a log readable.
            if not console.is_terminal and not quiet and (line := f"{ended}/{sessions} ended  {live}") != told:
                console.print(line, markup=False)
                told = line
            if state["finished"]:
                return True
            time.sleep(0.5)
    return False


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


def task(
    id: Annotated[str, typer.Argument(help="Polar's task id, or your own id together with --run.")],
    run: RunOption = "",
    cancel: Annotated[bool, typer.Option("--cancel", help="Ask all its sessions to end.")] = False,
    data: DataOption = _DATA,
    json: JsonOption = False,
) -> None:
    """Show a task and its sessions, or cancel it.

    Example: polar task mend-greet --run quickstart
    """
    ingest = Ingest(find_house(data if data != _DATA else None))
    params = {"run": run} if run else {}
    if cancel:
        found = ingest.get(f"/v1/tasks/{id}", **params)
        emit(ingest.post(f"/v1/tasks/{found['task']}/cancel", {}))
        return
    found = ingest.get(f"/v1/tasks/{id}", **params)
    if json:
        emit(found)
        return
    title = f"{found['id']} ({found['task']}), run {found['run']}, harness {found['spec']['harness']['name']}"
    rows = [[s["session"], s["phase"], s["outcome"], s["reward"], s["attempts"], s["cause"]] for s in found["sessions"]]
    table(title, ["session", "phase", "outcome", "reward", "attempts", "cause"], rows)


session = typer.Typer(no_args_is_help=True, help="Look at a session, or cancel it.")


@session.command("show")
def session_show(
    id: Annotated[str, typer.Argument(help="Session id.")], data: DataOption = _DATA, json: JsonOption = False
) -> None:
    """Show every attempt with its times, exit and cause, the evaluation, completions and builds.

    Example: polar session show s1-abcdefghij-0
    """
    found = Ingest(find_house(data if data != _DATA else None)).get(f"/v1/sessions/{id}")
    if json:
        emit(found)
        return
    console.print(f"{id}  {found['phase']}  outcome {found['outcome']}  reward {found['reward']}", markup=False)
    for key in ("cause", "detail"):
        if found[key]:
            console.print(f"{key}: {found[key]}", markup=False)
    for attempt in found["attempts"]:
        _show_attempt(attempt)
    if found["evaluation"]:
        e = found["evaluation"]
        console.print(
            f"evaluated by {e['evaluator']} in {e['eval_s']:.1f} s: {e['outcome']} {e['reward']}", markup=False
        )
        if e["detail"]:
            console.print(e["detail"], markup=False)
    console.print(
        "completions: " + (", ".join(f"{n} {k}" for k, n in found["completions"].items()) or "none"), markup=False
    )
    for build in found["builds"]:
        _show_build(build)


def _show_attempt(attempt: dict[str, Any]) -> None:
    console.print(
        f"attempt {attempt['attempt']}  {attempt['phase']}  exit {attempt['exit_code']}  "
        f"{attempt['fault']} {attempt['cause']} {attempt['detail']}".rstrip(),
        markup=False,
    )
    table("", ["event", "at"], [[name, at] for name, at in attempt["times"].items()])
    if attempt["log_tail"]:
        console.print(attempt["log_tail"][-1500:], markup=False, style="dim")


def _show_build(build: dict[str, Any]) -> None:
    if build["failed"]:
        console.print(f"build {build['build']} failed: {build['failed']}", markup=False)
        return
    console.print(
        f"build {build['build']}: {build['traces']} traces, {build['trained_completions']} completions trained, "
        f"{build['exact_spans']} exact and {build['drifted_spans']} drifted spans",
        markup=False,
    )
    for completion, reason in build["excluded"].items():
        console.print(f"  excluded {completion}: {reason}", markup=False)


@session.command("cancel")
def session_cancel(id: Annotated[str, typer.Argument(help="Session id.")], data: DataOption = _DATA) -> None:
    """Ask a session to end; what it captured stays in the log.

    Example: polar session cancel s1-abcdefghij-0
    """
    emit(Ingest(find_house(data if data != _DATA else None)).post(f"/v1/sessions/{id}/cancel", {}))
