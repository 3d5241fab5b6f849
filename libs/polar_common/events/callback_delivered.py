"""A callback to the submitter's URL ended: delivered, or given up."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects

from .base import Event


class CallbackDelivered(Event):
    """One per task and subject of the callback; `key` was sent as Idempotency-Key."""

    kind: Literal["callback.delivered"] = "callback.delivered"
    key: str
    url: str
    status: int
    """HTTP status of the last try; 0 where there was no answer."""
    tries: int
    ok: bool

    def subject(self) -> str:
        return subjects.task(self.task, "callback_delivered")
