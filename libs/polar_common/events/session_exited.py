"""The harness of an attempt ended, and how."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import SessionEvent

Fault = Literal["none", "agent", "harness", "infra"]
InfraCause = Literal["", "node_lost", "daemon", "image", "engine", "owner_silent", "poison", "queue_expired"]


class SessionExited(SessionEvent):
    """`fault` says on whose side the end was; `infra` needs evidence outside the session.

    agent: own limits used up (`timed_out`, `resource_exhausted`, `environment_broken`); evaluated all the same.
    harness: the CLI is missing, crashed, or refused; not evaluated. infra: attempted again.
    """

    kind: Literal["session.exited"] = "session.exited"
    exit_code: int | None
    """None where nothing could be started."""
    timed_out: bool = False
    cancelled: bool = False
    fault: Fault = "none"
    cause: str = ""
    """infra: one of `InfraCause`; agent: `timeout | resource_exhausted | environment_broken | limit`."""
    detail: str = ""
    log_tail: str = ""
    run_s: float = 0.0
    peak_rss_mb: float = 0.0
    cpu_s: float = 0.0
    peers: tuple[str, ...] = ()
    """`host:port` of whom the harness was seen connected to beside the proxy, where its network isn't closed."""
    bypass: tuple[str, ...] = ()
    """Those of `peers` that are models: calls that Polar didn't record may have gone there."""

    def subject(self) -> str:
        return subjects.session(self.session, self.attempt, "exited")
