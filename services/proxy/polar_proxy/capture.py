"""From a plan and a sample to the completion event, the node for later calls, and the reply. Pure.

The event is written as JSON directly, defaults left out: this is the hot path, and `CompletionCaptured` is validated
by every reader (and by the tests of this module).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from polar_common.events import EngineFacts, SamplingUsed, now
from polar_common.keys import SessionKey
from polar_proxy.dialects.base import Minted, Reply, Usage
from polar_render.base import Renderer
from polar_render.messages import Message, Part, Text, Thinking, ToolCall
from polar_render.records import Blob, Echo, Ids, Written, column, head_ref, refer

from .context.nodes import Node, SessionIndex
from .context.own_ids import own_ids
from .context.prompt import Plan
from .context.restore import answer_of, mint
from .engines.base import Capabilities
from .pictures import references
from .sample import Sample
from .sampling import asked_fields, used_json
from .validity import Verdict, judge

__all__ = ["CallFacts", "Captured", "build", "engine_json", "reply_of"]

_UNFAITHFUL = ("image_placeholder",)


@dataclass(slots=True, eq=False)
class CallFacts:
    """What is known of a call besides plan and sample. Times in Unix seconds and seconds. `engine`: `engine_json`."""

    completion: str
    key: SessionKey
    producer: str
    used: SamplingUsed
    engine: bytes
    capabilities: Capabilities
    policy_seq: int
    salt: str
    started: float
    ttft: float = 0.0
    duration: float = 0.0
    choice: int = 0
    parallel_of: str = ""
    constrained: bool = False
    delivered: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Captured:
    """A `CompletionCaptured` ready to be published after its blobs, and what follows from it."""

    body: bytes
    hash: str
    blobs: tuple[Blob, ...]
    node: Node
    verdict: Verdict
    facts: CallFacts
    plan: Plan


def engine_json(facts: EngineFacts) -> bytes:
    """Made once per replica, not per call."""
    return facts.model_dump_json(exclude_defaults=True).encode()


def build(index: SessionIndex, plan: Plan, sample: Sample, facts: CallFacts, renderer: Renderer) -> Captured:
    """The captured completion. Where the engine renders, the prompt is what it reports."""
    native = plan.native is not None
    sent = _prompt(plan, sample)
    verdict = judge(
        sample.ids,
        sample.logprobs,
        facts.used,
        facts.capabilities.logprobs,
        sent,
        None if native else sample.prompt_ids,
        completion_tokens=sample.completion_tokens,
        said=bool(sample.parts),
    )
    if native and sample.prompt_ids is None and not verdict.untrainable:
        verdict = replace(verdict, untrainable="no_token_ids")
    ids = np.array(sample.ids, dtype=np.int32)
    base = plan.base if plan.base is not None and plan.base.completion in index.nodes else None
    shared = plan.shared if base is not None else 0
    said = _for_log(plan, shared)
    written = refer(facts.completion, sent, ids, said, base.link if base is not None else None, shared)
    index.bodies.setdefault(plan.keys.head, plan.head)
    minted = Minted(facts.completion, int(facts.started))
    parts = mint(sample.parts, minted)
    usage = Usage(len(sent), len(ids), min(sample.cached_tokens, len(sent)), _thinking_tokens(parts, len(ids)))
    stable, blobs = _stable(index, plan, sample, facts, verdict, written, ids, usage)
    head: dict[str, Any] = {
        "kind": "completion.captured", "schema_version": 1, "event_id": facts.completion, "time": now(),
        "producer": facts.producer,
    }  # fmt: skip
    body = orjson.dumps(head)[:-1] + b"," + stable[1:]
    node = _node(plan, sample, facts, written, parts, base, shared, usage, minted)
    return Captured(body, hashlib.sha256(stable).hexdigest(), (*written.blobs, *blobs), node, verdict, facts, plan)


def _stable(
    index: SessionIndex, plan: Plan, sample: Sample, facts: CallFacts, verdict: Verdict, written: Written, ids: Ids,
    usage: Usage,
) -> tuple[bytes, list[Blob]]:  # fmt: skip
    """What the event says, leaving out who said it and when; and the blobs of its columns."""
    request, key = plan.request, facts.key
    head, head_blob = head_ref(plan.head, index.heads.get(plan.keys.head, ""), plan.keys.head)
    sampled, ids_blob = column(ids, "i32")
    logprobs, lp_blob = (None, None) if verdict.logprobs is None else column(verdict.logprobs, "f32")
    event: dict[str, Any] = {
        "session": key.session, "attempt": key.attempt, "run": key.run, "task": key.task,
        "completion": facts.completion, "dialect": request.dialect, "stream": request.stream, "model": request.model,
        "request_hash": request.raw_hash, "head": head, "messages": written.messages, "prompt": written.prompt,
        "sampled": sampled, "logprobs": logprobs, "finish": sample.finish, "closed": sample.closed,
        "chain_class": plan.chain, "sampling": used_json(facts.used), "engine": orjson.Fragment(facts.engine),
        "started": facts.started, "ttft_s": round(facts.ttft, 6), "duration_s": round(facts.duration, 6),
        "usage": {
            "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens, "reasoning_tokens": usage.reasoning_tokens,
        },
    }  # fmt: skip
    native = plan.chain == "native"
    exact = sample.prompt_ids is not None if plan.native is not None else verdict.context_exact
    if exact is not True:
        event["context_exact"] = exact
    if any(a in _UNFAITHFUL for a in plan.additions) or any(map(_unseen, request.dropped)):
        event["context_faithful"] = False
    versions = [{"version": v.version, "start": v.start} for v in sample.versions]
    optional: dict[str, Any] = {
        "untrainable": verdict.untrainable, "untrainable_at": verdict.at, "context": "native" if native else None,
        "native_equal": native or None, "parent": plan.parent.completion if plan.parent is not None else "",
        "parent_by": plan.by if plan.by != "none" else None, "parent_ambiguous": plan.ambiguous,
        "additions": plan.additions, "choice": facts.choice, "parallel_of": facts.parallel_of,
        "prefill_tokens": plan.prefill_tokens, "sampling_asked": asked_fields(request.sampling),
        "constrained": facts.constrained, "versions": versions,
        "policy_seq": facts.policy_seq, "cached_tokens": usage.cached_tokens, "kv_salt": facts.salt,
        "kv_mixed": sample.kv_mixed, "agent": request.hints.agent, "parent_agent": request.hints.parent_agent,
        "agent_role": request.hints.agent_role, "spawned_by": plan.spawned_by,
        "tool_choice": plan.demand.told, "tool_choice_by": plan.demand.by,
        "dropped": (*request.dropped, *plan.dropped), "billing": request.billing, "delivered": facts.delivered,
    }  # fmt: skip
    if plan.pictures is not None:
        event["images"] = references(request.messages, index.pictures, _prompt(plan, sample), plan.pictures)
    event.update({k: v for k, v in optional.items() if v or (k == "untrainable_at" and v == 0)})
    return orjson.dumps(event), [b for b in (head_blob, ids_blob, lp_blob) if b is not None]


def _unseen(dropped: str) -> bool:
    """Whether something left out is a whole item of the conversation; a reasoning item so left out holds nothing."""
    return dropped.startswith("input[?type==") and "reasoning" not in dropped


def _prompt(plan: Plan, sample: Sample) -> Ids:
    """Where the engine renders, what it reports."""
    return plan.prompt if plan.native is None else np.array(sample.prompt_ids or (), dtype=np.int32)


def _for_log(plan: Plan, shared: int) -> Sequence[Message | Echo]:
    """The harness's messages; where it sent the continued answer back, a note of that."""
    parent = plan.parent
    if parent is None or plan.by == "adopted" or not shared <= parent.position < len(plan.request.messages):
        return plan.request.messages
    messages: list[Message | Echo] = list(plan.request.messages)
    messages[parent.position] = Echo(parent.completion)
    return messages


