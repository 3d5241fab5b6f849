"""Completion events onto the log: blobs first, then the event; nothing is told to a harness before the ack."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import structlog

from polar_common import subjects
from polar_common.bus import Bus
from polar_common.errors import BusError
from polar_common.events import CompletionAborted, CompletionRejected, CompletionUndelivered
from polar_common.ids import new_id, segment_of
from polar_common.keys import SessionKey
from polar_common.packing import pack
from polar_proxy.dialects.base import ChatRequest

from .capture import Captured
from .sessions import Session, Sessions

__all__ = ["Publisher", "Reason"]

Reason = Literal["client_gone", "sealed", "engine_error", "cancelled", "timeout", "context_full"]
_REJECTIONS = 200
"""Refusals of one attempt that are put on the log; a harness that asks for ever is only counted beyond."""
_COUNTED = 65_536
"""Attempts whose refusals are counted; the one that was refused longest ago is forgotten."""
_log = structlog.get_logger(__name__)


class Publisher:
    """The proxy's writes."""

    def __init__(self, bus: Bus, sessions: Sessions) -> None:
        self._bus = bus
        self._sessions = sessions
        self.producer = bus.producer
        self._refused: OrderedDict[tuple[str, int], int] = OrderedDict()

    async def captured(self, session: Session, item: Captured) -> None:
        """Blobs, event, index. Raises BusError; the attempt is then doubtful: the log may hold the event."""
        key, name = session.key, item.node.completion
        try:
            if item.blobs:
                store = self._sessions.blobs(segment_of(key.session))
                await asyncio.gather(*(store.put_as(ref, body) for ref, body in item.blobs))
            subject = subjects.completion(key.session, key.attempt, name, "captured")
            done = await self._bus.once_raw(subject, item.body, item.hash, name)
        except BusError:
            session.doubtful = True
            raise
        item.node.sequence = done.sequence
        session.index.add(item.node)
        session.index.tokens += item.node.usage.completion_tokens
        for told in item.facts.delivered:
            if told in session.delivered:
                session.delivered.remove(told)

    async def aborted(
        self, session: Session, request: ChatRequest, completion: str, reason: Reason, *, detail: str = "",
        prompt_tokens: int = 0, ids: Sequence[int] = (), logprobs: Sequence[float | None] | None = None,
        started: float = 0.0, duration: float = 0.0,
    ) -> None:  # fmt: skip
        """A call that came to nothing. A log that doesn't answer is only noted: nothing was told to the harness."""
        key = session.key
        sampled, blob = pack(list(ids), "i32") if ids else (None, None)
        values = [float("nan") if v is None else v for v in logprobs] if logprobs else None
        column, other = pack(values, "f32") if values else (None, None)
        session.index.aborted[request.raw_hash] += 1
        session.index.ended.add(completion)
        event = CompletionAborted(
            session=key.session, attempt=key.attempt, run=key.run, task=key.task, completion=completion,
            dialect=request.dialect, stream=request.stream, request_hash=request.raw_hash, reason=reason,
            detail=detail[:1000], prompt_tokens=prompt_tokens, sampled=sampled, logprobs=column, started=started,
            duration_s=duration,
        )  # fmt: skip
        try:
            store = self._sessions.blobs(segment_of(key.session))
            for one in (blob, other):
                if one is not None:
                    await store.put_as(*one)
            await self._bus.once(event)
        except BusError as error:
            session.doubtful = True
            _log.warning("an aborted call isn't on the log", completion=completion, error=repr(error))

    async def undelivered(self, session: Session, completion: str, detail: str) -> None:
        """A captured answer whose caller was gone."""
        key = session.key
        event = CompletionUndelivered(
            session=key.session, attempt=key.attempt, run=key.run, task=key.task, completion=completion, detail=detail
        )
        try:
            await self._bus.once(event)
        except BusError as error:
            session.doubtful = True
            _log.warning("an undelivered answer isn't on the log", completion=completion, error=repr(error))

    async def rejected(self, key: SessionKey, dialect: str, status: int, reason: str, detail: str) -> None:
        """A refusal, up to a bound per attempt: one that is sealed, or not yet known, may ask for ever too."""
        name = (key.session, key.attempt)
        count = self._refused[name] = self._refused.pop(name, 0) + 1
        if len(self._refused) > _COUNTED:
            self._refused.popitem(last=False)
        if count > _REJECTIONS:
            return
        event = CompletionRejected(
            session=key.session, attempt=key.attempt, run=key.run, task=key.task, completion=new_id(),
            dialect=dialect, status=status, reason=reason, detail=detail[:500],
        )  # fmt: skip
        try:
            await self._bus.once(event)
        except BusError as error:
            _log.warning("a refusal isn't on the log", session=key.session, error=repr(error))
