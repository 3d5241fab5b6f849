"""What a session's messages decide: whether it is reconstructed, from which attempt, and what lies below its seal.

Pure functions of stored messages. The deciding message bounds what is read, so that a later reader (a redelivery, a
replay) finds exactly the same; what lies between the seal and it is listed as `late`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polar_common.bus import Stored
from polar_common.errors import Poison, TraceError
from polar_common.events import (
    Event,
    SessionArtifacts,
    SessionCancelled,
    SessionExited,
    SessionFailed,
    SessionInitialized,
    SessionSealed,
)

__all__ = ["Selection", "select"]

_READ = ("initialized", "sealed", "exited", "artifacts", "failed", "cancelled")


@dataclass(slots=True)
class Selection:
    """What to build. `nothing`: why there will be no traces, "" otherwise. Stored lists are by sequence."""

    session: str
    run: str
    task: str
    attempt: int
    until: int
    """Sequence of the deciding message."""
    nothing: str = ""
    seal: int = 0
    cut: str = ""
    """How the attempt was ended from outside: `timeout`, `limit`, `cancelled`, or ""."""
    harness: tuple[str, str, str] = ("", "", "")
    """Name, version, configuration hash."""
    captured: list[Stored] = field(default_factory=list)
    aborted: list[Stored] = field(default_factory=list)
    undelivered: list[str] = field(default_factory=list)
    excluded: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Attempt:
    initialized: SessionInitialized | None = None
    sealed: SessionSealed | None = None
    exited: SessionExited | None = None
    seal: int = 0


def select(session: str, stored: Sequence[Stored]) -> Selection | None:
    """The first decision in the session's log, with the completions it covers; None while there is none.

    Raises Poison for a transition that can't be read, TraceError for an attempt without a seal.
    """
    found, attempts = _decide(session, sorted(stored, key=lambda s: s.sequence))
    if found is None:
        return None
    if not found.nothing:
        attempt = attempts[found.attempt]
        if attempt.sealed is None:
            raise TraceError(f"attempt {found.attempt} of {session} left artifacts and was never sealed")
        found.seal = attempt.seal
        found.cut = _cut(attempt)
        if attempt.initialized is not None:
            event = attempt.initialized
            found.harness = (event.harness, event.harness_version, event.harness_config_hash)
    for message in stored:
        if message.sequence <= found.until and ".completion." in message.subject:
            _sort(message, found)
    found.captured.sort(key=lambda s: s.sequence)
    found.aborted.sort(key=lambda s: s.sequence)
    found.excluded = dict(sorted(found.excluded.items()))
    return found


def _decide(session: str, stored: Sequence[Stored]) -> tuple[Selection | None, dict[int, _Attempt]]:
    attempts: dict[int, _Attempt] = {}
    for message in stored:
        tokens = message.subject.split(".")
        if tokens[3] != "session" or tokens[6] not in _READ:
            continue
        event = _event(message)
        attempt = attempts.setdefault(_number(tokens, message), _Attempt())
        match event:
            case SessionInitialized():
                attempt.initialized = event
            case SessionSealed():
                attempt.sealed, attempt.seal = event, message.sequence
            case SessionExited():
                attempt.exited = event
            case SessionArtifacts() if attempt.exited is not None and attempt.exited.fault in ("none", "agent"):
                return Selection(session, event.run, event.task, event.attempt, message.sequence), attempts
            case SessionFailed():
                return _ended(session, event, event.outcome, message), attempts
            case SessionCancelled():
                return _ended(session, event, "cancelled", message), attempts
            case _:
                pass
    return None, attempts


def _event(message: Stored) -> Event:
    """Raises Poison or FromTheFuture, naming the message."""
    try:
        return message.event
    except Poison as error:
        raise type(error)(f"{message.subject}: {error}") from error


def _number(tokens: Sequence[str], message: Stored) -> int:
    """The attempt in a subject. Raises Poison where there is none."""
    if not tokens[5].isdecimal():
        raise Poison(f"{message.subject} names no attempt")
    return int(tokens[5])


def _ended(session: str, event: SessionFailed | SessionCancelled, why: str, message: Stored) -> Selection:
    return Selection(session, event.run, event.task, event.last_attempt, message.sequence, nothing=why)


def _cut(attempt: _Attempt) -> str:
    if attempt.exited is not None and attempt.exited.cancelled:
        return "cancelled"
    if attempt.exited is not None and attempt.exited.timed_out:
        return "timeout"
    reason = attempt.sealed.reason if attempt.sealed is not None else ""
    return reason if reason in ("timeout", "limit", "cancelled") else ""


def _sort(message: Stored, found: Selection) -> None:
    """polar.events.<seg>.completion.<sid>.<attempt>.<completion>.<event>"""
    tokens = message.subject.split(".")
    attempt, name, event = _number(tokens, message), tokens[6], tokens[7]
    if event == "undelivered":
        found.undelivered.append(name)
    elif event in ("captured", "aborted"):
        if found.nothing:
            found.excluded[name] = found.nothing
        elif attempt != found.attempt:
            found.excluded[name] = "dead_attempt"
        elif message.sequence > found.seal:
            found.excluded[name] = "late"
        else:
            (found.captured if event == "captured" else found.aborted).append(message)
