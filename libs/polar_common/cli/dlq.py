"""`polar dlq` and `polar ledger`: what couldn't be handled, and every attempt with its cause."""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import replace
from typing import Annotated, Any

import typer

from polar_common import subjects
from polar_common.bus import Bus, scan
from polar_common.bus.read import Stored
from polar_common.catalogue import Catalogue
from polar_common.errors import ConfigError, FromTheFuture, Poison
from polar_common.letters import Letter, is_failure, is_letter, read_letter, read_note, retry
from polar_common.permissions import ADMIN
from polar_common.session_state import SessionState
from polar_common.topology import DLQ, events_stream

from .connect import with_bus
from .house import _DATA, DataOption, JsonOption
from .output import console, emit, table

__all__ = ["dlq", "ledger"]

dlq = typer.Typer(help="Dead letters: messages that couldn't be handled.", no_args_is_help=True)
Number = Annotated[int, typer.Argument(help="The number that `polar dlq list` shows.")]


@dlq.command("list")
def list_(
    consumer: Annotated[str, typer.Option(help="Only those of this consumer.")] = "",
    parked: Annotated[bool, typer.Option(help="Also messages of newer versions, which wait for an upgrade.")] = False,
    data: DataOption = _DATA,
    json: JsonOption = False,
) -> None:
    """All dead letters, with their reasons.

    Example: polar dlq list --parked
    """

    async def work(bus: Bus) -> list[dict[str, Any]]:
        letters, retried, unreadable = await _letters(bus)
        rows = [_row(x, retried) for x in letters if not consumer or x.consumer == consumer]
        rows += [r for r in unreadable if not consumer or r["consumer"] == consumer]
        return rows + (await _parked(bus) if parked else [])

    rows = with_bus(data, work)
    if json:
        for row in rows:
            emit(row)
    elif rows:
        table("", list(rows[0]), [list(r.values()) for r in rows])
    else:
        console.print("no dead letters", markup=False)


async def _letters(bus: Bus) -> tuple[list[Letter], set[int], list[dict[str, Any]]]:
    """All of them, the numbers of those that were offered again, and rows of what is neither."""
    letters: dict[str, Letter] = {}
    retried: set[int] = set()
    unreadable: list[dict[str, Any]] = []
    async for stored in scan(bus, DLQ, ["polar.dlq.>"]):
        try:
            if is_letter(stored.subject):
                letters[stored.subject] = read_letter(stored)
            elif is_failure(stored.subject):
                # The same letter, as it failed last.
                again, subject = read_letter(stored), stored.subject.partition(".failed.")[0]
                number = letters[subject].number if subject in letters else again.number
                letters[subject] = replace(again, number=number)
                retried.discard(number)
            else:
                retried.add(read_note(stored))
        except Poison as error:
            consumer = stored.subject.split(".")[2]
            row = _blank(stored, "unreadable", str(error))
            unreadable.append(row | {"number": stored.sequence, "consumer": consumer})
    return list(letters.values()), retried, unreadable


def _blank(stored: Stored, state: str, reason: str) -> dict[str, Any]:
    return {
        "number": None, "state": state, "consumer": "", "subject": stored.subject, "sequence": stored.sequence,
        "tries": None, "time": stored.time.isoformat(), "reason": reason[:200],
    }  # fmt: skip


def _row(letter: Letter, retried: set[int]) -> dict[str, Any]:
    state = "retried" if letter.number in retried else "dead"
    return {
        "number": letter.number, "state": state, "consumer": letter.consumer, "subject": letter.subject,
        "sequence": letter.sequence, "tries": letter.tries, "time": letter.time, "reason": letter.reason[:200],
    }  # fmt: skip


async def _parked(bus: Bus) -> list[dict[str, Any]]:
    """Messages that this code can't read because a newer one wrote them."""
    found = []
    for segment in await Catalogue(bus).kept():
        async for stored in scan(bus, events_stream(segment), [subjects.EVENTS]):
            try:
                _ = stored.event
            except FromTheFuture as error:
                found.append(_blank(stored, "parked", str(error)))
            except Poison:
                continue
    return found


@dlq.command("show")
def show(number: Number, data: DataOption = _DATA, json: JsonOption = False) -> None:
    """One dead letter with the message that it is about.

    Example: polar dlq show 3
    """
    letter, retried = with_bus(data, lambda bus: _letter(bus, number))
    body = letter.body.decode(errors="backslashreplace")
    if json:
        emit(_row(letter, retried) | {"body": base64.b64encode(letter.body).decode()})
        return
    table("", ["", ""], [[k, v] for k, v in (_row(letter, retried) | {"reason": letter.reason}).items()])
    console.print(body[:4000], markup=False)


