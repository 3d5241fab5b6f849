"""Reads: the leader's last message of a subject, and the batched direct get that fetches a whole session at once."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import nats.errors
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg

from polar_common.errors import BusError, ConfigError, Misplaced, Unavailable
from polar_common.events import Event, decode

from .wire import plain

__all__ = ["TIME", "Stored", "direct_get", "leader_get", "parse_time"]

TIME = "Polar-Time"
"""When a message was first stored, where it came here from an archive."""
_TIMEOUT_S = 5.0
_TOO_MANY = 1024


class Stored:
    """A message of the log. `event` decodes its body when asked, raising Poison or FromTheFuture; permissions go by
    subjects, so an event that lies on another's subject is Misplaced and never believed."""

    __slots__ = ("_event", "body", "body_hash", "sequence", "subject", "time")

    def __init__(self, subject: str, sequence: int, time: datetime, body: bytes, body_hash: str) -> None:
        self.subject = subject
        self.sequence = sequence
        self.time = time
        self.body = body
        self.body_hash = body_hash
        self._event: Event | None = None

    @property
    def event(self) -> Event:
        if self._event is None:
            self._event = _in_place(decode(self.body), self.subject)
        return self._event

    def __repr__(self) -> str:
        return f"Stored({self.sequence}, {self.subject})"


def _in_place(event: Event, subject: str) -> Event:
    try:
        own = event.subject()
    except ConfigError as error:
        own = f"nowhere ({error})"
    if own != subject:
        raise Misplaced(f"this {event.kind} belongs to {own}")
    return event


def parse_time(text: str) -> datetime:
    """JetStream's RFC 3339 time with nanoseconds, cut to microseconds, UTC."""
    whole, _, fraction = text.rstrip("Z").partition(".")
    return datetime.fromisoformat(whole).replace(microsecond=int((fraction + "000000")[:6] or 0), tzinfo=UTC)


def _time(headers: Mapping[str, str], stamped: str) -> datetime:
    return datetime.fromisoformat(headers[TIME]) if TIME in headers else parse_time(stamped)


def from_delivery(msg: Msg) -> Stored:
    """A message delivered by a consumer."""
    meta, headers = msg.metadata, msg.headers or {}
    time = datetime.fromisoformat(headers[TIME]) if TIME in headers else meta.timestamp
    return Stored(msg.subject, meta.sequence.stream, time, plain(headers, msg.data), headers.get("Polar-Body", ""))


def _raw_headers(block: bytes) -> dict[str, str]:
    found = {}
    for line in block.decode("utf-8", "replace").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            found[name.strip()] = value.strip()
    return found


async def leader_get(nc: Client, stream: str, subject: str) -> Stored | None:
    """`STREAM.MSG.GET`: answered by the leader, never stale. None if nothing matches."""
    request = orjson.dumps({"last_by_subj": subject})
    try:
        answer = orjson.loads((await nc.request(f"$JS.API.STREAM.MSG.GET.{stream}", request, timeout=_TIMEOUT_S)).data)
    except (TimeoutError, nats.errors.Error) as error:
        raise Unavailable(f"{stream} doesn't answer: {error!r}") from error
    if refused := answer.get("error"):
        if refused.get("err_code") in (10037, 10059):
            return None
        raise Unavailable(f"{stream}: {refused.get('description')}")
    message = answer["message"]
    headers = _raw_headers(b64decode(message["hdrs"])) if message.get("hdrs") else {}
    return Stored(
        message["subject"],
        int(message["seq"]),
        _time(headers, message["time"]),
        plain(headers, b64decode(message.get("data") or "")),
        headers.get("Polar-Body", ""),
    )


async def direct_get(nc: Client, stream: str, filters: Sequence[str], up_to: int = 0, after: int = 0) -> list[Stored]:
    """The last message per matching subject, by sequence.

    One request per call; where more than 1,024 subjects match, the server refuses and the range is walked instead, as
    it is where only what comes `after` a sequence is wanted.
    """
    if after:
        later = [s for one in filters for s in await _walk(nc, stream, one, up_to, after)]
        return sorted(later, key=lambda s: s.sequence)
    request: dict[str, Any] = {"multi_last": list(filters)}
    if up_to:
        request["up_to_seq"] = up_to
    found, status = await _collect(nc, stream, request)
    if status == "413":
        found = []
        for one in filters:
            found += await _walk(nc, stream, one, up_to)
        found.sort(key=lambda s: s.sequence)
    elif status not in ("204", "404"):
        raise BusError(f"{stream}: direct get answered {status}")
    return found


async def _walk(nc: Client, stream: str, subject: str, up_to: int, after: int = 0) -> list[Stored]:
    """All messages on a pattern, in pages of 512. Each subject is used once, so this equals the last per subject."""
    found: list[Stored] = []
    position = after + 1
    while True:
        page, _ = await _collect(nc, stream, {"batch": 512, "seq": position, "next_by_subj": subject})
        page = [s for s in page if not up_to or s.sequence <= up_to]
        found += page
        if len(page) < 512:
            return found
        position = page[-1].sequence + 1


async def _collect(nc: Client, stream: str, request: dict[str, Any]) -> tuple[list[Stored], str]:
    """Messages of a batched direct get, and the status that ended it."""
    inbox = nc.new_inbox()
    found: list[Stored] = []
    over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def heard(msg: Msg) -> None:
        if over.done():
            return
        try:
            if status := (msg.headers or {}).get("Status"):
                over.set_result(status)
            else:
                found.append(_direct(msg))
        except (KeyError, ValueError) as error:
            over.set_exception(BusError(f"{stream}: an answer that isn't one: {error!r}"))

    # A callback: waiting for each message by itself costs a timer and a task, more than reading it.
    sub = await nc.subscribe(inbox, cb=heard)
    try:
        await nc.publish(f"$JS.API.DIRECT.GET.{stream}", orjson.dumps(request), reply=inbox)
        async with asyncio.timeout(_TIMEOUT_S * 2):
            while not over.done():
                before = len(found)
                await asyncio.wait({over}, timeout=_TIMEOUT_S)
                if not over.done() and len(found) == before:
                    raise TimeoutError
        return found, over.result()
    except (TimeoutError, nats.errors.Error) as error:
        raise Unavailable(f"{stream} doesn't answer a direct get: {error!r}") from error
    finally:
        await sub.unsubscribe()


def _direct(msg: Msg) -> Stored:
    headers = msg.headers or {}
    return Stored(
        headers["Nats-Subject"],
        int(headers["Nats-Sequence"]),
        _time(headers, headers["Nats-Time-Stamp"]),
        plain(headers, msg.data),
        headers.get("Polar-Body", ""),
    )
