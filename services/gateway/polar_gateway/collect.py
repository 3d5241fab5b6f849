"""What an attempt leaves behind: its patch, log, answer and chosen files, as blobs, without its session key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from polar_common.blobs import Blobs
from polar_common.errors import ResourceExhausted, RuntimeFault
from polar_common.packing import BlobRef
from polar_runtime import Runtime

from .output import redact

__all__ = ["Artifacts", "collect"]

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Artifacts:
    """References to what was stored. `trouble`: why something is missing; `exhausted`: the limit it went beyond."""

    patch: BlobRef | None = None
    log: BlobRef | None = None
    answer: BlobRef | None = None
    files: dict[str, BlobRef] = field(default_factory=dict)
    trouble: str = ""
    exhausted: str = ""


async def collect(
    found: Artifacts,
    runtime: Runtime,
    blobs: Blobs,
    *,
    key: str,
    log: bytes,
    answer: bytes,
    files: Sequence[str] = (),
    files_bytes: int = 64 << 20,
    started: bool = True,
) -> None:
    """Store everything and fill `found`, first with what needs no look at the agent's files, which may take for ever.

    `started`: the harness ran, so the working directory is its work. What the agent made unreadable or too large is
    left out and named; only the blob store's own failures are raised.
    """
    found.log = await _store(blobs, redact(log, key), "text/plain")
    found.answer = await _store(blobs, redact(answer, key), "text/plain")
    if started:
        found.patch = await _store(blobs, redact(await _patch(runtime, found), key), "text/x-diff")
        for path, content in (await _files(runtime, files, files_bytes, found)).items():
            found.files[path] = await blobs.put(redact(content, key))


async def _store(blobs: Blobs, body: bytes, media_type: str) -> BlobRef | None:
    return await blobs.put(body, media_type) if body else None


async def _patch(runtime: Runtime, found: Artifacts) -> bytes:
    try:
        return await runtime.diff()
    except ResourceExhausted as error:
        found.trouble, found.exhausted = f"no patch: {error}", error.resource
    except RuntimeFault as error:
        found.trouble = f"no patch: {error}"
    _log.warning("no patch", attempt=runtime.spec.label, reason=found.trouble)
    return b""


async def _files(runtime: Runtime, paths: Sequence[str], limit: int, found: Artifacts) -> dict[str, bytes]:
    if not paths:
        return {}
    try:
        return await runtime.download(paths, max_bytes=limit)
    except RuntimeFault as error:
        found.trouble = found.trouble or f"no files: {error}"
        return {}
