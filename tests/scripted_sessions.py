"""Sessions written by hand for tests: calls as lists of ids in, the log's messages (or a published log) out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from polar_common.blobs import Blobs
from polar_common.bus import Bus, Stored
from polar_common.events import (
    CompletionAborted,
    CompletionCaptured,
    CompletionUndelivered,
    EngineFacts,
    Event,
    HeadRef,
    MessagesRef,
    PromptRef,
    SamplingUsed,
    SessionArtifacts,
    SessionCancelled,
    SessionExited,
    SessionFailed,
    SessionInitialized,
    SessionLost,
    SessionSealed,
    VersionSpan,
    encode,
)
from polar_common.ids import FIRST_SEGMENT, segment_of, session_id, task_id
from polar_common.packing import BlobRef, Column, pack

SAMPLING = SamplingUsed(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=512)
ENGINE = EngineFacts(name="scripted", replica="r0", model="tiny", tokenizer_hash="t" * 8, end_of_turn=(99,))
TOOLS = {"tools": [{"name": "bash"}]}


@dataclass
class Script:
    """One session's log, message by message. Sequences are positions (from 1) unless given."""

    task: str = field(default_factory=lambda: task_id(FIRST_SEGMENT, "run", "task"))
    index: int = 0
    run: str = "run"
    attempt: int = 1
    events: list[tuple[int, Event]] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    refs: list[tuple[BlobRef, bytes]] = field(default_factory=list)
    heads: set[str] = field(default_factory=set)
    next: int = 1

    @property
    def session(self) -> str:
        return session_id(self.task, self.index)

    @property
    def common(self) -> dict[str, Any]:
        return {"run": self.run, "task": self.task, "session": self.session, "attempt": self.attempt}

    def add(self, event: Event) -> Script:
        self.events.append((self.next, event))
        self.next += 1
        return self

    def column(self, values: Sequence[float] | np.ndarray[Any, Any], kind: Any) -> Column:
        column, blob = pack(values, kind)
        if blob is not None:
            self.blobs[blob[0].sha256] = blob[1]
            self.refs.append(blob)
        return column

    def call(
        self,
        name: str,
        prompt: Sequence[int],
        sampled: Sequence[int],
        *,
        base: str = "",
        shared: int = 0,
        tools: bool = True,
        logprobs: Sequence[float] | None = None,
        at: float | None = None,
        took: float = 0.5,
        versions: Sequence[tuple[str, int]] = (("v0", 0),),
        sampling: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        echoes: Sequence[str] = (),
        **facts: Any,
    ) -> Script:
        """A captured call; the prompt stored whole, or as the first `shared` ids of `base`'s context and the rest.

        `echoes`: completions whose answers stand as such among its new messages.
        """
        given = [-0.5 - 0.001 * i for i in range(len(sampled))] if logprobs is None else logprobs
        head = f"head-{'tools' if tools else 'plain'}"
        body = None if head in self.heads else (TOOLS if tools else {})
        self.heads.add(head)
        facts.setdefault("request_hash", f"request of {name}")
        facts.setdefault("closed", bool(len(sampled)) and sampled[-1] == 99)
        facts.setdefault("finish", "stop" if facts["closed"] else "length")
        event = CompletionCaptured(
            **self.common,
            completion=name,
            dialect="openai_chat",
            stream=False,
            model="policy",
            head=HeadRef(hash=head, body=body),
            messages=MessagesRef(new=tuple({"echo": name} for name in echoes)),
            prompt=PromptRef(base=base, shared=shared, new=self.column(prompt[shared:], "i32"), length=len(prompt)),
            sampled=self.column(sampled, "i32"),
            logprobs=self.column(given, "f32"),
            sampling=SAMPLING.model_copy(update=sampling or {}),
            engine=ENGINE.model_copy(update=engine or {}),
            started=float(self.next) if at is None else at,
            duration_s=took,
            versions=tuple(VersionSpan(version=v, start=s) for v, s in versions),
            **facts,
        )
        return self.add(event)

    def cut(self, name: str, *, prompt_tokens: int = 0, sampled: Sequence[int] = (), **facts: Any) -> Script:
        """An aborted call."""
        facts.setdefault("request_hash", f"request of {name}")
        event = CompletionAborted(
            **self.common,
            completion=name,
            dialect="openai_chat",
            stream=True,
            reason="client_gone",
            prompt_tokens=prompt_tokens,
            sampled=self.column(sampled, "i32") if sampled else None,
            logprobs=self.column([-0.25] * len(sampled), "f32") if sampled else None,
            **facts,
        )
        return self.add(event)

    def undelivered(self, name: str) -> Script:
        return self.add(CompletionUndelivered(**self.common, completion=name))

    def started(self) -> Script:
        return self.add(
            SessionInitialized(
                **self.common,
                runtime="local",
                isolation="none",
                harness="command",
                harness_version="1",
                harness_config_hash="c" * 8,
                init_s=0.1,
            )
        )

    def sealed(self, reason: Any = "exited") -> Script:
        return self.add(SessionSealed(**self.common, reason=reason))

    def exited(self, **facts: Any) -> Script:
        return self.add(SessionExited(**self.common, exit_code=0, **facts))

    def artifacts(self) -> Script:
        return self.add(SessionArtifacts(**self.common))

    def lost(self) -> Script:
        return self.add(SessionLost(**self.common))

    def ended(self, *, reason: Any = "exited", **facts: Any) -> Script:
        """Sealed, exited, artifacts."""
        return self.sealed(reason).exited(**facts).artifacts()

    def failed(self, outcome: Any = "infra_error") -> Script:
        common = self.common | {"attempt": 0}
        return self.add(SessionFailed(**common, last_attempt=self.attempt, outcome=outcome))

    def cancelled(self) -> Script:
        return self.add(SessionCancelled(**(self.common | {"attempt": 0}), last_attempt=self.attempt))

    def stored(self) -> list[Stored]:
        return [stored(sequence, event) for sequence, event in self.events]

    async def publish(self, bus: Bus, until: Callable[[Event], bool] = lambda _: False) -> None:
        """Blobs, then every event in order, up to and without the first that `until` holds for."""
        blobs = Blobs(bus, segment_of(self.session))
        for ref, body in self.refs:
            await blobs.put_as(ref, body)
        for _, event in self.events:
            if until(event):
                return
            await bus.once(event)


def stored(sequence: int, event: Event) -> Stored:
    time = datetime.fromtimestamp(1_700_000_000 + sequence, UTC)
    return Stored(event.subject(), sequence, time, encode(event), event.body_hash())
