"""Import: an archive back onto a server, message by message in order; interrupted, it goes on where it was.

Events and blobs get the sequences that they had, so that seals and log ranges mean the same; the time at which a
message was first stored travels in a header. Traces and dead letters, whose streams may have gaps, keep their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from pathlib import Path

import nats.errors
import orjson

from polar_common.bus import Bus
from polar_common.bus.client import BODY, ELSS
from polar_common.bus.read import TIME, Stored, leader_get
from polar_common.errors import Conflict, Unavailable
from polar_common.topology import Topology, apply_streams

from .format import Manifest, read_manifest
from .read import read_archive

__all__ = ["load_archive"]

_WINDOW = 128
_EXPECTED = "Nats-Expected-Last-Sequence"
_TIMEOUT_S = 10.0
_STALE = 10071


async def load_archive(
    bus: Bus, directory: Path, topology: Topology, on_progress: Callable[[str, int], None] | None = None
) -> Manifest:
    """Create what is missing on the server and publish everything. `topology.segment` is replaced by the archive's.

    Raises Conflict if a stream there holds anything else, BlobError for a damaged archive, Unavailable.
    """
    manifest = read_manifest(directory)
    # No consumers: what is over must not be worked on again. `polar up` makes those of the segment that it serves.
    await apply_streams(bus.js, topology.for_segment(manifest.segment))
    for stream in manifest.streams.values():
        exact = stream.kind in ("events", "blobs")
        place = await _held(bus, directory, stream.name, stream.kind) if exact else 0
        messages = read_archive(directory, stream.kind, after=place)
        count = place
        while window := list(islice(messages, _WINDOW)):
            await _publish_window(bus, stream.name, window, exact=exact)
            count += len(window)
            if on_progress is not None:
                on_progress(stream.name, count)
    return manifest


async def _held(bus: Bus, directory: Path, stream: str, kind: str) -> int:
    """How far the server's stream is the archive's. Raises Conflict if it isn't its beginning."""
    last = await leader_get(bus.nc, stream, ">")
    if last is None:
        return 0
    there = next(iter(read_archive(directory, kind, after=last.sequence - 1, check=False)), None)
    if there is None or (there.subject, there.body) != (last.subject, last.body):
        raise Conflict(f"{stream} holds other messages than the archive: import into an empty log")
    return last.sequence


async def _publish_window(bus: Bus, stream: str, window: Iterable[Stored], *, exact: bool) -> None:
    """Publish some messages with their acknowledgements awaited together; the server keeps their order."""
    sent: list[tuple[Stored, Awaitable[bytes]]] = []
    for stored in window:
        headers = {BODY: stored.body_hash, TIME: stored.time.isoformat(), ELSS: "0"}
        if exact:
            headers[_EXPECTED] = str(stored.sequence - 1)
        body, encoding = await bus.packed(stored.subject, stored.body)
        sent.append((stored, asyncio.ensure_future(_request(bus, stored, body, headers | encoding))))
        await asyncio.sleep(0)
    for stored, answer in sent:
        told = orjson.loads(await answer)
        error = told.get("error")
        if error is None:
            continue
        if not exact and error.get("err_code") == _STALE:
            await _same(bus, stored, stream)
            continue
        raise Conflict(f"{stored.subject} (sequence {stored.sequence}): {error.get('description')}")


async def _same(bus: Bus, stored: Stored, stream: str) -> None:
    """Raises Conflict if what is there under a message's subject isn't that message."""
    there = await leader_get(bus.nc, stream, stored.subject)
    if there is None or there.body != stored.body:
        what = f"{stream} holds another message on {stored.subject} than the archive (its sequence {stored.sequence})"
        raise Conflict(f"{what}: import into an empty log")


async def _request(bus: Bus, stored: Stored, body: bytes, headers: dict[str, str]) -> bytes:
    try:
        return (await bus.nc.request(stored.subject, body, timeout=_TIMEOUT_S, headers=headers)).data
    except (TimeoutError, nats.errors.Error) as error:
        raise Unavailable(f"no answer to {stored.subject}: {error!r}; start the import again") from error
