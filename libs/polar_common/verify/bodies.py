"""Traces and blobs, message by message: hashes are recomputed, counts compared, and what belongs together noted."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from polar_common import subjects
from polar_common.bus.read import Stored
from polar_common.errors import BlobError, FromTheFuture, Poison
from polar_common.packing import Column, unpack
from polar_common.trace_messages import read_message
from polar_common.traces import GroupTraces, Trace, TraceManifest, trace_hash

from .facts import Facts
from .findings import Finding, Findings
from .record import blob_refs, natural_key
from .sources import Source, fetch_blob

__all__ = ["BlobRecorder", "TraceRecorder"]


class TraceRecorder:
    """Records the messages of the trace stream. Columns that are blobs are fetched one trace at a time."""

    def __init__(
        self, facts: Facts, findings: Findings, source: Source, stream: str, segments: Collection[str]
    ) -> None:
        self._facts = facts
        self._findings = findings
        self._source = source
        self._stream = stream
        self._segments = segments
        self.count = 0

    async def record(self, stored: Stored) -> None:
        """One message: a trace, a manifest or a group's projection, by its subject."""
        self.count += 1
        self._facts.add("subjects", natural_key(stored.subject), self._stream, stored.sequence)
        tokens = stored.subject.split(".")
        if len(tokens) > 4 and tokens[4].partition("-")[0] not in self._segments:
            # Of a segment that was dropped, or isn't in this archive: there is nothing to hold it against.
            return
        try:
            if tokens[-1] == "closed":
                self._projection(read_message(GroupTraces, stored.body), stored)
            elif tokens[-1] == "manifest":
                self._manifest(read_message(TraceManifest, stored.body), stored)
            else:
                await self._trace(read_message(Trace, stored.body), stored)
        except Poison as error:
            newer = isinstance(error, FromTheFuture)
            self._facts.add("unread", self._stream, stored.sequence, stored.subject, str(error)[:300], int(newer))

    def _add(self, check: str, stored: Stored, detail: str) -> None:
        self._findings.add(Finding(check, stored.subject, detail, stored.sequence))

    def _projection(self, group: GroupTraces, stored: Stored) -> None:
        if stored.subject != subjects.trace_closed(group.run, group.build, group.task):
            self._add("misplaced", stored, f"a closing of {group.task} in build {group.build}")
            return
        self._facts.add("projections", group.build, group.task, group.action_tokens, group.traces, stored.sequence)
        for session, manifest in group.manifests.items():
            self._facts.add("projected", group.build, group.task, session, manifest)

    def _manifest(self, manifest: TraceManifest, stored: Stored) -> None:
        expected = subjects.trace_manifest(manifest.run, manifest.build, manifest.task, manifest.session)
        if stored.subject != expected:
            self._add("misplaced", stored, f"this manifest belongs to {expected}")
            return
        if stored.body_hash != manifest.hash():
            self._add("body_hash", stored, "the manifest says something else than was published")
        self._facts.add(
            "manifests", manifest.build, manifest.session, manifest.hash(), len(manifest.traces),
            sum(manifest.action_tokens), stored.sequence,
        )  # fmt: skip
        for number, name in enumerate(manifest.traces):
            self._facts.add("manifest_traces", manifest.build, manifest.session, number, name)

    async def _trace(self, trace: Trace, stored: Stored) -> None:
        expected = subjects.trace(trace.run, trace.build, trace.task, trace.session, trace.number)
        if stored.subject != expected:
            self._add("misplaced", stored, f"this trace belongs to {expected}")
            return
        for sha, size in blob_refs(orjson.loads(stored.body)):
            self._facts.add("blob_refs", sha, size, stored.subject)
        self._facts.add(
            "traces", trace.build, trace.session, trace.number, trace.trace_id, trace.action_tokens, stored.subject,
            stored.sequence,
        )  # fmt: skip
        for span in trace.spans:
            self._facts.add(
                "spans", trace.build, trace.session, span.completion, trace.number, int(span.trained), span.length
            )
        try:
            wrong = await self._content(trace)
        except BlobError as error:
            wrong = str(error)
        if wrong:
            self._add("trace", stored, wrong)

    async def _content(self, trace: Trace) -> str:
        """What is wrong with a trace's content; "" if nothing."""
        prompt: Any = await self._column(trace.prompt_ids)
        response: Any = await self._column(trace.response_ids)
        mask: Any = await self._column(trace.loss_mask)
        logprobs: Any = await self._column(trace.logprobs)
        if not len(response) == len(mask) == len(logprobs):
            return f"{len(response)} ids, {len(mask)} mask values, {len(logprobs)} log-probs"
        if trace_hash(prompt, response, mask, logprobs, trace.spans, trace.rules_hash) != trace.trace_id:
            return f"its content isn't what {trace.trace_id[:16]} names"
        if int(mask.sum()) != trace.action_tokens:
            return f"{int(mask.sum())} tokens are trained, it says {trace.action_tokens}"
        if np.any(logprobs[mask == 0]):
            return "a log-prob where nothing is trained"
        trained = np.zeros(len(mask), dtype=bool)
        for span in trace.spans:
            if span.start + span.length > len(mask):
                return f"the span of {span.completion} ends after the trace"
            if span.trained and trained[span.start : span.start + span.length].any():
                return f"the span of {span.completion} overlaps another"
            trained[span.start : span.start + span.length] |= span.trained
        return "a token outside of every trained span is trained" if np.any(mask[~trained]) else ""

    async def _column(self, column: Column) -> npt.NDArray[np.generic]:
        return unpack(column, None if column.blob is None else await fetch_blob(self._source, column.blob))


class BlobRecorder:
    """Hashes every blob of a stream. Parts of a large one come in order, and its manifest last."""

    def __init__(self, facts: Facts, findings: Findings, stream: str) -> None:
        self._facts = facts
        self._findings = findings
        self._stream = stream
        self._parts: dict[str, tuple[int, int, Any]] = {}
        """Hash → (parts, bytes, digest so far) of blobs whose manifest hasn't come."""
        self.count = 0

    def record(self, stored: Stored) -> None:
        """One message: a body, a part, or a manifest of parts."""
        self.count += 1
        self._facts.add("subjects", natural_key(stored.subject), self._stream, stored.sequence)
        name, _, part = stored.subject.split(".", 3)[3].partition(".")
        if part:
            self._part(name, int(part) if part.isdigit() else -1, stored)
            return
        if hashlib.sha256(stored.body).hexdigest() == name:
            self._facts.add("blobs", name, len(stored.body))
            return
        parts, size, digest = self._parts.pop(name, (0, 0, hashlib.sha256()))
        if parts and _count(stored.body) == parts and digest.hexdigest() == name:
            self._facts.add("blobs", name, size)
            return
        self._facts.add("blobs", name, -1)
        self._findings.add(Finding("blob", stored.subject, "damaged: its content has another hash", stored.sequence))

    def _part(self, name: str, number: int, stored: Stored) -> None:
        parts, size, digest = self._parts.get(name) or (0, 0, hashlib.sha256())
        if number == parts:
            digest.update(stored.body)
            self._parts[name] = (parts + 1, size + len(stored.body), digest)


def _count(manifest: bytes) -> int:
    try:
        return int(orjson.loads(manifest)["polar_parts"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return -1
