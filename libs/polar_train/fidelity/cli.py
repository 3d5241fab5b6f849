"""`polar fidelity`: recompute what traces say, and what a plain engine would have shown."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from polar_common.bus import Bus
from polar_common.cli.output import console, emit, table, warn
from polar_common.errors import ConfigError
from polar_common.house import find_house
from polar_common.settings import HouseSettings
from polar_common.verify import LiveSource

from .check import Options, check
from .models import Models, find_models, served_root
from .native import Gap, GapReport, deployment_gap
from .policies import Policies, published
from .scope import OUTSIDE, TOLERANCE
from .tally import Report, Worst

__all__ = ["fidelity"]

_errors = Console(stderr=True, highlight=False)


def fidelity(
    build: Annotated[str, typer.Option(help="Which build.")] = "live",
    run: Annotated[str, typer.Option(help="Only this run.")] = "",
    session: Annotated[list[str] | None, typer.Option(help="Only this session; may be repeated.")] = None,
    sample: Annotated[int, typer.Option(min=0, help="Traces drawn at random; 0: all.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    native: Annotated[bool, typer.Option("--native", help="Also: how often a plain engine would differ.")] = False,
    recompute: Annotated[bool, typer.Option(help="Recompute log-probs (needs torch).")] = True,
    model: Annotated[str, typer.Option(help="The first weights: a directory, or a name in the model cache.")] = "",
    worst: Annotated[int, typer.Option(min=0, help="Places shown for each kind of context.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Of the recompute.")] = 1,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 1 unless all spans in scope agree and no trace is damaged.")
    ] = False,
    data: Annotated[Path | None, typer.Option("--data", help="The house's directory; by default $POLAR_DATA.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Recompute the log-probs of a build's traces under the weights that sampled them, and compare.

    Example: polar fidelity --sample 50 --native
    """
    if not recompute and not native:
        raise ConfigError("with --no-recompute there is only --native left to do", "native")
    settings = HouseSettings()
    models = find_models(model, served_root(data or settings.data))
    options = Options(build, run, tuple(session or ()), sample, seed, worst, threads)
    report, gaps = asyncio.run(_measure(_url(settings, data), settings, options, models, recompute, native))
    _tell(report, gaps, models, json)
    if strict and report is not None and not report.faultless:
        raise typer.Exit(1)


def _url(settings: HouseSettings, data: Path | None) -> str:
    url = settings.nats if "nats" in settings.model_fields_set and data is None else find_house(data).nats
    if not url:
        raise ConfigError("a remote house's log is reached by POLAR_NATS", "nats")
    return url


@dataclass(slots=True)
class _Bar:
    """A bar on a terminal, else a line whenever another tenth is done."""

    progress: Progress
    what: str
    tenth: int = -1
    task: TaskID = field(init=False)

    def __post_init__(self) -> None:
        self.task = self.progress.add_task(self.what, total=None)

    def __call__(self, done: float, total: int) -> None:
        self.progress.update(self.task, completed=done, total=total)
        if self.progress.disable and not _errors.is_terminal and int(10 * done / max(1, total)) > self.tenth:
            self.tenth = int(10 * done / max(1, total))
            _errors.print(f"{self.what}: {done:.0f} of {total}", markup=False)


async def _measure(
    url: str, settings: HouseSettings, options: Options, models: Models, recompute: bool, native: bool
) -> tuple[Report | None, GapReport | None]:
    user, password = settings.nats_user, settings.nats_password.get_secret_value()
    bus = await Bus.connect(url, "fidelity", user=user, password=password, wait_s=5.0)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}"),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=_errors, disable=not _errors.is_terminal, transient=True) as bar:
            report = gaps = None
            if recompute:
                known = await published(bus, await LiveSource(bus).streams("events"))
                policies = Policies(known, models.base, models.by_hash)
                told = _Bar(bar, "recomputing traces")
                report = await check(bus, options, policies, told)
            if native:
                told = _Bar(bar, "rendering traces")
                gaps = await deployment_gap(bus, options, models.renderer, told)
            return report, gaps
    finally:
        await bus.close()


