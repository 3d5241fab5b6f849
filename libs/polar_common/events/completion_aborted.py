"""A model call ended before its answer was complete: the client went away, the key was sealed, the engine broke, or the
prompt didn't fit into its window."""

from __future__ import annotations

from typing import Literal

from polar_common import subjects
from polar_common.packing import Column

from .base import SessionEvent


class CompletionAborted(SessionEvent):
    """The partial is kept and not trained."""

    kind: Literal["completion.aborted"] = "completion.aborted"
    completion: str
    dialect: str
    stream: bool
    request_hash: str
    reason: Literal["client_gone", "sealed", "engine_error", "cancelled", "timeout", "context_full"]
    detail: str = ""
    prompt_tokens: int = 0
    sampled: Column | None = None
    logprobs: Column | None = None
    started: float = 0.0
    duration_s: float = 0.0

    def subject(self) -> str:
        return subjects.completion(self.session, self.attempt, self.completion, "aborted")