def _thinking_tokens(parts: Sequence[Part], count: int) -> int:
    """Roughly: the share of the sampled ids that thinking's characters have."""
    thought = sum(len(p.text) for p in parts if isinstance(p, Thinking))
    if not thought:
        return 0
    texts = (p.text if isinstance(p, Text) else p.arguments for p in parts if isinstance(p, Text | ToolCall))
    return round(count * thought / (thought + sum(map(len, texts))))


def _node(
    plan: Plan, sample: Sample, facts: CallFacts, written: Written, parts: tuple[Part, ...],
    base: Node | None, shared: int, usage: Usage, minted: Minted,
) -> Node:  # fmt: skip
    request = plan.request
    answer, position = answer_of(request.messages, parts, prefill=request.prefill)
    own = tuple(request.messages[shared:])
    parent = plan.parent
    if parent is not None and plan.by != "adopted" and shared <= parent.position < len(request.messages):
        # What was sampled, not its echo: later comparisons are with the original.
        at = parent.position - shared
        own = (*own[:at], parent.answer, *own[at + 1 :])
    return Node(
        completion=facts.completion, sequence=0, head=plan.keys.head,
        key=plan.keys.answered(answer, position), request_key=plan.keys.at[-1] if plan.keys.at else plan.keys.head,
        base=base, shared=shared, own=own, position=position, answer=answer, parts=parts, finish=sample.finish,
        closed=sample.closed, link=written.link, request_hash=request.raw_hash, created=minted.created, usage=usage,
        sampled_from=len(written.link.context) - len(sample.ids), stop_sequence=sample.stop_sequence,
        agent=request.hints.agent, parent_agent=request.hints.parent_agent, parent=parent, additions=plan.additions,
        choice=facts.choice, parallel_of=facts.parallel_of, own_ids=own_ids(sample.parts, parts),
        agent_role=request.hints.agent_role,
    )  # fmt: skip


def reply_of(node: Node, sample: Sample | None, renderer: Renderer, *, tokens: bool) -> Reply:
    """The answer for the harness; `tokens`: it asked for log-probs (which a replayed answer has no more)."""
    ids: tuple[int, ...] = ()
    values: tuple[float, ...] | None = None
    texts: tuple[str, ...] = ()
    if tokens:
        ids = tuple(node.link.context[node.sampled_from :].tolist())
        texts = tuple(renderer.decode_tokens(ids))
        if sample is not None and sample.logprobs is not None:
            values = tuple(float("nan") if v is None else v for v in sample.logprobs)
    return Reply(
        parts=node.parts, finish=node.finish, usage=node.usage, minted=Minted(node.completion, node.created),
        stop_sequence=node.stop_sequence, ids=ids, logprobs=values, token_texts=texts,
    )  # fmt: skip