async def _letter(bus: Bus, number: int) -> tuple[Letter, set[int]]:
    letters, retried, _ = await _letters(bus)
    for letter in letters:
        if letter.number == number:
            return letter, retried
    raise ConfigError(f"there is no dead letter {number}", "number")


@dlq.command("retry")
def retry_(
    number: Annotated[list[int] | None, typer.Argument(help="Numbers; none with --consumer.")] = None,
    consumer: Annotated[str, typer.Option(help="All of this consumer's.")] = "",
    data: DataOption = _DATA,
    json: JsonOption = False,
) -> None:
    """Offer messages to their consumer again, from the earliest of them on: handlers are idempotent by state, so what
    had been handled changes nothing. Do this after the cause was mended.

    Example: polar dlq retry 3
    """

    async def work(bus: Bus) -> list[Letter]:
        letters, _, _ = await _letters(bus)
        chosen = [x for x in letters if x.number in (number or ()) or (consumer and x.consumer == consumer)]
        if not chosen:
            raise ConfigError("no such dead letters; see `polar dlq list`", "number")
        await retry(bus, chosen)
        return chosen

    done = with_bus(data, work, ADMIN)
    if json:
        emit({"retried": [x.number for x in done]})
    else:
        console.print(f"{len(done)} offered again", markup=False)


def ledger(
    run: Annotated[str, typer.Option(help="Only this run.")] = "",
    session: Annotated[str, typer.Option(help="Only this session.")] = "",
    summary: Annotated[bool, typer.Option(help="Counts by cause instead of single attempts.")] = False,
    data: DataOption = _DATA,
    json: JsonOption = False,
) -> None:
    """Every attempt, how it ended and why: the denominator of acceptance rates.

    Example: polar ledger --run nightly --summary
    """

    async def work(bus: Bus) -> list[dict[str, Any]]:
        states: dict[str, SessionState] = {}
        for segment in await Catalogue(bus).kept():
            pattern = f"polar.events.{segment}.session.{session or '*'}.>"
            async for stored in scan(bus, events_stream(segment), [pattern]):
                _fold(states, stored)
        found = [row for state in states.values() for row in _attempts(state)]
        return [r for r in found if not run or r["run"] == run]

    rows = with_bus(data, work)
    if summary:
        rows = _summed(rows)
    if json:
        for row in rows:
            emit(row)
    elif rows:
        table("", list(rows[0]), [list(r.values()) for r in rows])


def _fold(states: dict[str, SessionState], stored: Stored) -> None:
    name = stored.subject.split(".")[4]
    try:
        event = stored.event
    except Poison:
        # `polar verify` and `polar dlq` tell of it.
        return
    states.setdefault(name, SessionState(name)).apply(event, stored.sequence, stored.time)


def _attempts(state: SessionState) -> list[dict[str, Any]]:
    rows = []
    last = max(state.attempts, default=0)
    for number, attempt in sorted(state.attempts.items()):
        ended = attempt.exited or attempt.lost
        final = number == last and state.end is not None
        outcome = getattr(state.end, "outcome", "cancelled") if final else None
        began, over = attempt.at.get("claimed"), attempt.at.get("artifacts") or attempt.at.get("lost")
        how = "lost" if attempt.lost else (attempt.exited.fault if attempt.exited else "live")
        rows.append(
            {
                "run": state.accepted.run if state.accepted else "", "session": state.session, "attempt": number,
                "how": how, "cause": ended.cause if ended else "", "outcome": outcome,
                "gateway": attempt.claimed.gateway if attempt.claimed else "",
                "seconds": (over - began).total_seconds() if began and over else None,
                "detail": (ended.detail if ended else "")[:120],
            }
        )  # fmt: skip
    return rows


def _summed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By run, way of ending and cause; `share` is of the run's attempts."""
    totals = Counter(r["run"] for r in rows)
    counts = Counter((r["run"], r["how"], r["cause"], r["outcome"]) for r in rows)
    return [
        {"run": run, "how": how, "cause": cause, "outcome": outcome, "attempts": n, "share": n / totals[run]}
        for (run, how, cause, outcome), n in sorted(counts.items(), key=lambda item: (item[0][0], -item[1]))
    ]
