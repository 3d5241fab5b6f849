"""What `polar verify` asks of the reconstructor: builds every session of the log anew and compares trace ids.

A second pass over the events, which gathers each session until it is decided, as a replay does. A build under a rule
set that isn't known here by its hash can't be made again; such builds are told, not judged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from polar_common.bus import Stored
from polar_common.errors import BlobError, FromTheFuture, Poison, TraceError
from polar_common.packing import BlobRef
from polar_common.verify import Facts, Finding, Source, fetch_blob

from .build import Built, Prepared, build_session, prepare
from .domain import select
from .rules import BUILT_IN, RuleSet

__all__ = ["rebuild"]

_DECIDING = (".artifacts", ".0.failed", ".0.cancelled")


async def rebuild(source: Source, facts: Facts) -> AsyncIterator[Finding]:
    """Findings `rebuild`: a trace whose id the log doesn't give, or an exclusion that it doesn't explain."""
    known = {rules.hash: rules for rules in BUILT_IN.values()}
    for build, rules, count in facts.rows(
        "SELECT build, rules_hash, count(*) FROM builds WHERE ok=1 GROUP BY build, rules_hash"
    ):
        if rules not in known:
            detail = f"its rules ({rules[:12]}) aren't built in: {count} sessions were not rebuilt"
            yield Finding("rebuild", build, detail, severity="note")
    gathered: dict[str, list[Stored]] = {}
    done: set[str] = set()
    for stream in await source.streams("events"):
        async for stored in source.messages(stream):
            tokens = stored.subject.split(".", 5)
            if len(tokens) < 6 or tokens[3] not in ("session", "completion") or tokens[4] in done:
                continue
            messages = gathered.setdefault(tokens[4], [])
            messages.append(stored)
            if not stored.subject.endswith(_DECIDING):
                continue
            found = await _judge(source, facts, tokens[4], messages, known)
            if found is not None:
                done.add(tokens[4])
                del gathered[tokens[4]]
                for finding in found:
                    yield finding


async def _judge(
    source: Source, facts: Facts, session: str, messages: list[Stored], known: Mapping[str, RuleSet]
) -> list[Finding] | None:
    """What its rebuilding shows; None while the session isn't decided."""
    try:
        selection = select(session, messages)
    except FromTheFuture:
        return []
    except (Poison, TraceError) as error:
        return _unbuildable(facts, session, error)
    if selection is None:
        return None
    rows = facts.rows("SELECT build, rules_hash, seq FROM builds WHERE session=? AND ok=1", session)
    wanted = [(build, known[rules], seq) for build, rules, seq in rows if rules in known]
    if not wanted:
        return []
    try:
        prepared = prepare(selection)
        bodies = await _bodies(source, prepared)
        built = [(build, build_session(prepare(selection), bodies, rules), seq) for build, rules, seq in wanted]
    except (Poison, TraceError, BlobError) as error:
        return _unbuildable(facts, session, error)
    return [f for build, one, seq in built for f in _differences(facts, session, build, one, seq)]


def _unbuildable(facts: Facts, session: str, error: Exception) -> list[Finding]:
    rows = facts.rows("SELECT build, seq FROM builds WHERE session=? AND ok=1", session)
    return [Finding("rebuild", session, f"build {build} can't be made again: {error}", seq) for build, seq in rows]


async def _bodies(source: Source, prepared: Prepared) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for wanted in prepared.wanted:
        try:
            ref = BlobRef.model_validate(wanted.ref)
            found[ref.sha256] = await fetch_blob(source, ref)
        except ValueError as error:
            raise BlobError(f"{wanted.place}: {error}") from error
    return found


def _differences(facts: Facts, session: str, build: str, built: Built, seq: int) -> list[Finding]:
    def rows(sql: str) -> dict[Any, Any]:
        return dict(facts.rows(sql, build, session))

    there = rows("SELECT number, id FROM manifest_traces WHERE build=? AND session=?")
    excluded = rows("SELECT completion, reason FROM excluded WHERE build=? AND session=?")
    found = []
    # Where the trace stream was purged there is no manifest, and only the account on the log can be compared.
    if there or facts.one("SELECT count(*) FROM manifests WHERE build=? AND session=?", build, session):
        made = {number: trace.trace_id for number, trace in enumerate(built.traces)}
        for number in sorted(made.keys() | there.keys()):
            if made.get(number) != there.get(number):
                told = f"{str(there.get(number))[:16]} there, {str(made.get(number))[:16]} from the log"
                found.append(Finding("rebuild", session, f"build {build}, trace {number}: {told}", seq))
    if built.excluded != excluded:
        names = sorted(k for k in built.excluded.keys() | excluded.keys() if built.excluded.get(k) != excluded.get(k))
        told = ", ".join(f"{n} {excluded.get(n)} there, {built.excluded.get(n)} from the log" for n in names[:3])
        found.append(Finding("rebuild", session, f"build {build} excludes others: {told}", seq))
    return found
