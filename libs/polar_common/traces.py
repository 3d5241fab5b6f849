"""What trainers receive: traces, the manifest of a session's traces, and the closing of a group for a build.

Identity: `trace_id` is the SHA-256 over ids, mask, log-probs, spans and rules hash, uncompressed; build and provenance
are an envelope outside the hash. Lengths: prompt P, response R; mask and log-probs are aligned to the response.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel, ConfigDict, Field

from .events import GroupMember, VersionSpan
from .packing import BlobRef, Column

__all__ = [
    "GroupTraces", "Provenance", "RoleTotals", "Span", "Trace", "TraceImage", "TraceManifest", "TreePosition",
    "span_inside", "trace_hash",
]  # fmt: skip


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class Span(_Model):
    """One completion inside a trace: response ids [start, start + length) were sampled by it."""

    completion: str
    start: Annotated[int, Field(ge=0)]
    length: Annotated[int, Field(ge=0)]
    trained: bool = True
    """False: shown as context here (`reason`), mask 0."""
    reason: str = ""
    versions: tuple[VersionSpan, ...] = ()
    policy_seq: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    logprob_kind: str = "processed"
    finish: str = "stop"
    constrained: bool = False
    cached_tokens: int = 0
    kv_salt: str = ""
    kv_mixed: bool = False
    context_exact: bool = True
    """The trace before the span equals, id for id, the prompt the engine saw."""
    context_faithful: bool = True
    additions: tuple[str, ...] = ()
    native_equal: bool | None = None
    drift_class: str = ""
    """Where not exact: `template | retokenised | edited | engine`."""
    drift_at: int | None = None
    """First position (in prompt + response) at which the trace differs from what the engine saw."""
    agent_role: str = "main"


class TraceImage(_Model):
    """A picture that the engine was shown: its bytes are a blob, never in the trace. Ids are those after expansion."""

    blob: BlobRef | None = None
    """None where the harness gave an address alone, which is then `url`."""
    mime: str = ""
    url: str = ""
    processor: str = ""
    processor_hash: str = ""
    span: tuple[int, int] | None = None
    """Where it stands in prompt + response, as (start, ids); None where that isn't known."""
    grid: tuple[int, int, int] | None = None


class Provenance(_Model):
    """Where a trace comes from, outside its hash."""

    code_version: str
    log_first: int
    log_last: int
    harness: str = ""
    harness_version: str = ""
    harness_config_hash: str = ""
    model: str = ""
    weights_hash: str = ""
    tokenizer_hash: str = ""
    template_hash: str = ""
    renderer: str = ""
    renderer_version: str = ""
    engine: str = ""
    dtype: str = ""
    logprob_kind: str = ""


class TreePosition(_Model):
    """Where a trace stands that is one node of a tree (rules `tree`): prefixes that chains share are stored once."""

    tree: str
    """Completion at which the tree begins."""
    node: int
    parent: int | None
    position_start: Annotated[int, Field(ge=0)]
    """Ids on the path before this node."""
    owner: int
    """The leaf (node number) in whose chain this node's spans are trained; where none of them is, one that shows it."""


class Trace(_Model):
    """One token sequence for a trainer. `logprobs` is 0.0 in masked slots; `ragged_logprobs` gives the trained ones."""

    schema_version: int = 1
    trace_id: str
    run: str
    build: str
    task: str
    session: str
    attempt: int
    number: int
    rules: str
    rules_hash: str
    status: Literal["complete", "truncated", "aborted"]
    agent_role: str = "main"
    """`main`, or of which kind the sub-agent is; equal in all sessions of a group, as groups are by role."""
    chain_class: str = "root"
    ambiguous: bool = False
    prompt_ids: Column
    response_ids: Column
    loss_mask: Column
    logprobs: Column
    spans: tuple[Span, ...]
    action_tokens: int
    """Sum of the mask."""
    session_traces: int
    """Traces of this session in this build, for trace- and session-mean weights."""
    session_action_tokens: int
    policy_seq_min: int
    policy_seq_max: int
    agent_depth: int = 0
    """0 for the session's own agent, 1 for its sub-agents, and so on."""
    agent: str = ""
    """Which agent, as the harness names it: several of a session may have one role."""
    parent_call: str = ""
    """Sub-agents: the completion of the parent agent that they were started by."""
    tree: TreePosition | None = None
    images: tuple[TraceImage, ...] = ()
    """In the order of the ids; outside the hash."""
    provenance: Provenance


class TraceManifest(_Model):
    """Closes a session's traces; readers ignore traces that no manifest names."""

    schema_version: int = 1
    run: str
    build: str
    task: str
    session: str
    attempt: int
    rules: str
    rules_hash: str
    traces: tuple[str, ...]
    """Trace ids by number."""
    action_tokens: tuple[int, ...]
    roles: tuple[str, ...] = ()
    """Agent role by number."""
    spans: int
    exact_spans: int
    excluded: dict[str, str]
    """Completion id → why no span trains it."""
    log_last: int

    def hash(self) -> str:
        return hashlib.sha256(orjson.dumps(self.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)).hexdigest()


class RoleTotals(_Model):
    """What one agent role has in a group, over trainable members: the denominators of its own weights."""

    sessions: int = 0
    traces: int = 0
    action_tokens: int = 0


class GroupTraces(_Model):
    """A group's end as trainers of one build see it: members' rewards and manifests, and sums for the weights.

    `agent_role` is that of the sessions' own agents; their sub-agents' traces come with them and share reward and
    weight. Who trains roles as groups of their own finds each one's sums in `roles`.
    """

    schema_version: int = 1
    run: str
    build: str
    task: str
    agent_role: str = "main"
    expected: int
    terminal: int
    trainable: int
    by: Literal["complete", "deadline"]
    members: tuple[GroupMember, ...]
    manifests: dict[str, str]
    """Session → manifest hash."""
    action_tokens: int
    traces: int
    roles: dict[str, RoleTotals] = {}


def span_inside(span: Sequence[int], length: int) -> bool:
    """Whether (start, ids) lies in a sequence of `length` ids."""
    return 0 <= span[0] <= span[0] + span[1] <= length


def trace_hash(
    prompt_ids: npt.NDArray[np.int32],
    response_ids: npt.NDArray[np.int32],
    loss_mask: npt.NDArray[np.uint8],
    logprobs: npt.NDArray[np.float32],
    spans: tuple[Span, ...],
    rules_hash: str,
) -> str:
    """The trace id, hex. Arrays are taken little-endian and each is preceded by its length."""
    digest = hashlib.sha256()
    for array, dtype in ((prompt_ids, "<i4"), (response_ids, "<i4"), (loss_mask, "u1"), (logprobs, "<f4")):
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(array, dtype=dtype).tobytes())
    digest.update(orjson.dumps([s.model_dump(mode="json") for s in spans], option=orjson.OPT_SORT_KEYS))
    digest.update(rules_hash.encode())
    return digest.hexdigest()
