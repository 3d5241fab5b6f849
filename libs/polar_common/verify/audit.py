"""An audit from start to end: pass over the streams, derive, check, ask the verifiers of services, sum up."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from polar_common.errors import ConfigError

from . import building, checks
from .bodies import BlobRecorder, TraceRecorder
from .checks import Judged, reattempts
from .facts import Facts
from .findings import Finding, Findings
from .record import EventRecorder, record_dead_letter
from .sources import Source

__all__ = ["GROUP", "Options", "Report", "Verifier", "audit"]

GROUP = "polar.verifiers"
Verifier = Callable[[Source, Facts], AsyncIterator[Finding]]
"""What a service adds: an async generator of findings, over the log and the facts."""


@dataclass(frozen=True, slots=True)
class Options:
    """`settled`: nothing should be under way any more. `grace_s`: how long after its deadline a session may be late,
    and how long a build or closing may take. `rebuild`: ask the verifiers of services."""

    build: str = "live"
    settled: bool = False
    grace_s: float = 900.0
    rebuild: bool = True
    progress: Callable[[str, int], None] | None = None


@dataclass(slots=True)
class Report:
    """What was looked at and found. `ok`: no finding (notes don't count)."""

    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    excluded: dict[str, int] = field(default_factory=dict)
    """Reason → completions, over all builds."""
    reattempts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.counts


async def audit(source: Source, options: Options | None = None) -> Report:
    """Audit a log. Raises Unavailable where it can't be read, BlobError for a damaged archive."""
    options = options or Options()
    began = time.monotonic()
    findings = Findings()
    report = Report()
    with Facts() as facts:
        await _read(source, facts, findings, report, options)
        facts.index()
        building.derive(facts)
        judged = Judged(source.now().timestamp(), options.grace_s, options.build, options.settled)
        for check in (*checks.ALL, *building.ALL):
            for finding in check(facts, judged):
                findings.add(finding)
        if options.rebuild:
            for verifier in _verifiers():
                async for finding in verifier(source, facts):
                    findings.add(finding)
        _sum_up(facts, report)
    report.findings = findings.kept
    report.counts, report.notes = dict(findings.counts), dict(findings.notes)
    report.seconds = time.monotonic() - began
    return report


async def _read(source: Source, facts: Facts, findings: Findings, report: Report, options: Options) -> None:
    """Traces before events before blobs: whatever an earlier pass names was written before the later pass began."""

    async def read(stream: str, record: Callable[[Any], Any], *, awaited: bool = False, gapless: bool = False) -> None:
        count = last = 0
        async for stored in source.messages(stream):
            if gapless and stored.sequence != last + 1:
                detail = f"sequences {last + 1} to {stored.sequence - 1} aren't there"
                findings.add(Finding("gap", stream, detail, stored.sequence))
            last = stored.sequence
            done = record(stored)
            if awaited:
                await _result(done)
            count += 1
            if options.progress is not None and count % 1000 == 0:
                options.progress(stream, count)
        report.messages[stream] = count

    segments = {name.rpartition("_")[2] for name in await source.streams("events")}
    for stream in await source.streams("traces"):
        await read(stream, TraceRecorder(facts, findings, source, stream, segments).record, awaited=True)
    for stream in await source.streams("events"):
        await read(stream, EventRecorder(facts, findings, stream).record, gapless=True)
    for stream in await source.streams("blobs"):
        await read(stream, BlobRecorder(facts, findings, stream).record, gapless=True)
    for stream in await source.streams("dlq"):
        await read(stream, lambda stored: record_dead_letter(facts, findings, stored))


async def _result(work: Awaitable[None]) -> None:
    await work


def _verifiers() -> Iterator[Verifier]:
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            yield point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"verifier {point.name} can't be loaded: {error}", GROUP) from error


_TOTALS = {
    "tasks": "SELECT count(*) FROM tasks",
    "sessions": "SELECT count(*) FROM sessions",
    "terminal": "SELECT count(DISTINCT session) FROM ends",
    "attempts": "SELECT count(*) FROM (SELECT DISTINCT session, attempt FROM steps)",
    "lost_attempts": "SELECT count(*) FROM steps WHERE name='lost'",
    "captured": "SELECT count(*) FROM completions WHERE kind='captured'",
    "aborted": "SELECT count(*) FROM completions WHERE kind='aborted'",
    "builds": "SELECT count(*) FROM builds",
    "failed_builds": "SELECT count(*) FROM builds WHERE ok=0",
    "traces": "SELECT count(*) FROM traces",
    "trained": "SELECT count(*) FROM spans WHERE trained=1",
    "excluded": "SELECT count(*) FROM excluded",
    "blobs": "SELECT count(*) FROM blobs",
    "groups": "SELECT count(*) FROM groups",
    "dead_letters": "SELECT count(*) FROM dead",
}


def _sum_up(facts: Facts, report: Report) -> None:
    report.totals = {name: int(facts.one(sql)) for name, sql in _TOTALS.items()}
    report.outcomes = dict(facts.rows("SELECT outcome, count(*) FROM ends GROUP BY outcome ORDER BY 1"))
    report.excluded = dict(facts.rows("SELECT reason, count(*) FROM excluded GROUP BY reason ORDER BY 1"))
    report.reattempts = reattempts(facts)
