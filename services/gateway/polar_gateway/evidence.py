"""What the proxy recorded of an attempt's model calls: the only evidence that an agent can't forge."""

from __future__ import annotations

from polar_common import subjects
from polar_common.bus import Bus
from polar_common.errors import Poison
from polar_common.events import CompletionAborted, CompletionRejected

__all__ = ["engine_failure", "has_completion"]


async def has_completion(bus: Bus, session: str, attempt: int) -> bool:
    """Whether a completion was captured, as the leader knows. Raises Unavailable."""
    return await bus.last(subjects.completion(session, attempt, "*", "captured")) is not None


async def engine_failure(bus: Bus, session: str, attempt: int) -> str:
    """What the engine did to the attempt's last model call, "" where that call wasn't ended by the engine."""
    last = await bus.last(subjects.completion_filter(session, attempt))
    if last is None:
        return ""
    try:
        event = last.event
    except Poison:
        return ""
    if isinstance(event, CompletionAborted) and event.reason == "engine_error":
        return event.detail or "the engine broke off"
    if isinstance(event, CompletionRejected) and event.status >= 500:
        return event.detail or f"{event.reason} ({event.status})"
    return ""
