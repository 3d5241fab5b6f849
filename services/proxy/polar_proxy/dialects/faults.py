"""Errors as HTTP answers: which status, which headers. Each dialect adds its own body.

`x-should-retry: false` is understood by the OpenAI and Anthropic clients, which else try a 409 again.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from polar_common.errors import (
    EngineBusy,
    EngineDown,
    EngineOverflow,
    EngineRefused,
    PolarError,
    RenderError,
    RequestError,
)

__all__ = ["Fault", "fault", "in_stream", "token_counts"]

_NUMBER = re.compile(r"(?<![\w.])\d{2,9}(?![\w.]*\d)")


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as a provider would report it. `path` names the offending field; `overflow`: the context is too long."""

    status: int
    message: str
    path: str = ""
    kind: str = ""
    overflow: bool = False
    retryable: bool = False
    retry_after: str = ""

    def headers(self) -> dict[str, str]:
        out = {"content-type": "application/json"}
        if self.retry_after:
            out["retry-after"] = self.retry_after
        if not self.retryable:
            out["x-should-retry"] = "false"
        return out


def _status(error: PolarError) -> int:
    status = int(getattr(error, "status", 0) or 0)
    if isinstance(error, RequestError):
        return status if 400 <= status < 600 else 400
    if isinstance(error, EngineOverflow | RenderError):
        return 413 if status == 413 else 400
    if isinstance(error, EngineRefused):
        return status if 400 <= status < 500 else 400
    if isinstance(error, EngineBusy):
        return status if status in (503, 529) else 429
    if isinstance(error, EngineDown):
        return status if 500 <= status < 600 else 502
    return 503 if error.retryable else 500


def _retry_after(error: PolarError, status: int) -> str:
    seconds = getattr(error, "retry_after", None)
    if isinstance(seconds, int | float) and math.isfinite(seconds) and seconds >= 0:
        return str(math.ceil(seconds))
    return "1" if status in (429, 503, 529) else ""


def fault(error: PolarError) -> Fault:
    """What to answer. Never raises."""
    status = _status(error)
    return Fault(
        status=status,
        message=str(error) or type(error).__name__,
        path=error.path if isinstance(error, RequestError) else "",
        kind=error.kind if isinstance(error, RequestError) else "",
        overflow=isinstance(error, EngineOverflow),
        retryable=status in (408, 429) or status >= 500,
        retry_after=_retry_after(error, status),
    )


def in_stream(error: PolarError) -> Fault:
    """What to say inside a stream. Clients see no status there, and agents often nothing but the message, by whose
    words they decide whether to try again."""
    what = fault(error)
    if what.status == 429:
        return replace(what, message=f"rate limit: {what.message}")
    return replace(what, message=f"server error: {what.message}") if what.status >= 500 else what


def token_counts(message: str) -> tuple[int, int] | None:
    """(asked for, allowed) where an overflow message names two different token counts, else None."""
    numbers = [int(n) for n in _NUMBER.findall(message)]
    if not numbers or min(numbers) == max(numbers):
        return None
    limit = numbers[0] if numbers[0] < max(numbers) else min(numbers)
    return max(numbers), limit