def _tell(report: Report | None, gaps: GapReport | None, models: Models, json: bool) -> None:
    if json:
        found: dict[str, Any] = {} if report is None else report.json()
        if report is not None:
            found["worst"] = [_worst_json(w, models) for w in report.worst]
        if gaps is not None:
            found["native"] = gaps.json()
        emit(found)
        return
    if report is not None:
        _tell_report(report, models)
    if gaps is not None:
        _tell_gaps(gaps)


def _tell_report(report: Report, models: Models) -> None:
    sums = report.in_scope
    drawn = f"{report.checked:,} of {report.traces:,} traces, {report.spans:,} trained spans, {report.tokens:,} tokens"
    console.print(f"build {report.build}: {drawn}", markup=False)
    if sums.spans:
        share = f"{sums.within:,} of {sums.spans:,} spans ({sums.within / sums.spans:.2%}) within {TOLERANCE:g}"
        console.print(f"in scope: {share}, the largest difference is {sums.max_abs:.2e}", style="bold", markup=False)
    else:
        console.print("nothing is in scope", style="bold")
    rows: list[Sequence[Any]] = [
        [scope or "in scope", context, s.spans, s.tokens, _percent(s.share), s.max_abs, s.mean_abs,
         f"{s.ratio_mean:.4f}", f"{s.ratio_min:.4f}", f"{s.ratio_max:.4f}", s.outside_kept]
        for (scope, context), s in sorted(report.rows.items())
    ]  # fmt: skip
    if rows:
        heads = ["scope", "context", "spans", "tokens", "within", "max", "mean", "ratio", "min", "max", "outside kept"]
        table("recomputed − recorded; ratio: exp of a span's sum", heads, rows)
    reasons = [(reason, report.scope(reason).spans, OUTSIDE[reason]) for reason in report.reasons]
    if reasons:
        table("outside the scope", ["reason", "spans", "meaning"], reasons)
    if report.unmeasured:
        table("not recomputed", ["reason", "spans"], report.unmeasured.most_common())
    if report.unreadable:
        table("traces that can't be read", ["reason", "traces"], report.unreadable.most_common())
    if report.versions:
        table("weights", ["version", "from"], sorted(report.versions.items()))
    worst = [_worst_json(w, models) for w in report.worst]
    if worst:
        names = ["context", "difference", "recorded", "recomputed", "session", "place", "before", "token", "after"]
        table("worst places", names, [[_cell(w[n]) for n in names] for w in worst])
    for line in report.details:
        warn(line)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6f}"
    return value.replace("\n", "⏎") if isinstance(value, str) else value


def _worst_json(worst: Worst, models: Models) -> dict[str, Any]:
    vocabulary = models.vocabulary(worst.tokenizer_hash)

    def text(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids)) if vocabulary is None else vocabulary.decode(ids)

    return {
        "context": worst.context,
        "scope": worst.scope or "in scope",
        "difference": worst.difference,
        "recorded": worst.recorded,
        "recomputed": worst.recomputed,
        "session": f"{worst.session}/{worst.number}",
        "completion": worst.completion,
        "place": worst.place,
        "at": worst.at,
        "token_id": worst.token,
        "before": text(worst.before.tolist()),
        "token": text([worst.token]),
        "after": text(worst.after.tolist()),
    }


def _tell_gaps(gaps: GapReport) -> None:
    rows = [
        [g.harness or "-", g.model, g.calls, g.later, g.different, _percent(g.share), _kinds(g.kinds), _first(g)]
        for _, g in sorted(gaps.gaps.items())
    ]
    heads = ["harness", "model", "calls", "later", "different", "share", "kinds", "first at (min, median, max)"]
    table("deployment gap: prompts that a plain engine would have shown otherwise", heads, rows)
    examples = [e for _, g in sorted(gaps.gaps.items()) for e in g.examples.values()]
    if examples:
        names = ["kind", "session", "at", "before", "seen", "native"]
        table("examples", names, [[_cell(getattr(e, n)) for n in names] for e in examples])
    if gaps.unreadable:
        table("not compared", ["reason", "calls"], gaps.unreadable.most_common())
    for line in gaps.details:
        warn(line)


def _first(gap: Gap) -> str:
    return f"{min(gap.first):,}, {median(gap.first):,.0f}, {max(gap.first):,}" if gap.first else "-"


def _kinds(kinds: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(kinds.items(), key=lambda k: -k[1]))
