"""`polar replay`, `build`, `trace`, `export`: what builds there are, new ones from the log, and traces to look at."""

from __future__ import annotations

import os
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from polar_common.bus import Bus
from polar_common.cli.connect import log_url, with_bus
from polar_common.cli.output import console, emit, table, warn
from polar_common.errors import ConfigError
from polar_common.exclusions import meaning
from polar_common.permissions import ADMIN
from polar_common.settings import cache_dir
from polar_render.vocabulary import Vocabulary

from .builds import BuildSummary, Difference, check_held, diff, drop, summaries
from .export import format_of, write
from .origins import Archived, Log, Origin
from .pool import Processes
from .replay import Choice, Replay, Report
from .rules import load
from .settings import ReconstructorSettings
from .traces import Read, build_traces, closed_members, find_traces, find_trained, find_vocabulary, pieces
from .untrained import Untrained, find_untrained

__all__ = ["build", "export", "replay", "trace"]

DataOption = Annotated[Path | None, typer.Option("--data", help="The house's directory; by default $POLAR_DATA.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
BuildName = Annotated[str, typer.Argument(help="A build of `polar build list`.")]
BuildOption = Annotated[str, typer.Option("--build", help="Which build.")]

build = typer.Typer(help="Builds: runs of a rule set over the log.", no_args_is_help=True)
trace = typer.Typer(help="Traces: what a trainer gets.", no_args_is_help=True)

_LONG_LOG, _MOST_PROCESSES = 20_000, 4
_COLOURS = {"prompt": "dim", "context": "cyan", "sampled": "bold green", "masked": "yellow"}


def _time(text: str, option: str) -> datetime | None:
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is no ISO time", option) from error
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _times(since: str, until: str) -> tuple[datetime | None, datetime | None]:
    begin, end = _time(since, "since"), _time(until, "until")
    if begin is not None and end is not None and begin >= end:
        raise ConfigError(f"nothing lies between {since} and {until}", "since")
    return begin, end


def replay(
    name: Annotated[str, typer.Option("--build", help="Name of the new build.")],
    rules: Annotated[str, typer.Option(help="A built-in rule set or a YAML file.")] = "exact",
    run: Annotated[str, typer.Option(help="Only this run.")] = "",
    since: Annotated[str, typer.Option(help="Only sessions accepted from this ISO time on.")] = "",
    until: Annotated[str, typer.Option(help="Only sessions accepted before this ISO time.")] = "",
    session: Annotated[list[str] | None, typer.Option(help="Only this session; may be repeated.")] = None,
    archive: Annotated[
        Path | None, typer.Option("--from", help="Read this archive of `polar log export`, not the house's own log.")
    ] = None,
    rate: Annotated[float, typer.Option(min=0, help="Messages a second at most, beside live traffic.")] = 0.0,
    processes: Annotated[
        int | None, typer.Option(min=0, help="Build in so many processes, 0: in this one; by default as the log needs.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Build and check everything, publish nothing.")] = False,
    data: DataOption = None,
    json: JsonOption = False,
) -> None:
    """Build the log's sessions again, under any rules, as a new build that trainers and exports can use.

    Started again after an interruption, it goes on where it was. The same rules give the same trace ids.

    Example: polar replay --build merged --rules prefix_merging --run nightly
    """
    rule_set = load(rules)
    stored = None if archive is None else Archived(archive)
    choice = Choice(run, *_times(since, until), frozenset(session or ()))
    settings = ReconstructorSettings()
    columns = (TextColumn("replay"), BarColumn(), TextColumn("{task.fields[told]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=json or not console.is_terminal, transient=True) as bar:
        shown = bar.add_task("replay", total=None, told="")

        def progress(report: Report) -> None:
            told = f"{report.results['reconstructed']:,} sessions, {report.groups:,} groups"
            bar.update(shown, total=report.end, completed=report.position, told=told)

        async def work(bus: Bus) -> Report:
            origin = stored or Log(bus, settings.segment)
            count = await _processes(origin) if processes is None else processes
            url = log_url(data)
            builders = Processes(url, name, rule_set, count, dry=dry_run, archive=archive) if count else None
            try:
                options: dict[str, Any] = {"rate": rate, "budget": settings.reconstructor_build_bytes}
                made = Replay(bus, name, rule_set, origin, choice, builders=builders, dry=dry_run, **options)
                made.on_progress = progress
                return await made.run()
            finally:
                if builders is not None:
                    builders.close()

        report = with_bus(data, work)
    facts = {"build": name, "rules": rule_set.name, "rules_hash": report.rules_hash, "messages": report.messages}
    counted = ("reconstructed", "failed", "newer", "there", "open")
    facts |= {k: report.results[k] for k in counted} | {"groups": report.groups}
    facts["unreadable"] = report.results["unreadable"]
    _print(f"build {name}", [facts], json)
    if not any(report.results.values()):
        warn("no session was chosen: nothing was built, the name is still free" if report.end else "the log is empty")
    if report.results["failed"]:
        warn(f"{report.results['failed']} sessions couldn't be built: `polar build show {name}`")
    if report.results["newer"]:
        warn(f"{report.results['newer']} sessions are of a newer version: replay {name} again after an upgrade")
    if report.results["unreadable"]:
        warn(f"{report.results['unreadable']} groups weren't closed, their messages can't be read: `polar verify`")


async def _processes(origin: Origin) -> int:
    """So many that it pays to start them: none for a short log."""
    return min(_MOST_PROCESSES, (os.cpu_count() or 1) - 1) if await origin.last() > _LONG_LOG else 0


def _print(title: str, rows: list[dict[str, Any]], json: bool) -> None:
    if json:
        for row in rows:
            emit(row)
    elif rows:
        table(title, list(rows[0]), [list(r.values()) for r in rows])


def _summary(found: BuildSummary) -> dict[str, Any]:
    return {
        "build": found.build,
        "rules": found.rules,
        "rules_hash": found.rules_hash[:12],
        "sessions": found.sessions,
        "failed": found.failed,
        "traces": found.traces,
        "held": found.held,
        "traces_per_session": found.traces_per_session,
        "trained": found.trained,
        "tokens": found.tokens,
        "exact_share": found.exact_share,
        "ambiguous": found.ambiguous,
        "last": found.last.isoformat(timespec="seconds") if found.last else None,
    }


@build.command("list")
def build_list(data: DataOption = None, json: JsonOption = False) -> None:
    """All builds with their sums. `held` are the traces that can still be read: none of a build that was dropped.

    Example: polar build list
    """
    found = with_bus(data, summaries)
    _print("", [_summary(s) for s in found], json)


@build.command("show")
def build_show(name: BuildName, data: DataOption = None, json: JsonOption = False) -> None:
    """One build: its sums, why completions aren't trained, and why sessions weren't built.

    Example: polar build show live
    """
    found = with_bus(data, lambda bus: summaries(bus, name))
    if not found:
        raise ConfigError("there is no build of that name", name)
    one = found[0]
    if json:
        emit(_summary(one) | {name: dict(counts) for name, _, counts in _accounts(one)})
        return
    _print("", [_summary(one)], False)
    for _, title, counts in _accounts(one):
        if counts:
            table(title, ["reason", "count", "meaning"], [[r, n, meaning(r) or None] for r, n in counts.most_common()])


def _accounts(found: BuildSummary) -> list[tuple[str, str, Counter[str]]]:
    """Name, title and counts of what a build tells beside its sums."""
    return [
        ("excluded", "not trained", found.excluded),
        ("chain_classes", "why traces begin", found.chain_classes),
        ("drift", "spans whose context isn't what the engine saw", found.drift),
        ("reasons", "sessions not built", found.reasons),
    ]


@build.command("drop")
def build_drop(name: BuildName, data: DataOption = None, json: JsonOption = False) -> None:
    """Purge a build's traces, read or unread. What the log says of the build stays; a replay of that name and the same
    rules makes the traces again.

    Example: polar build drop merged
    """
    purged = with_bus(data, lambda bus: drop(bus, name), ADMIN)
    _print("", [{"build": name, "messages": purged}], json)


@build.command("diff")
def build_diff(before: BuildName, after: BuildName, data: DataOption = None, json: JsonOption = False) -> None:
    """Two builds beside each other: sums over common sessions, and completions whose fate changed.

    Example: polar build diff live merged
    """
    found = with_bus(data, lambda bus: diff(bus, before, after))
    if json:
        emit(_difference(found))
        return
    _print(f"{found.common:,} common sessions", [_compared(s) for s in (found.before, found.after)], False)
    facts = [("only in " + before, len(found.only_before)), ("only in " + after, len(found.only_after))]
    table("", ["", "count"], [*facts, ("traces with one id in both", found.same_traces)])
    if found.changes:
        rows = [(old, new, count) for (old, new), count in found.kinds.most_common()]
        table("completions whose fate changed", [before, after, "completions"], rows)


def _compared(found: BuildSummary) -> dict[str, Any]:
    """Sums over common sessions; what is said of a build as a whole is left out."""
    return {key: value for key, value in _summary(found).items() if key not in ("held", "last")}


def _difference(found: Difference) -> dict[str, Any]:
    changes = [
        {"session": c.session, "completion": c.completion, "before": c.before, "after": c.after} for c in found.changes
    ]
    return {
        "before": _compared(found.before),
        "after": _compared(found.after),
        "common": found.common,
        "only_before": found.only_before,
        "only_after": found.only_after,
        "same_traces": found.same_traces,
        "changes": changes,
    }


@trace.command("show")
def trace_show(
    name: Annotated[
        str,
        typer.Argument(help="A session, SESSION/NUMBER, or the first digits of a trace or of a completion."),
    ],
    build_name: BuildOption = "live",
    tokenizer: Annotated[Path | None, typer.Option(help="Directory with the model's tokenizer.")] = None,
    data: DataOption = None,
    json: JsonOption = False,
) -> None:
    """A trace's text, coloured by where each token comes from and whether it is trained; of a completion, the trace
    that trains it, or why none does.

    Example: polar trace show s1-abcdefghijklmnopqrst-0
    """

    async def work(bus: Bus) -> tuple[list[Read], list[Untrained]]:
        await check_held(bus, build_name)
        try:
            return await find_traces(bus, name, build_name), []
        except ConfigError:
            if "-" in name:
                raise
            trained, untrained = await find_trained(bus, name, build_name), await find_untrained(bus, name, build_name)
            if not (trained or untrained):
                raise
            return trained, untrained

    found, excluded = with_bus(data, work)
    for left in excluded:
        _show_untrained(left, build_name, tokenizer, json)
    for one in found:
        _show(one, tokenizer, json)


@trace.callback()
def _trace() -> None:
    """Keeps `trace` a group with one command."""


def _show(read: Read, tokenizer: Path | None, json: bool) -> None:
    vocabulary = _vocabulary(read.trace.provenance.tokenizer_hash, tokenizer)
    shown = [
        (source, vocabulary.decode(ids.tolist()) if vocabulary else " ".join(map(str, ids.tolist())), len(ids))
        for source, ids in pieces(read)
    ]
    trace = read.trace
    if json:
        body = trace.model_dump(mode="json", exclude={"prompt_ids", "response_ids", "loss_mask", "logprobs"})
        emit(body | {"pieces": [{"source": s, "text": t, "tokens": n} for s, t, n in shown]})
        return
    console.print(Text(f"trace {trace.trace_id}", style="bold"))
    facts = f"session {trace.session}/{trace.number}, build {trace.build}, rules {trace.rules}, {trace.status}, "
    tokens = f"{len(read.prompt):,} + {len(read.response):,} tokens, {trace.action_tokens:,} trained"
    console.print(Text(f"{facts}{trace.chain_class}, {tokens}"))
    if vocabulary is None:
        warn("no tokenizer of this model found: ids instead of text (give --tokenizer)")
    _show_text(shown)
    rows = [
        (s.completion[:12], s.start, s.length, s.trained, s.reason or None, s.context_exact, s.drift_class or None)
        for s in trace.spans
    ]
    table("spans", ["completion", "start", "tokens", "trained", "reason", "exact", "drift"], rows)


def _vocabulary(fingerprint: str, tokenizer: Path | None) -> Vocabulary | None:
    known = [tokenizer] if tokenizer is not None else sorted((cache_dir() / "models").glob("*"))
    return find_vocabulary("" if tokenizer is not None else fingerprint, known)


def _show_untrained(left: Untrained, build_name: str, tokenizer: Path | None, json: bool) -> None:
    vocabulary, ids = _vocabulary(left.tokenizer_hash, tokenizer), left.sampled.tolist()
    text = vocabulary.decode(ids) if vocabulary else " ".join(map(str, ids))
    facts: dict[str, Any] = {"completion": left.completion, "session": left.session, "build": build_name}
    facts |= {"reason": left.reason, "meaning": meaning(left.reason)}
    facts |= {"prompt_tokens": left.prompt_tokens, "sampled_tokens": len(ids), "text": text}
    if json:
        emit(facts)
        return
    console.print(Text(f"completion {left.completion}", style="bold"))
    console.print(Text(f"session {left.session}, build {build_name}: not trained"))
    console.print(Text(f"{left.reason}: {meaning(left.reason)}" if meaning(left.reason) else left.reason))
    console.print(Text(f"{left.prompt_tokens:,} tokens in the prompt, {len(ids):,} sampled:"))
    console.print(Text(text, style=_COLOURS["masked"]))


def _show_text(shown: list[tuple[str, str, int]]) -> None:
    """By colours with their legend; where there are none, each stretch under its name."""
    if console.color_system is not None and not console.no_color:
        console.print(Text.assemble(*((f" {source} ", style) for source, style in _COLOURS.items())))
        console.print(Text.assemble(*((text, _COLOURS[source]) for source, text, _ in shown)))
        return
    for source, text, tokens in shown:
        console.print(Text(f"── {source}, {tokens:,} tokens"))
        console.print(Text(text))


def export(
    path: Annotated[Path, typer.Argument(help="A .jsonl, .arrow or .parquet file.")],
    build_name: BuildOption = "live",
    run: Annotated[str, typer.Option(help="Only this run.")] = "",
    data: DataOption = None,
    json: JsonOption = False,
) -> None:
    """Write a build's traces to a file, with the outcome and reward of each one's session where its group is closed.

    Example: polar export traces.parquet --build live
    """
    format_of(path)

    async def work(bus: Bus) -> int:
        await check_held(bus, build_name)
        members = await closed_members(bus, build_name, run or None)
        return await write(path, build_traces(bus, build_name, run or None), members)

    count = with_bus(data, work)
    if not count:
        warn(f"build {build_name} has no traces" + (f" of run {run}" if run else ""))
    _print("", [{"file": str(path), "build": build_name, "traces": count}], json)
