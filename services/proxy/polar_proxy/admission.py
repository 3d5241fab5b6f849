"""Who may call now: limits of a session and of the instance. Refusals carry the reason that is recorded."""

from __future__ import annotations

import time

from polar_common.errors import RequestError

from .sessions import Session
from .settings import ProxySettings

__all__ = ["Refused", "admit"]

_WINDOW_S = 10.0


class Refused(RequestError):
    """A request that the limits forbid. `reason` is recorded; a 429 may be tried again after `retry_after` seconds."""

    def __init__(self, message: str, status: int, reason: str, retry_after: float | None = None) -> None:
        kind = {429: "rate_limit_error", 403: "permission_error"}.get(status, "")
        super().__init__(message, status=status, kind=kind)
        self.reason = reason
        self.retry_after = retry_after


def admit(session: Session, settings: ProxySettings, running: int) -> None:
    """Raises Refused. Limits that waiting can't lift are 403, so that no harness asks again for ever."""
    key, index = session.key, session.index
    if running >= settings.proxy_concurrency:
        raise Refused("the proxy is busy", 429, "busy", 1.0)
    if session.running >= settings.proxy_session_concurrency:
        raise Refused(f"{session.running} calls of this session are running", 429, "session_concurrency", 1.0)
    if index.calls >= key.calls:
        raise Refused(f"this session's limit of {key.calls} calls is used up", 403, "calls_limit")
    if key.total_tokens is not None and index.tokens >= key.total_tokens:
        raise Refused(f"this session's limit of {key.total_tokens} tokens is used up", 403, "tokens_limit")
    now = time.monotonic()
    recent = session.recent
    while recent and recent[0] < now - _WINDOW_S:
        recent.popleft()
    if len(recent) >= settings.proxy_session_rate * _WINDOW_S:
        raise Refused("too many calls of this session in ten seconds", 429, "session_rate", 1.0)
    recent.append(now)
