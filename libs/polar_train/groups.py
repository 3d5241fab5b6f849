"""Groups as a trainer gets them: sessions with rewards, and their traces as numpy arrays, checked on arrival.

A group's messages are read in one batched get once its `closed` is there; traces that no manifest names are ignored,
and a trace whose lengths or hash disagree with its manifest fails its group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from polar_common import subjects
from polar_common.blobs import Blobs
from polar_common.bus import Bus, Stored
from polar_common.errors import FromTheFuture, Poison, TraceError, Unavailable
from polar_common.events import GroupMember
from polar_common.ids import segment_of
from polar_common.packing import Column, unpack
from polar_common.topology import TRACES
from polar_common.trace_messages import read_message
from polar_common.traces import (
    GroupTraces,
    Span,
    Trace,
    TraceImage,
    TraceManifest,
    TreePosition,
    span_inside,
    trace_hash,
)

__all__ = ["Floats", "Group", "Ids", "Mask", "Member", "TrainTrace", "load_group", "load_trace"]

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint8]

MAIN = "main"
"""The role of a session's own agent."""
_Kind = TypeVar("_Kind", Trace, TraceManifest)
_PAGE = 256
_TRIES = 5


@dataclass(frozen=True, slots=True, eq=False)
class TrainTrace:
    """One sequence to train on.

    `prompt_ids` int32[P], `response_ids` int32[R]; `loss_mask` uint8[R] and `logprobs` float32[R] are aligned to the
    response, log-probs 0.0 where the mask is 0. `reward` is the trace's own where the evaluator gave one, else its
    session's.
    """

    trace_id: str
    session: str
    number: int
    prompt_ids: Ids
    response_ids: Ids
    loss_mask: Mask
    logprobs: Floats
    spans: tuple[Span, ...]
    status: str
    agent_role: str
    action_tokens: int
    policy_seq_min: int
    policy_seq_max: int
    reward: float
    step_rewards: Mapping[str, float] = field(default_factory=dict)
    """Completion id → reward, for the completions that the evaluator scored."""
    images: tuple[TraceImage, ...] = ()
    tree: TreePosition | None = None
    """Rules `tree`: where this node stands. In a group its prompt is the whole path before it."""

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One session of a group. Traces are there only for trainable ones."""

    session: str
    outcome: str | None
    reward: float | None
    trainable: bool
    reason: str
    traces: tuple[TrainTrace, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All samples of one task under one build. `sequence` is that of its `closed` message.

    Traces of sub-agents come with their sessions' and share reward and weight; `of_role` makes a group of one role.
    """

    run: str
    build: str
    task: str
    sequence: int
    by: str
    expected: int
    terminal: int
    members: tuple[Member, ...]
    agent_role: str = ""
    """Of all traces; "" where all roles are together."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The agent roles that have traces, `main` first."""
        return tuple(sorted({t.agent_role for t in self.traces}, key=lambda role: (role != MAIN, role)))

    def of_role(self, role: str) -> Group:
        """The group (run, build, task, `role`): one role's traces, with a baseline and weights of its own.

        A session in which a sub-agent of that role never ran has no part in it; without traces of its own agent it
        still has its reward.
        """
        members = []
        for member in self.members:
            own = tuple(t for t in member.traces if t.agent_role == role)
            absent = member.trainable and not own and role != MAIN
            made = replace(member, traces=own)
            members.append(replace(made, trainable=False, reason="no_traces_of_role") if absent else made)
        return replace(self, members=tuple(members), agent_role=role)

    @property
    def traces(self) -> tuple[TrainTrace, ...]:
        return tuple(t for m in self.members for t in m.traces)

    @property
    def trainable(self) -> tuple[Member, ...]:
        return tuple(m for m in self.members if m.trainable)

    @property
    def action_tokens(self) -> int:
        return sum(t.action_tokens for t in self.traces)

    @property
    def oldest_policy(self) -> int | None:
        """The oldest policy version (by `policy_seq`) that sampled in it; None without traces."""
        return min((t.policy_seq_min for t in self.traces), default=None)


