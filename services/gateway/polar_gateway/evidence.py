"""What the proxy recorded of an attempt's model calls: the only evidence that an agent can't forge."""

from __future__ import annotations

from dataclasses import dataclass

from polar_common import subjects
from polar_common.bus import Bus
from polar_common.bus.read import Stored
from polar_common.errors import Poison
from polar_common.events import CompletionAborted, CompletionRejected, Event

__all__ = ["LastCall", "has_completion", "last_call"]


_LIMITS = ("calls_limit", "tokens_limit")


@dataclass(frozen=True, slots=True)
class LastCall:
    """How an attempt's last model call ended, where that was no answer: each is why, "" where it isn't so."""

    engine_failed: str = ""
    used_up: str = ""
    """It didn't fit into the model's window; or some call was beyond a limit of the session's own."""


async def has_completion(bus: Bus, session: str, attempt: int) -> bool:
    """Whether a completion was captured, as the leader knows. Raises Unavailable."""
    return await bus.last(subjects.completion(session, attempt, "*", "captured")) is not None


async def last_call(bus: Bus, session: str, attempt: int) -> LastCall:
    """What became of the attempt's last model call, as the leader knows. Raises Unavailable."""
    # Of several at once one may be answered after another was refused.
    refused = _event(await bus.last(subjects.completion(session, attempt, "*", "rejected")))
    if isinstance(refused, CompletionRejected) and refused.reason in _LIMITS:
        return LastCall(used_up=refused.detail)
    event = _event(await bus.last(subjects.completion_filter(session, attempt)))
    if not isinstance(event, CompletionAborted | CompletionRejected):
        return LastCall()
    if event.reason == "context_full":
        return LastCall(used_up=f"the context window is full: {event.detail or 'the prompt does not fit'}")
    if isinstance(event, CompletionAborted) and event.reason == "engine_error":
        return LastCall(engine_failed=event.detail or "the engine broke off")
    if isinstance(event, CompletionRejected) and event.status >= 500:
        return LastCall(engine_failed=event.detail or f"{event.reason} ({event.status})")
    return LastCall()


def _event(stored: Stored | None) -> Event | None:
    try:
        return None if stored is None else stored.event
    except Poison:
        return None
