"""What the proxy recorded of an attempt's model calls: the only evidence that an agent can't forge."""

from __future__ import annotations

from dataclasses import dataclass

from polar_common import subjects
from polar_common.bus import Bus
from polar_common.errors import Poison
from polar_common.events import CompletionAborted, CompletionRejected

__all__ = ["LastCall", "has_completion", "last_call"]


@dataclass(frozen=True, slots=True)
class LastCall:
    """How an attempt's last model call ended, where that was no answer: each is why, "" where it isn't so."""

    engine_failed: str = ""
    context_full: str = ""


async def has_completion(bus: Bus, session: str, attempt: int) -> bool:
    """Whether a completion was captured, as the leader knows. Raises Unavailable."""
    return await bus.last(subjects.completion(session, attempt, "*", "captured")) is not None


async def last_call(bus: Bus, session: str, attempt: int) -> LastCall:
    """What became of the attempt's last model call, as the leader knows. Raises Unavailable."""
    last = await bus.last(subjects.completion_filter(session, attempt))
    if last is None:
        return LastCall()
    try:
        event = last.event
    except Poison:
        return LastCall()
    if not isinstance(event, CompletionAborted | CompletionRejected):
        return LastCall()
    if event.reason == "context_full":
        return LastCall(context_full=event.detail or "the prompt doesn't fit")
    if isinstance(event, CompletionAborted) and event.reason == "engine_error":
        return LastCall(engine_failed=event.detail or "the engine broke off")
    if isinstance(event, CompletionRejected) and event.status >= 500:
        return LastCall(engine_failed=event.detail or f"{event.reason} ({event.status})")
    return LastCall()
