"""`polar session`: find sessions, look at one, cancel one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from polar_common.exclusions import meaning
from polar_common.house import find_house

from .house import _DATA, DataOption, JsonOption
from .ingest import Ingest
from .output import console, emit, table
from .query import ask, quoted

__all__ = ["runs_of", "session"]

session = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Find sessions, look at one, or cancel one.\n\nExample: polar session list --run nightly",
)
# A task's own id isn't a column: it's in the task's first event.
_NAMES = "SELECT task, JSONExtractString(body, 'spec', 'id') AS id FROM events WHERE kind = 'task.accepted'"


@session.command("list")
def session_list(
    run: Annotated[str, typer.Option("--run", help="Only those of this run.")] = "",
    task: Annotated[str, typer.Option("--task", help="Only those of this task: your own id, or Polar's.")] = "",
    outcome: Annotated[str, typer.Option("--outcome", help="Only those that ended so, e.g. harness_error.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="At most so many, the newest first.")] = 100,
    data: DataOption = _DATA,
    json: JsonOption = False,
) -> None:
    """List sessions, the newest first: outcome, reward, cause.

    Example: polar session list --run nightly --task mend
    """
    wanted = [
        *([f"s.run = {quoted(run)}"] if run else []),
        *([f"(s.task = {quoted(task)} OR n.id = {quoted(task)})"] if task else []),
        *([f"s.outcome = {quoted(outcome)}"] if outcome else []),
    ]
    columns, rows = ask(
        f"""SELECT s.session AS session, n.id AS task, s.run AS run, s.state AS state, s.outcome AS outcome,
                   s.reward AS reward, s.cause AS cause, s.attempts AS attempts, s.traces AS traces
            FROM sessions AS s LEFT JOIN ({_NAMES}) AS n ON n.task = s.task
            WHERE {" AND ".join(wanted) or "1"} ORDER BY s.accepted DESC, s.task, s.idx LIMIT {limit + 1}""",
        data,
    )
    if json:
        for row in rows[:limit]:
            emit(dict(zip(columns, row, strict=True)))
        return
    if not rows:
        console.print("no such sessions" if wanted else "no sessions", markup=False)
        return
    table("", columns, rows[:limit])
    if len(rows) > limit:
        console.print("… and more: --limit", markup=False)


def runs_of(task: str, data: DataOption = _DATA) -> list[str]:
    """The runs that have a task of that id of a user's own."""
    found = ask(
        f"SELECT DISTINCT run FROM events WHERE kind = 'task.accepted' "
        f"AND JSONExtractString(body, 'spec', 'id') = {quoted(task)} ORDER BY run",
        data,
    )
    return [str(run) for [run] in found[1]]


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
    console.print(
        f"{id}  {found['phase']}  outcome {found['outcome'] or '-'}  reward {_number(found['reward'])}", markup=False
    )
    for key in ("cause", "detail"):
        if found[key]:
            console.print(f"{key}: {found[key]}", markup=False)
    for attempt in found["attempts"]:
        _show_attempt(attempt)
    if found["evaluation"]:
        e = found["evaluation"]
        console.print(
            f"evaluated by {e['evaluator']} in {e['eval_s']:.1f} s: {e['outcome']}, reward {_number(e['reward'])}",
            markup=False,
        )
        if e["detail"] and e["detail"] != found["detail"]:
            console.print(e["detail"], markup=False)
    console.print(
        "completions: " + (", ".join(f"{n} {k}" for k, n in found["completions"].items()) or "none"), markup=False
    )
    for build in found["builds"]:
        _show_build(build)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _show_attempt(attempt: dict[str, Any]) -> None:
    code = "-" if attempt["exit_code"] is None else attempt["exit_code"]
    fault = f"{attempt['fault']} fault:" if attempt["fault"] not in ("", "none") else ""
    why = " ".join(filter(None, (fault, attempt["cause"], attempt["lost"], attempt["detail"])))
    console.print(f"attempt {attempt['attempt']}  {attempt['phase']}  exit {code}  {why}".rstrip(), markup=False)
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
        why = f"{reason} ({meaning(reason)})" if meaning(reason) else reason
        console.print(f"  not trained {completion}: {why}", markup=False)


@session.command("cancel")
def session_cancel(
    id: Annotated[str, typer.Argument(help="Session id.")], data: DataOption = _DATA, json: JsonOption = False
) -> None:
    """Ask a session to end; what it captured stays in the log.

    Example: polar session cancel s1-abcdefghij-0
    """
    told = Ingest(find_house(data if data != _DATA else None)).post(f"/v1/sessions/{id}/cancel", {})
    if json:
        emit(told)
    else:
        console.print("asked to end" if told["requested"] else "it has ended, or was asked before", markup=False)
