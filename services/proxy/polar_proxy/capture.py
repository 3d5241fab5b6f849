"""From a plan and a sample to the completion event, the node for later calls, and the reply. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from polar_common.events import CompletionCaptured, EngineFacts, SamplingUsed
from polar_common.keys import SessionKey
from polar_common.packing import pack
from polar_proxy.dialects.base import Minted, Reply, Usage
from polar_render.base import Renderer
from polar_render.messages import Image, Message, Part, Thinking
from polar_render.records import Blob, Echo, Written, head_ref, refer

from .context.nodes import Node, SessionIndex
from .context.prompt import Plan
from .context.restore import answer_of, mint
from .engines.base import Capabilities
from .sample import Sample
from .sampling import asked_fields
from .validity import Verdict, judge

__all__ = ["CallFacts", "Captured", "build", "reply_of"]


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What is known of a call besides plan and sample. Times in Unix seconds and seconds."""

    completion: str
    key: SessionKey
    used: SamplingUsed
    engine: EngineFacts
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


@dataclass(frozen=True, slots=True)
class Captured:
    """An event ready to be published after its blobs, and what follows from it."""

    event: CompletionCaptured
    blobs: tuple[Blob, ...]
    node: Node
    verdict: Verdict


def usage_of(plan: Plan, sample: Sample, thinking_tokens: int, prompt: int) -> Usage:
    return Usage(prompt, len(sample.ids), min(sample.cached_tokens, prompt), thinking_tokens)


def build(index: SessionIndex, plan: Plan, sample: Sample, facts: CallFacts, renderer: Renderer) -> Captured:
    """The captured completion. In native context the prompt is what the engine reported."""
    request, completion = plan.request, facts.completion
    native = plan.chain == "native"
    sent = np.array(sample.prompt_ids or (), dtype=np.int32) if native else plan.prompt
    verdict = judge(sample.ids, sample.logprobs, facts.used, facts.capabilities.logprobs, sent, sample.prompt_ids)
    ids = np.array(sample.ids, dtype=np.int32)
    base = plan.base if plan.base is not None and plan.base.completion in index.nodes else None
    shared = plan.shared if base is not None else 0
    written = refer(completion, sent, ids, _for_log(plan, shared), base.link if base is not None else None, shared)
    index.bodies.setdefault(plan.keys.head, plan.head)
    head, head_blob = head_ref(plan.head, index.heads.get(plan.keys.head, ""), plan.keys.head)
    sampled, ids_blob = pack(ids, "i32")
    logprobs, lp_blob = (None, None) if verdict.logprobs is None else pack(verdict.logprobs, "f32")
    minted = Minted(completion, int(facts.started))
    parts = mint(sample.parts, minted)
    usage = usage_of(plan, sample, _thinking_tokens(renderer, parts, sample), len(sent))
    event = CompletionCaptured(
        session=facts.key.session, attempt=facts.key.attempt, run=facts.key.run, task=facts.key.task,
        completion=completion, dialect=request.dialect, stream=request.stream, model=request.model,
        request_hash=request.raw_hash, head=head, messages=written.messages, prompt=written.prompt, sampled=sampled,
        logprobs=logprobs, finish=sample.finish, closed=sample.closed, untrainable=verdict.untrainable,
        untrainable_at=verdict.at, context="native" if native else "exact",
        parent=plan.parent.completion if plan.parent is not None else "", parent_by=plan.by,
        parent_ambiguous=plan.ambiguous, chain_class=plan.chain,
        context_exact=True if native and sample.prompt_ids is not None else verdict.context_exact,
        context_faithful=not any(a in _UNFAITHFUL for a in plan.additions), additions=plan.additions,
        native_equal=True if native else None, choice=facts.choice, parallel_of=facts.parallel_of,
        prefill_tokens=plan.prefill_tokens, sampling_asked=asked_fields(request.sampling), sampling=facts.used,
        constrained=facts.constrained, versions=sample.versions, policy_seq=facts.policy_seq,
        cached_tokens=usage.cached_tokens, kv_salt=facts.salt, kv_mixed=sample.kv_mixed, engine=facts.engine,
        agent=request.hints.agent, parent_agent=request.hints.parent_agent,
        dropped=(*request.dropped, *plan.dropped), billing=request.billing, delivered=facts.delivered,
        started=facts.started, ttft_s=round(facts.ttft, 6), duration_s=round(facts.duration, 6),
        usage={
            "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens, "reasoning_tokens": usage.reasoning_tokens,
        },
    )  # fmt: skip
    blobs = [*written.blobs, *(b for b in (head_blob, ids_blob, lp_blob) if b is not None)]
    node = _node(plan, sample, facts, written, parts, base, shared, usage, minted)
    return Captured(event, tuple(blobs), node, verdict)


