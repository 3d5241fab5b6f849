"""From built traces to messages, and onto the log: traces one by one, then the manifest, then the fact.

Bytes are deterministic: a handler that died half-way publishes the same again, and what is there already counts as
done. Another body under a used subject stops the session's build (`Conflict`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from polar_common import __version__, subjects
from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.events import BuildReconstructed
from polar_common.packing import BlobRef, Column, ColumnType, pack
from polar_common.traces import TraceManifest

from .build import Built, BuiltTrace

__all__ = ["Outgoing", "outgoing", "publish"]

_AT_ONCE = 16


@dataclass(slots=True)
class Outgoing:
    """A session's messages: (subject, body, body hash) per trace, the blobs they need, the manifest and the fact.

    `pictures`: bodies that traces name and completions stored.
    """

    traces: list[tuple[str, bytes, str]]
    blobs: list[tuple[BlobRef, bytes]]
    pictures: list[BlobRef]
    manifest: TraceManifest
    fact: BuildReconstructed


def outgoing(built: Built, build: str, causation: str = "") -> Outgoing:
    """Pack everything. Pure."""
    chosen = built.selection
    blobs: list[tuple[BlobRef, bytes]] = []
    totals = {"session_traces": len(built.traces), "session_action_tokens": built.sampled_tokens}
    traces = []
    for number, trace in enumerate(built.traces):
        body = orjson.dumps(_trace_json(trace, number, built, build, totals, blobs))
        traces.append((subjects.trace(chosen.run, build, chosen.task, chosen.session, number), body, trace.trace_id))
    manifest = TraceManifest(
        run=chosen.run,
        build=build,
        task=chosen.task,
        session=chosen.session,
        attempt=chosen.attempt,
        rules=built.rules.name,
        rules_hash=built.rules_hash,
        traces=tuple(t.trace_id for t in built.traces),
        action_tokens=tuple(t.draft.action_tokens for t in built.traces),
        roles=tuple(t.draft.role for t in built.traces),
        spans=built.spans,
        exact_spans=built.exact_spans,
        excluded=built.excluded,
        log_last=built.last,
    )
    return Outgoing(traces, blobs, _pictures(built), manifest, _fact(built, build, manifest, causation))


def _pictures(built: Built) -> list[BlobRef]:
    named = {i["blob"]["sha256"]: i["blob"] for t in built.traces for i in t.draft.images if i["blob"]}
    return [BlobRef.model_validate(ref) for ref in named.values()]


def _fact(built: Built, build: str, manifest: TraceManifest, causation: str) -> BuildReconstructed:
    chosen = built.selection
    return BuildReconstructed(
        run=chosen.run,
        task=chosen.task,
        causation=causation,
        session=chosen.session,
        attempt=chosen.attempt,
        build=build,
        rules=built.rules.name,
        rules_hash=built.rules_hash,
        manifest_hash=manifest.hash(),
        traces=len(built.traces),
        trained_completions=built.trained,
        excluded=built.excluded,
        sampled_tokens=built.sampled_tokens,
        exact_spans=built.exact_spans,
        drifted_spans=built.spans - built.exact_spans,
        ambiguous=built.ambiguous,
        chain_classes=dict(sorted(Counter(t.draft.chain_class for t in built.traces).items())),
        drift=dict(sorted(_drift(built).items())),
    )


def _drift(built: Built) -> Counter[str]:
    spans = [s for t in built.traces for s in t.draft.spans if s["trained"] and not s["context_exact"]]
    return Counter(s["drift_class"] for s in spans)


async def publish(bus: Bus, blobs: Blobs, out: Outgoing) -> int:
    """Put everything on the log in order; how many bytes that is on the trace stream. Raises Conflict, Unavailable."""
    for start in range(0, len(out.blobs), _AT_ONCE):
        await asyncio.gather(*(blobs.put_as(ref, body) for ref, body in out.blobs[start : start + _AT_ONCE]))
    for start in range(0, len(out.traces), _AT_ONCE):
        await asyncio.gather(*(bus.once_raw(*message) for message in out.traces[start : start + _AT_ONCE]))
    manifest = out.manifest
    subject = subjects.trace_manifest(manifest.run, manifest.build, manifest.task, manifest.session)
    body = manifest.model_dump_json().encode()
    await bus.once_raw(subject, body, manifest.hash())
    await bus.once(out.fact)
    return sum(len(trace) for _, trace, _ in out.traces) + len(body)


def _trace_json(
    trace: BuiltTrace,
    number: int,
    built: Built,
    build: str,
    totals: Mapping[str, int],
    blobs: list[tuple[BlobRef, bytes]],
) -> dict[str, Any]:
    """The JSON form of `polar_common.traces.Trace`; a test holds the two together."""
    draft, chosen = trace.draft, built.selection
    versions = [c.policy_seq for c in draft.trained] or [c.policy_seq for c in draft.calls]
    return {
        "schema_version": 1,
        "trace_id": trace.trace_id,
        "run": chosen.run,
        "build": build,
        "task": chosen.task,
        "session": chosen.session,
        "attempt": chosen.attempt,
        "number": number,
        "rules": built.rules.name,
        "rules_hash": built.rules_hash,
        "status": trace.status,
        "agent_role": draft.role,
        "chain_class": draft.chain_class,
        "ambiguous": draft.ambiguous,
        "prompt_ids": _column(draft.prompt, "i32", blobs),
        "response_ids": _column(draft.response, "i32", blobs),
        "loss_mask": _column(draft.mask, "u8", blobs),
        "logprobs": _column(draft.logprobs, "f32", blobs),
        "spans": draft.spans,
        "action_tokens": draft.action_tokens,
        **totals,
        "policy_seq_min": min(versions),
        "policy_seq_max": max(versions),
        "agent_depth": trace.depth,
        "agent": next((c.agent for c in draft.trained), ""),
        "parent_call": trace.parent_call,
        "tree": trace.place,
        "images": draft.images,
        "provenance": _provenance(trace, built),
    }


def _provenance(trace: BuiltTrace, built: Built) -> dict[str, Any]:
    engine = trace.draft.calls[-1].engine
    name, version, config = built.selection.harness
    return {
        "code_version": __version__,
        "log_first": built.first,
        "log_last": built.last,
        "harness": name,
        "harness_version": version,
        "harness_config_hash": config,
        "model": engine.model,
        "weights_hash": engine.weights_hash,
        "tokenizer_hash": engine.tokenizer_hash,
        "template_hash": engine.template_hash,
        "renderer": engine.renderer,
        "renderer_version": engine.renderer_version,
        "engine": engine.name,
        "dtype": engine.dtype,
        "logprob_kind": engine.logprob_kind,
    }


def _column(array: npt.NDArray[np.generic], kind: ColumnType, blobs: list[tuple[BlobRef, bytes]]) -> dict[str, Any]:
    column, blob = pack(array, kind)
    if blob is not None:
        blobs.append(blob)
    return _column_json(column)


def _column_json(column: Column) -> dict[str, Any]:
    ref = column.blob
    blob = None if ref is None else {"sha256": ref.sha256, "size": ref.size, "media_type": ref.media_type}
    return {"type": column.type, "n": column.n, "data": column.data, "blob": blob}
