"""Callbacks: a closed group is told to the URL that its submitter named, at least once.

The receiver knows a repeat by its `Idempotency-Key`. What can't be delivered in time ends as `callback.delivered` with
`ok: false` and in the dead letter, from which it can be tried again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import orjson
import stamina
import structlog
from prometheus_client import Counter

from polar_common import subjects
from polar_common.bus import Bus, Lease
from polar_common.errors import Conflict, Poison
from polar_common.events import CallbackDelivered, GroupClosed

from .settings import IngestSettings
from .specs import Specs

__all__ = ["CONSUMER", "Callbacks", "Refused"]

CONSUMER = "callbacks"
_MAX_WAIT_S = 60.0
_RETRIED = (408, 409, 425, 429)
_log = structlog.get_logger(__name__)
_callbacks = Counter("polar_ingest_callbacks", "Callbacks by how they ended", ["fate"])


class Refused(Exception):
    """The receiver, or our own caution, says no: trying again won't help."""


@dataclass(slots=True)
class _Again(Exception):
    """Worth another try, after `after` seconds where the receiver said so."""

    reason: str
    after: float | None = None


@dataclass(slots=True)
class _Tally:
    tries: int = 0
    status: int = 0
    problem: str = ""


class Callbacks:
    """The handler of the `callbacks` consumer; delivers under the message's lease."""

    def __init__(self, bus: Bus, specs: Specs, settings: IngestSettings, client: httpx.AsyncClient) -> None:
        self._bus = bus
        self._specs = specs
        self._settings = settings
        self._client = client

    async def handle(self, lease: Lease) -> None:
        """Deliver one group's end. Raises Poison when it is given up, after recording that."""
        event = lease.stored.event
        if not isinstance(event, GroupClosed):
            raise Poison(f"{lease.stored.subject} holds a {event.kind}")
        accepted = await self._specs.get(event.task)
        if not accepted.spec.callback or await self._bus.last(subjects.task(event.task, "callback_delivered")):
            return
        key = f"{event.task}.closed"
        body = {"event": "group.closed", "key": key, "id": accepted.spec.id, **event.model_dump(mode="json")}
        tally = _Tally()
        ok = await self._deliver(accepted.spec.callback, key, orjson.dumps(body), tally)
        await self._record(event, accepted.spec.callback, key, tally, ok)
        _callbacks.labels("delivered" if ok else "given_up").inc()
        if not ok:
            raise Poison(f"callback to {accepted.spec.callback} given up after {tally.tries} tries: {tally.problem}")

    async def _deliver(self, url: str, key: str, body: bytes, tally: _Tally) -> bool:
        try:
            async for attempt in stamina.retry_context(
                on=_worth_it,
                attempts=None,
                timeout=self._settings.ingest_callback_for_s,
                wait_initial=0.5,
                wait_max=_MAX_WAIT_S,
                wait_jitter=1.0,
            ):
                with attempt:
                    tally.tries += 1
                    await self._post(url, key, body, tally)
        except (_Again, Refused, httpx.HTTPError, httpx.InvalidURL) as error:
            tally.problem = str(error) or repr(error)
            _log.warning("callback given up", url=url, key=key, tries=tally.tries, error=tally.problem)
            return False
        return True

    async def _post(self, url: str, key: str, body: bytes, tally: _Tally) -> None:
        await _check_target(url)
        headers = {"content-type": "application/json", "idempotency-key": key, "user-agent": "polar"}
        tally.status = 0
        async with self._client.stream("POST", url, content=body, headers=headers, follow_redirects=False) as response:
            tally.status = response.status_code
        if response.is_success:
            return
        if response.status_code >= 500 or response.status_code in _RETRIED:
            raise _Again(f"HTTP {response.status_code}", _retry_after(response))
        raise Refused(f"HTTP {response.status_code}")

    async def _record(self, event: GroupClosed, url: str, key: str, tally: _Tally, ok: bool) -> None:
        told = CallbackDelivered(
            run=event.run,
            task=event.task,
            key=key,
            url=url,
            status=tally.status,
            tries=tally.tries,
            ok=ok,
            causation=event.event_id,
        )
        try:
            await self._bus.once(told)
        except Conflict:
            # It was delivered before, and the process died or lost its lease before the acknowledgement.
            _log.info("callback repeated", key=key)


def _worth_it(error: Exception) -> bool | float:
    if isinstance(error, _Again):
        return error.after if error.after is not None else True
    return isinstance(error, httpx.TransportError)


def _retry_after(response: httpx.Response) -> float | None:
    try:
        return min(_MAX_WAIT_S, max(0.1, float(response.headers["retry-after"])))
    except (KeyError, ValueError):
        return None


async def _check_target(url: str) -> None:
    """Link-local addresses are where clouds answer with credentials; nobody's receiver lives there. Raises Refused."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Refused("not an http or https URL")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            parts.hostname, parts.port or (443 if parts.scheme == "https" else 80), type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise _Again(f"{parts.hostname} can't be resolved: {error}") from error
    for *_, address in found:
        ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
        mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
        if (mapped or ip).is_link_local or (mapped or ip).is_multicast:
            raise Refused(f"{parts.hostname} is at {ip}, which no callback may reach")
