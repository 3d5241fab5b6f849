"""The event vocabulary: one event per file, one discriminated union, upcasters per event.

`decode` turns a message body into an event or says why it can't: `Poison` for what no version understands,
`FromTheFuture` for a newer schema version, which is parked instead of dead-lettered.
"""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import ValidationError

from polar_common.errors import FromTheFuture, Poison

from .base import Event, SessionEvent, now
from .build_failed import BuildFailed
from .build_reconstructed import BuildReconstructed
from .callback_delivered import CallbackDelivered
from .completion_aborted import CompletionAborted
from .completion_captured import (
    CompletionCaptured,
    EngineFacts,
    HeadRef,
    ImageRef,
    MessagesRef,
    PromptRef,
    SamplingUsed,
    VersionSpan,
)
from .completion_rejected import CompletionRejected
from .completion_undelivered import CompletionUndelivered
from .evaluation_evaluated import EvaluationEvaluated
from .group_closed import GroupClosed, GroupMember
from .policy_activated import PolicyActivated
from .policy_published import PolicyPublished
from .session_accepted import SessionAccepted
from .session_artifacts import SessionArtifacts
from .session_cancel_requested import SessionCancelRequested
from .session_cancelled import SessionCancelled
from .session_claimed import SessionClaimed
from .session_completed import Outcome, SessionCompleted
from .session_exited import SessionExited
from .session_failed import SessionFailed
from .session_initialized import SessionInitialized
from .session_lost import SessionLost
from .session_queued import SessionQueued
from .session_ready import SessionReady
from .session_running import SessionRunning
from .session_sealed import SessionSealed
from .task_accepted import TaskAccepted
from .trainer_consumed import ConsumedTrace, TrainerConsumed
from .trainer_demanded import TrainerDemanded

__all__ = [
    "EVENT_TYPES", "BuildFailed", "BuildReconstructed", "CallbackDelivered", "CompletionAborted", "CompletionCaptured",
    "CompletionRejected", "CompletionUndelivered", "ConsumedTrace", "EngineFacts", "EvaluationEvaluated", "Event",
    "GroupClosed", "GroupMember", "HeadRef", "ImageRef", "MessagesRef", "Outcome", "PolicyActivated", "PolicyPublished",
    "PromptRef", "SamplingUsed", "SessionAccepted", "SessionArtifacts", "SessionCancelRequested", "SessionCancelled",
    "SessionClaimed", "SessionCompleted", "SessionEvent", "SessionExited", "SessionFailed", "SessionInitialized",
    "SessionLost", "SessionQueued", "SessionReady", "SessionRunning", "SessionSealed", "TaskAccepted",
    "TrainerConsumed", "TrainerDemanded", "VersionSpan", "decode", "encode", "now",
]  # fmt: skip

_ALL: tuple[type[Event], ...] = (
    TaskAccepted, CallbackDelivered, SessionAccepted, SessionCancelRequested, SessionQueued, SessionClaimed,
    SessionInitialized, SessionReady, SessionRunning, SessionSealed, SessionExited, SessionArtifacts, SessionLost,
    SessionCompleted, SessionFailed, SessionCancelled, CompletionCaptured, CompletionAborted, CompletionUndelivered,
    CompletionRejected, EvaluationEvaluated, BuildReconstructed, BuildFailed, GroupClosed, PolicyPublished,
    PolicyActivated, TrainerConsumed, TrainerDemanded,
)  # fmt: skip

EVENT_TYPES: dict[str, type[Event]] = {cls.model_fields["kind"].default: cls for cls in _ALL}
"""The discriminated union, by `kind`."""


def encode(event: Event) -> bytes:
    """The message body."""
    return event.model_dump_json(exclude_defaults=False).encode()


def decode(body: bytes) -> Event:
    """Inverse of `encode`, upcasting older versions. Raises Poison or FromTheFuture."""
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Poison(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Poison("not a JSON object")
    version = value.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise Poison(f"schema_version is {version!r}")
    kind = value.get("kind")
    cls = EVENT_TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise Poison(f"unknown kind {kind!r}")
    if version > cls.VERSION:
        raise FromTheFuture(f"{kind} version {version}; this code knows {cls.VERSION}")
    try:
        for step in range(version, cls.VERSION):
            value = cls.UPCASTERS[step](value)
        return cls.model_validate(value)
    except (ValidationError, KeyError, TypeError) as error:
        raise Poison(f"{kind}: {error}") from error