_UNFAITHFUL = ("image_placeholder",)


def _for_log(plan: Plan, shared: int) -> Sequence[Message | Echo]:
    """The harness's messages; where it sent the continued answer back, a note of that."""
    messages: list[Message | Echo] = list(plan.request.messages)
    parent = plan.parent
    if parent is not None and parent.position < len(messages) and parent.position >= shared:
        messages[parent.position] = Echo(parent.completion)
    return messages


def _thinking_tokens(renderer: Renderer, parts: Sequence[Part], sample: Sample) -> int:
    """Roughly: the share of the sampled ids that thinking's characters have."""
    thought = sum(len(p.text) for p in parts if isinstance(p, Thinking))
    if not thought:
        return 0
    whole = thought + sum(
        len(p.arguments) if hasattr(p, "arguments") else len(getattr(p, "text", ""))
        for p in parts
        if not isinstance(p, Thinking | Image)
    )
    return round(len(sample.ids) * thought / whole)


def _node(
    plan: Plan, sample: Sample, facts: CallFacts, written: Written, parts: tuple[Part, ...],
    base: Node | None, shared: int, usage: Usage, minted: Minted,
) -> Node:  # fmt: skip
    request = plan.request
    answer, position = answer_of(request.messages, parts, prefill=request.prefill)
    own = tuple(request.messages[shared:])
    parent = plan.parent
    if parent is not None and shared <= parent.position < len(request.messages):
        # What was sampled, not its echo: later comparisons are with the original.
        at = parent.position - shared
        own = (*own[:at], parent.answer, *own[at + 1 :])
    return Node(
        completion=facts.completion, sequence=0, head=plan.keys.head,
        key=plan.keys.answered(answer, position), request_key=plan.keys.at[-1] if plan.keys.at else plan.keys.head,
        base=base, shared=shared, own=own, position=position, answer=answer, parts=parts, finish=sample.finish,
        closed=sample.closed, link=written.link, request_hash=request.raw_hash, created=minted.created, usage=usage,
        sampled_from=len(written.link.context) - len(sample.ids), stop_sequence=sample.stop_sequence,
        agent=request.hints.agent, parent=parent if plan.chain in ("continued", "native") else None,
        additions=plan.additions, choice=facts.choice, parallel_of=facts.parallel_of,
    )  # fmt: skip


def reply_of(node: Node, sample: Sample | None, renderer: Renderer, *, tokens: bool) -> Reply:
    """The answer for the harness; `tokens`: it asked for log-probs."""
    ids = (
        sample.ids
        if tokens and sample is not None
        else node.link.context[node.sampled_from :].tolist()
        if tokens
        else ()
    )
    values: tuple[float, ...] | None = None
    texts: tuple[str, ...] = ()
    if tokens:
        texts = tuple(renderer.decode((i,)) for i in ids)
        if sample is not None and sample.logprobs is not None:
            values = tuple(float("nan") if v is None else v for v in sample.logprobs)
    return Reply(
        parts=node.parts, finish=node.finish, usage=node.usage, minted=Minted(node.completion, node.created),
        stop_sequence=node.stop_sequence, ids=tuple(ids), logprobs=values, token_texts=texts,
    )  # fmt: skip


def spans_mixed(sample: Sample) -> bool:
    """Whether weights changed while the sample was made."""
    return any(a.version != b.version for a, b in pairwise(sample.versions))
