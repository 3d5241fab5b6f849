"""Publishing and reading the log. Every publish awaits its acknowledgement and every refusal is resolved, not judged.

`once` writes a fact that may happen once (expected sequence 0 on its own subject); `transition` writes a session's
next fact behind the session's fence; `batch` writes facts that belong together. Answers that say "somebody was first"
or nothing at all are resolved by reading the subject's last message from the leader: the same body means success.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import nats.errors
import orjson
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import StoreCompression
from nats.js.errors import NotFoundError
from nats.protocol.parser import PERMISSIONS_ERR

from polar_common import subjects
from polar_common.connection import connection
from polar_common.context import with_trace
from polar_common.errors import BusError, ConfigError, Conflict, NotFound, Stale, Unavailable
from polar_common.events import Event, SessionEvent, encode
from polar_common.ids import new_id, segment_of
from polar_common.tasks import cancel_and_wait, spawn
from polar_common.topology import events_stream

from .acks import Acks
from .read import Stored, direct_get, leader_get
from .wire import WORTH, compressed

__all__ = ["Bus", "Published", "Stored"]

ELSS = "Nats-Expected-Last-Subject-Sequence"
ELSF = "Nats-Expected-Last-Subject-Sequence-Subject"
MSG_ID = "Nats-Msg-Id"
BODY = "Polar-Body"
"""Hash of what the message says (`Event.body_hash`, or sha256 of a trace): decides whether a repeat is the same."""

_STALE = 10071
_UNDECIDED = (10164, 10158, 10201)
"""This fence is in flight, this message id is in process (both where servers replicate), a batch with a known id."""
_FULL = (10077, 10047, 10023)
_TRIES = 8
_READS = 20
_TIMEOUT_S = 5.0
_log = structlog.get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Published:
    """Where a message is. `duplicate`: it had been there before."""

    sequence: int
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class _Refused(Exception):
    code: int
    text: str


class Bus:
    """A connection to the log for one service instance. `producer` is stamped on its events."""

    def __init__(self, nc: Client, producer: str) -> None:
        self.nc = nc
        self.js: JetStreamContext = nc.jetstream(timeout=_TIMEOUT_S)
        self.producer = producer
        self._acks = Acks(nc)
        self._as_it_is: dict[str, bool] = {}
        """Stream of events → whether its bodies needn't be compressed: the server does."""
        self._denied: asyncio.Future[str] | None = None
        """What the server forbade this user, once it has: it answers no request that it forbids."""

    @classmethod
    async def connect(cls, url: str, producer: str, *, user: str = "", password: str = "", wait_s: float = 30.0) -> Bus:
        """Connect, waiting up to `wait_s` seconds for the server. Reconnects for ever afterwards.

        User and password may be part of the URL. Raises Unavailable if no server answers, ConfigError if it refuses
        the user.
        """
        where = connection(url, user, password)
        refused = asyncio.Event()
        denied: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def on_error(error: Exception) -> None:
            _log.warning("nats", error=repr(error), producer=producer)
            if "authorization" in str(error).lower():
                refused.set()
            if PERMISSIONS_ERR in str(error) and not denied.done():
                denied.set_result(str(error).removeprefix("nats: "))

        nc = Client()
        options: dict[str, Any] = {
            "name": producer,
            "error_cb": on_error,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": 0.2,
            "connect_timeout": 2,
            "pending_size": 64 << 20,
            **where.options(),
        }
        # With reconnects without end, the client's own `connect` doesn't end either.
        connecting = spawn(nc.connect(**options), name="connect")
        refusing = spawn(refused.wait(), name="refused")
        await asyncio.wait({connecting, refusing}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if connecting.done() and connecting.exception() is None:
            await cancel_and_wait(refusing)
            made = cls(nc, producer)
            made._denied = denied
            return made
        await cancel_and_wait(connecting, refusing)
        await nc.close()
        if refused.is_set():
            raise ConfigError(f"{where.url} refuses user {where.user or '(none)'}", "nats_user")
        raise Unavailable(f"no NATS server at {where.url} within {wait_s:g} s")

    async def close(self) -> None:
        """Flush and disconnect."""
        if self.nc.is_connected:
            try:
                await self.nc.flush(timeout=2)
            except nats.errors.Error as error:
                _log.warning("flush before closing failed", error=repr(error))
        await self.nc.close()

    async def allowed(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work gives. Raises ConfigError as soon as the server forbids any of it to this user."""
        task, denied = asyncio.current_task(), self._denied
        if task is None or denied is None:
            return await work

        def end(_: asyncio.Future[str]) -> None:
            task.cancel()

        denied.add_done_callback(end)
        try:
            return await work
        except asyncio.CancelledError:
            if not denied.done():
                raise
            task.uncancel()
            raise ConfigError(f"the log forbids it to this user: {denied.result()}", "nats_user") from None
        finally:
            denied.remove_done_callback(end)

    # -- publishing

    async def once(self, event: Event) -> Published:
        """Publish a fact that may happen once. A repeat with the same body succeeds.

        Raises Conflict if the subject holds another body, Unavailable if JetStream gives no answer.
        """
        return await self.once_raw(event.subject(), encode(self._stamped(event)), event.body_hash(), event.event_id)

    async def once_raw(self, subject: str, body: bytes, body_hash: str, message_id: str = "") -> Published:
        """`once` for bodies that aren't events (traces, blobs)."""
        headers = {ELSS: "0", BODY: body_hash, **({MSG_ID: message_id} if message_id else {})}
        try:
            return await self._resolved(subject, body, headers, body_hash)
        except Stale as stale:
            raise Conflict(f"{subject} already holds another body") from stale

    async def transition(self, event: SessionEvent, after: int) -> Published:
        """Publish a session's next fact; `after` is the session's last sequence as read.

        Raises Stale if anything else happened to the session meanwhile: read it again and decide anew.
        """
        headers = {
            ELSS: str(after),
            ELSF: subjects.session_filter(event.session),
            MSG_ID: event.event_id,
            BODY: event.body_hash(),
        }
        body = encode(self._stamped(event))
        return await self._resolved(event.subject(), body, headers, event.body_hash())

    async def batch(self, events: Sequence[Event], *, fence: tuple[str, int] | None = None) -> Published:
        """Publish all events or none (at most 500, one stream). `fence`: (session, its last sequence as read).

        A repeat of a committed batch succeeds. Raises Stale if the fence or one of the subjects was taken.
        """
        if not 1 <= len(events) <= 500:
            raise BusError(f"a batch holds 1 to 500 events, not {len(events)}")
        last = events[-1]
        for attempt in range(_TRIES):
            try:
                return await self._send_batch(events, fence)
            except nats.errors.MaxPayloadError as error:
                raise self._too_large(f"a batch ending in {last.subject()}") from error
            except (_Refused, TimeoutError, nats.errors.Error) as error:
                found = await self._same_as_stored(last.subject(), last.body_hash())
                if found is not None:
                    return found
                if isinstance(error, _Refused) and error.code not in _UNDECIDED:
                    raise _error_for(error, last.subject()) from error
            await _pause(attempt)
        raise Unavailable(f"no answer to a batch ending in {last.subject()}")

    async def _send_batch(self, events: Sequence[Event], fence: tuple[str, int] | None) -> Published:
        batch_id = new_id()
        for number, event in enumerate(events, 1):
            headers = {"Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(number), BODY: event.body_hash()}
            if fence is not None and number == 1:
                headers |= {ELSS: str(fence[1]), ELSF: subjects.session_filter(fence[0])}
            else:
                headers[ELSS] = "0"
            body, encoding = await self.packed(event.subject(), encode(self._stamped(event)))
            headers |= encoding
            if number < len(events):
                await self.nc.publish(event.subject(), body, headers=with_trace(headers))
                continue
            headers["Nats-Batch-Commit"] = "1"
            return await self._request(event.subject(), body, headers)
        raise BusError("empty batch")

    def _stamped(self, event: Event) -> Event:
        return event if event.producer else event.model_copy(update={"producer": self.producer})

    async def _request(self, subject: str, body: bytes, headers: dict[str, str]) -> Published:
        answer = orjson.loads((await self._acks.request(subject, body, with_trace(headers), _TIMEOUT_S)).data)
        if error := answer.get("error"):
            raise _Refused(int(error.get("err_code") or error.get("code") or 0), str(error.get("description")))
        return Published(int(answer["seq"]), bool(answer.get("duplicate")))

    async def packed(self, subject: str, body: bytes) -> tuple[bytes, dict[str, str]]:
        """A body as it's published on a subject, and the header that says how (`wire.py`)."""
        if len(body) < WORTH or len(body) > self.nc.max_payload or not subject.startswith("polar.events."):
            return body, {}
        stream = await self._stream_of(subject)
        if stream not in self._as_it_is:
            try:
                config = (await self.js.stream_info(stream)).config
            except (TimeoutError, nats.errors.Error):
                # The publish itself will tell what is wrong.
                return body, {}
            self._as_it_is[stream] = config.compression == StoreCompression.S2
        return (body, {}) if self._as_it_is[stream] else compressed(body)

    async def _resolved(self, subject: str, body: bytes, headers: dict[str, str], body_hash: str) -> Published:
        body, encoding = await self.packed(subject, body)
        headers |= encoding
        for attempt in range(_TRIES):
            try:
                return await self._request(subject, body, headers)
            except nats.errors.MaxPayloadError as error:
                raise self._too_large(subject) from error
            except _Refused as refused:
                if refused.code not in (_STALE, *_UNDECIDED):
                    raise _error_for(refused, subject) from refused
                found = await self._same_as_stored(subject, body_hash)
                if found is not None:
                    return found
                if refused.code == _STALE:
                    raise Stale(f"{subject}: {refused.text}") from refused
            except (TimeoutError, nats.errors.Error) as error:
                _log.warning("no answer to a publish", subject=subject, error=repr(error), attempt=attempt)
                found = await self._same_as_stored(subject, body_hash)
                if found is not None:
                    return found
            await _pause(attempt)
        raise Unavailable(f"no answer to a publish on {subject}{await self._why_silent(subject)}")

    def _too_large(self, what: str) -> BusError:
        return BusError(f"{what} has more than {self.nc.max_payload} bytes, more than the server takes")

    async def _why_silent(self, subject: str) -> str:
        """A server answers no request that it forbids; one whose disk is full answers everything but publishes, until
        it's started again on a roomier one.
        """
        if self._denied is not None and self._denied.done():
            return f": {self._denied.result()}"
        try:
            await self.last(subject)
        except Unavailable:
            return ""
        return ", but reads are answered: the server's disk may be full (its log tells)"

    async def _same_as_stored(self, subject: str, body_hash: str) -> Published | None:
        """The message on `subject` if it is the one we meant; None if the subject is empty or can't be read."""
        try:
            stored = await self.last(subject)
        except Unavailable:
            return None
        if stored is None:
            return None
        if stored.body_hash == body_hash:
            return Published(stored.sequence, duplicate=True)
        raise Stale(f"{subject} holds another body")

    # -- reading

    async def last(self, subject: str, stream: str = "") -> Stored | None:
        """The last message on a subject or pattern, from the leader; None if there is none."""
        return await leader_get(self.nc, stream or await self._stream_of(subject), subject)

    async def read(
        self, stream: str, filters: Sequence[str], *, up_to: int = 0, after: int = 0, at_least: int = 0
    ) -> list[Stored]:
        """The last message of every subject that matches, by sequence. `up_to`: only sequences ≤ it (0: all); `after`:
        only sequences > it; `at_least`: that of a message that matches, which the answer has to contain.

        A replica may lag behind an acknowledgement: where it matters, ask `last` first and give what it says as
        `at_least`. Raises Unavailable if the replicas don't get there.
        """
        for _ in range(_READS):
            found = await direct_get(self.nc, stream, filters, up_to, after)
            if not at_least or (found and found[-1].sequence >= at_least):
                return found
            await asyncio.sleep(0.05)
        raise Unavailable(f"{stream}: the replicas lag behind sequence {at_least}")

    async def holds(self, segment: str) -> bool:
        """Whether the log has such a segment; a dropped one it hasn't. Raises Unavailable."""
        try:
            await self.js.find_stream_name_by_subject(f"polar.events.{segment}.>")
        except NotFoundError:
            return False
        except (TimeoutError, nats.errors.Error) as error:
            raise Unavailable(f"no list of streams: {error!r}") from error
        return True

    async def read_session(
        self, session: str, *, up_to: int = 0, completions: bool = True, at_least: int = 0
    ) -> list[Stored]:
        """All of one session's transitions and completions, by sequence; empty if it doesn't exist."""
        filters = [subjects.session_filter(session)]
        if completions:
            filters.append(subjects.completion_filter(session))
        return await self.read(events_stream(segment_of(session)), filters, up_to=up_to, at_least=at_least)

    async def _stream_of(self, subject: str) -> str:
        kind, _, rest = subject.removeprefix("polar.").partition(".")
        match kind:
            case "events":
                return events_stream(rest.partition(".")[0])
            case "blobs":
                return f"POLAR_BLOBS_{rest.partition('.')[0]}"
            case "traces":
                return "POLAR_TRACES"
            case "dlq":
                return "POLAR_DLQ"
            case "catalogue":
                return "POLAR_CATALOGUE"
        raise NotFound(f"no stream holds {subject}")

    async def reply(self, msg: Msg, body: bytes, *, timeout: float = 5.0) -> None:
        """Answer a delivered message (ack, nak, in-progress, term) and wait until the server has it.

        Raises Unavailable if it doesn't confirm: a lease that isn't confirmed isn't held.
        """
        try:
            await self.nc.request(msg.reply, body, timeout=timeout)
        except (TimeoutError, nats.errors.Error) as error:
            raise Unavailable(f"no confirmation of {body[:16]!r}: {error!r}") from error


def _error_for(refused: _Refused, subject: str) -> BusError:
    if refused.code == _STALE:
        return Stale(f"{subject}: {refused.text}")
    if refused.code in _FULL:
        return Unavailable(f"{subject}: the log is full or out of resources: {refused.text}")
    return BusError(f"{subject}: {refused.text} ({refused.code})")


async def _pause(attempt: int) -> None:
    await asyncio.sleep(random.uniform(0.5, 1.0) * min(2.0, 0.02 * 2**attempt))