async def load_group(bus: Bus, closed: GroupTraces, sequence: int, *, verify: bool = True) -> Group:
    """Fetch and check a closed group. `verify` recomputes trace ids.

    Raises TraceError or BlobError for damage, FromTheFuture for what a newer version wrote, Unavailable while traces
    can't be read.
    """
    wanted = [m.session for m in closed.members if m.trainable and m.session in closed.manifests]
    messages = await _read(bus, closed, wanted)
    members = []
    for member in closed.members:
        traces: tuple[TrainTrace, ...] = ()
        if member.session in messages:
            traces = await _traces(bus, member, closed, messages[member.session], verify)
        members.append(Member(member.session, member.outcome, member.reward, member.trainable, member.reason, traces))
    return Group(
        closed.run, closed.build, closed.task, sequence, closed.by, closed.expected, closed.terminal, tuple(members)
    )


async def _read(bus: Bus, closed: GroupTraces, sessions: Sequence[str]) -> dict[str, list[Stored]]:
    """Each session's messages, its manifest among them. Reads may lag behind on replicated streams: asked again."""
    found: dict[str, list[Stored]] = {s: [] for s in sessions}
    for attempt in range(_TRIES):
        missing = [s for s in sessions if not any(m.subject.endswith(".manifest") for m in found[s])]
        if not missing:
            return found
        if attempt:
            await asyncio.sleep(0.1 * 2**attempt)
        for start in range(0, len(missing), _PAGE):
            page = missing[start : start + _PAGE]
            filters = [subjects.session_traces_filter(closed.run, closed.build, closed.task, s) for s in page]
            for session in page:
                found[session] = []
            for message in await bus.read(TRACES, filters):
                found[message.subject.split(".")[5]].append(message)
    raise Unavailable(f"{closed.task}: manifests of {', '.join(missing)} can't be read")


async def _traces(
    bus: Bus, member: GroupMember, closed: GroupTraces, messages: Sequence[Stored], verify: bool
) -> tuple[TrainTrace, ...]:
    bodies = {m.subject.rpartition(".")[2]: m.body for m in messages}
    manifest = _message(TraceManifest, bodies["manifest"], f"{member.session}: its manifest")
    if manifest.hash() != closed.manifests[member.session]:
        raise TraceError(f"{member.session}: the manifest isn't the one that closed with its group")
    blobs = Blobs(bus, segment_of(member.session))
    found: list[TrainTrace] = []
    for number, name in enumerate(manifest.traces):
        body = bodies.get(str(number))
        if body is None:
            raise TraceError(f"{member.session}: trace {number} of {len(manifest.traces)} is missing")
        trace = await load_trace(body, blobs, member, verify=verify)
        if trace.trace_id != name:
            raise TraceError(f"{member.session}: trace {number} is {trace.trace_id}, the manifest says {name}")
        found.append(trace)
    return _behind_ancestors(found)


def _behind_ancestors(traces: list[TrainTrace]) -> tuple[TrainTrace, ...]:
    """Nodes of trees (rules `tree`) with the path from the root as their prompt: a node alone isn't what the model saw.

    Raises TraceError where a node's ancestor is missing.
    """
    whole: dict[tuple[bytes, int], TrainTrace] = {}
    found = []
    root = b""
    for trace in traces:
        made, place = trace, trace.tree
        if place is not None and place.parent is None:
            root = place.tree.encode() + trace.prompt_ids.tobytes()
        elif place is not None:
            above = whole.get((root, place.parent or 0))
            if above is None or above.length != place.position_start:
                raise TraceError(f"{trace.session}: trace {trace.number} has no parent of {place.position_start} ids")
            start = place.position_start
            own = tuple(
                i if i.span is None else i.model_copy(update={"span": (i.span[0] + start, i.span[1])})
                for i in trace.images
            )
            prompt = np.concatenate((above.prompt_ids, above.response_ids, trace.prompt_ids))
            made = replace(trace, prompt_ids=prompt, images=(*above.images, *own))
        if place is not None:
            whole[root, place.node] = made
        found.append(made)
    return tuple(found)


