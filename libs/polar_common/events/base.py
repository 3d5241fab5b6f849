"""What all events have in common. An event is past tense, immutable, self-contained and versioned."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from polar_common.ids import new_id

__all__ = ["Event", "SessionEvent", "Upcaster", "now"]

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]


def now() -> datetime:
    return datetime.now(UTC)


class Event(BaseModel):
    """Base of all events. Subclasses set `kind` (the discriminator) and build their subject."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")

    VERSION: ClassVar[int] = 1
    """Newest schema version this code writes and reads."""
    UPCASTERS: ClassVar[dict[int, Upcaster]] = {}
    """Version n → function that makes a body of version n + 1."""

    kind: str
    schema_version: Annotated[int, Field(ge=1)] = 1
    event_id: str = Field(default_factory=new_id)
    """Random; identifies this event in logs and as a causation."""
    time: AwareDatetime = Field(default_factory=now)
    """The producer's clock; the log's own timestamp decides where order or duration matter."""
    producer: str = ""
    """Service and instance that wrote it."""
    run: str = ""
    """Correlation: the run under which the task was submitted."""
    task: str = ""
    """Correlation: the task, which is also the group."""
    causation: str = ""
    """Event id of the fact that made the producer act."""

    def subject(self) -> str:
        """Where this event belongs on the log; its natural key."""
        raise TypeError(f"{type(self).__name__} has no subject")

    def body_hash(self) -> str:
        """Hash of what the event says, leaving out who said it and when: equal for a repeated handler's output."""
        body = self.model_dump(mode="json", exclude={"event_id", "time", "producer", "causation"})
        return hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()


class SessionEvent(Event):
    """An event about one session; attempt 0 marks facts about the session as a whole."""

    session: str
    attempt: Annotated[int, Field(ge=0)]