async def load_trace(body: bytes, blobs: Blobs, member: GroupMember, *, verify: bool = True) -> TrainTrace:
    """One trace from its message. Raises TraceError or BlobError where it can't be read, or lengths, masks or the id
    don't hold; FromTheFuture for a newer version's."""
    trace = _message(Trace, body, f"{member.session}: a trace")
    prompt = cast(Ids, await _column(trace.prompt_ids, blobs))
    response = cast(Ids, await _column(trace.response_ids, blobs))
    mask = cast(Mask, await _column(trace.loss_mask, blobs))
    logprobs = cast(Floats, await _column(trace.logprobs, blobs))
    _check(trace, prompt, response, mask, logprobs)
    if verify and trace_hash(prompt, response, mask, logprobs, trace.spans, trace.rules_hash) != trace.trace_id:
        raise TraceError(f"{trace.session}: trace {trace.number} doesn't hash to its id {trace.trace_id}")
    steps, reward = _rewards(trace, member)
    return TrainTrace(
        trace_id=trace.trace_id,
        session=trace.session,
        number=trace.number,
        prompt_ids=prompt,
        response_ids=response,
        loss_mask=mask,
        logprobs=logprobs,
        spans=trace.spans,
        status=trace.status,
        agent_role=trace.agent_role,
        action_tokens=trace.action_tokens,
        policy_seq_min=trace.policy_seq_min,
        policy_seq_max=trace.policy_seq_max,
        reward=reward,
        step_rewards=steps,
        images=trace.images,
        tree=trace.tree,
    )


def _message(kind: type[_Kind], body: bytes, what: str) -> _Kind:
    """A message that can't be read is a damaged one, as one is whose arrays disagree."""
    try:
        return read_message(kind, body, what)
    except FromTheFuture:
        raise
    except Poison as error:
        raise TraceError(str(error)) from error


async def _column(column: Column, blobs: Blobs) -> npt.NDArray[np.generic]:
    return unpack(column, await blobs.column(column))


def _check(trace: Trace, prompt: Ids, response: Ids, mask: Mask, logprobs: Floats) -> None:
    where = f"{trace.session}: trace {trace.number}"
    if not len(response) == len(mask) == len(logprobs):
        raise TraceError(f"{where}: {len(response)} ids, a mask of {len(mask)}, {len(logprobs)} log-probs")
    if len(mask) and int(mask.max()) > 1:
        raise TraceError(f"{where}: the mask holds {int(mask.max())}")
    if int(mask.sum()) != trace.action_tokens:
        raise TraceError(f"{where}: the mask trains {int(mask.sum())} tokens, the trace says {trace.action_tokens}")
    if not np.isfinite(logprobs).all():
        raise TraceError(f"{where}: logprobs[{int(np.flatnonzero(~np.isfinite(logprobs))[0])}] isn't finite")
    if min(int(prompt.min(initial=0)), int(response.min(initial=0))) < 0:
        raise TraceError(f"{where}: a negative id")
    end = 0
    for span in trace.spans:
        if span.start < end or span.start + span.length > len(response):
            raise TraceError(f"{where}: span {span.completion} [{span.start}, +{span.length}) in {len(response)} ids")
        end = span.start + span.length
    size = len(prompt) + len(response)
    for image in trace.images:
        if image.span is not None and not span_inside(image.span, size):
            raise TraceError(f"{where}: a picture at {list(image.span)} of {size} ids")


def _rewards(trace: Trace, member: GroupMember) -> tuple[dict[str, float], float]:
    """Step rewards of the trace's trained spans, and the trace's reward: its own, its last step's, its session's."""
    given = member.trace_rewards
    steps = {s.completion: given[s.completion] for s in trace.spans if s.trained and s.completion in given}
    if trace.trace_id in given:
        return steps, given[trace.trace_id]
    if steps:
        return steps, list(steps.values())[-1]
    return steps, member.reward if member.reward is not None else 0.0
