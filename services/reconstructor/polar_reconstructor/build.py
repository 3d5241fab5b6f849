"""One session, from its selected messages to named traces and their account: pure, deterministic, no I/O.

`Built` is all that publishing needs. Conservation holds when `build_session` returns: every completion up to the
deciding message is trained in exactly one span or listed in `excluded`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from polar_common.bus import Stored
from polar_common.errors import Misplaced, Poison, TraceError

from . import tree
from .adopted import adopt
from .assemble import Draft, assemble
from .calls import Aborted, Call, Document, Engine, Wanted, aborted, blobs_wanted, call, check_numbers, document
from .columns import Ids
from .contexts import Contexts
from .domain import Selection
from .images import check_images
from .policies import by_policy_version, conserve, long_enough
from .rules.agents import is_subagent
from .rules.base import Chain, Rule, View
from .rules.checked import checked
from .rules.fates import fates
from .rules.linking import link
from .rules.registry import rule_named
from .rules.ruleset import RuleSet

__all__ = ["Built", "BuiltTrace", "Prepared", "build_session", "name_trace", "prepare"]


@dataclass(slots=True)
class BuiltTrace:
    """A named trace. `place`: where it stands in a tree (JSON), for rules `tree`."""

    trace_id: str
    draft: Draft
    status: str
    depth: int = 0
    parent_call: str = ""
    place: dict[str, Any] | None = None


@dataclass(slots=True)
class Built:
    """A session's traces by number, and why every other completion isn't in them."""

    selection: Selection
    rules: RuleSet
    rules_hash: str
    traces: list[BuiltTrace]
    excluded: dict[str, str]
    first: int
    """Lowest and highest sequence that was read; the highest is the seal, where there is one."""
    last: int
    trained: int
    sampled_tokens: int
    spans: int
    exact_spans: int
    ambiguous: int


@dataclass(slots=True)
class Prepared:
    """A selection whose bodies are parsed. Calls that need a blob of `wanted` are still documents."""

    selection: Selection
    captured: list[Call | tuple[Document, int]]
    aborted: list[tuple[Document, int]]
    wanted: list[Wanted]
    engines: dict[bytes, Engine]


def prepare(selection: Selection) -> Prepared:
    """Parse the selected bodies, one after the other, so that text is dropped while it's warm.

    Raises Poison where one can't be read, TraceError or BlobError where it is damaged.
    """
    found = Prepared(selection, [], [], [], {})
    for message in selection.captured:
        doc = _document(message)
        wanted = blobs_wanted(doc)
        found.wanted += wanted
        found.captured.append((doc, message.sequence) if wanted else call(doc, message.sequence, {}, found.engines))
    for message in selection.aborted:
        doc = _document(message)
        found.wanted += blobs_wanted(doc)
        found.aborted.append((doc, message.sequence))
    return found


def _document(message: Stored) -> Document:
    """A completion's body. Who may write where goes by subjects, so what belongs on another's isn't believed.

    Raises Poison, FromTheFuture or Misplaced, naming the message.
    """
    try:
        doc = document(message.body)
    except Poison as error:
        raise type(error)(f"{message.subject}: {error}") from error
    own = f"{doc.get('session')}.{doc.get('attempt')}.{doc.get('completion')}.{str(doc.get('kind')).partition('.')[2]}"
    if not message.subject.endswith(f".completion.{own}"):
        raise Misplaced(f"{message.subject} holds what belongs to {own}")
    return doc


def build_session(
    prepared: Prepared,
    blobs: Mapping[str, bytes],
    rules: RuleSet,
    *,
    rule: Rule | None = None,
    decode: Callable[[Ids], str] | None = None,
) -> Built:
    """Traces of one session. Raises TraceError or BlobError naming completion and place where the log is damaged."""
    selection = prepared.selection
    calls = [c if isinstance(c, Call) else call(*c, blobs, prepared.engines) for c in prepared.captured]
    cut = [aborted(doc, sequence, blobs) for doc, sequence in prepared.aborted]
    _number(calls, cut)
    for c in calls:
        if c.images:
            check_images(c.doc, c.length)
    went_on = {c.parent for c in calls if c.parent_by == "adopted"}
    excluded = dict(selection.excluded) | {a.id: "adopted_partial" if a.id in went_on else "aborted" for a in cut}
    if rules.adopted_partial == "train":
        calls, adopted = adopt(calls, cut)
        excluded = {name: reason for name, reason in excluded.items() if name not in adopted}
    if rules.tokenizer_hash and any(c.engine.tokenizer_hash not in ("", rules.tokenizer_hash) for c in calls):
        # Another tokenizer's text would only mislead.
        decode = None
    view = _view(calls, cut, selection, rules, decode)
    chains, left = by_policy_version(_chains(rule or rule_named(rules.rule), view), view)
    drafts, short = long_enough((d for chain in chains for d in assemble(chain, view)), rules.min_action_tokens)
    excluded |= dict(view.excluded) | left | short
    _check(calls, drafts, excluded)
    _tell_reasons(drafts, excluded)
    rules_hash = rules.hash
    traces = _named(drafts, view, selection, rules_hash)
    return _account(selection, rules, rules_hash, traces, excluded, calls)


def _number(calls: list[Call], cut: list[Aborted]) -> None:
    """Numbers are ranks by sequence. Raises TraceError for one id or sequence used twice."""
    every: list[Call | Aborted] = sorted([*calls, *cut], key=lambda c: c.sequence)
    for number, one in enumerate(every):
        one.number = number
        if number and every[number - 1].sequence == one.sequence:
            raise TraceError(f"completions {every[number - 1].id} and {one.id} have one number ({one.sequence})")
    names = Counter(one.id for one in every)
    for name, count in names.items():
        if count > 1:
            raise TraceError(f"completion {name} is on the log {count} times")


def _view(
    calls: list[Call],
    cut: list[Aborted],
    selection: Selection,
    rules: RuleSet,
    decode: Callable[[Ids], str] | None,
) -> View:
    contexts = Contexts(calls)
    check_numbers(calls, contexts.highest_id())
    links = link(calls, contexts)
    excluded = fates(calls, links, contexts, selection.undelivered, rules)
    return View(calls, cut, contexts, links, excluded, rules, decode)


def _chains(rule: Rule, view: View) -> list[Chain]:
    """What the rule finds, made to conserve. A rule of the user's own that fails, however, fails this session alone:
    it may end neither the process nor be tried for ever. An interrupt is the user's.
    """
    try:
        return conserve(checked(rule.chains(view), view), view)
    except TraceError as error:
        raise TraceError(f"rule {view.rules.rule}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise TraceError(f"rule {view.rules.rule}: {error!r}") from error


def _check(calls: Iterable[Call], drafts: Iterable[Draft], excluded: Mapping[str, str]) -> None:
    """The invariant, at the end: what the steps before have to guarantee. Raises TraceError."""
    trained = Counter(c.id for draft in drafts for c in draft.trained)
    for c in calls:
        times = trained.pop(c.id, 0)
        if times + (c.id in excluded) != 1:
            raise TraceError(f"completion {c.id} is trained {times} times, excluded: {excluded.get(c.id, 'no')}")
    if trained:
        raise TraceError(f"completion {next(iter(trained))} is trained and not of this attempt")


def _tell_reasons(drafts: Iterable[Draft], excluded: Mapping[str, str]) -> None:
    """A span that options left out in one trace isn't trained elsewhere either, whatever the other traces thought."""
    for draft in drafts:
        for span in draft.spans:
            if not span["trained"]:
                span["reason"] = excluded.get(span["completion"], span["reason"])


def name_trace(draft: Draft, rules_hash: str) -> str:
    """The trace id: what `polar_common.traces.trace_hash` gives for the same values."""
    digest = hashlib.sha256()
    for array, dtype in ((draft.prompt, "<i4"), (draft.response, "<i4"), (draft.mask, "u1"), (draft.logprobs, "<f4")):
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(array, dtype=dtype).data)
    digest.update(orjson.dumps(draft.spans, option=orjson.OPT_SORT_KEYS))
    digest.update(rules_hash.encode())
    return digest.hexdigest()


def _named(drafts: list[Draft], view: View, selection: Selection, rules_hash: str) -> list[BuiltTrace]:
    last = max((c.number for c in view.calls), default=-1)
    if view.rules.rule == "tree":
        placed = tree.encode(drafts)
    else:
        placed = [(draft, None) for draft in drafts]
    found = []
    for draft, place in placed:
        depth, parent = _spawned(draft, view)
        # Where others go on from a tree's node, nothing ends.
        inner = place is not None and place["owner"] != place["node"]
        status = "complete" if inner else _status(draft, selection, last)
        found.append(BuiltTrace(name_trace(draft, rules_hash), draft, status, depth, parent, place))
    return found


def _status(draft: Draft, selection: Selection, last: int) -> str:
    """How the trace ended: cut by a bound, or with the attempt's last call when that was cut off from outside."""
    if draft.cut or draft.spans[-1]["finish"] == "length":
        return "truncated"
    if selection.cut and draft.calls[-1].number == last:
        return "aborted" if selection.cut == "cancelled" else "truncated"
    return "complete"


def _spawned(draft: Draft, view: View) -> tuple[int, str]:
    """Depth of the trace's agent, and the call that started it: where nothing tells, its parent agent's one before."""
    calls, first = view.calls, next(iter(draft.trained), draft.calls[-1])
    if not is_subagent(first):
        return 0, ""
    # Its chain may begin with calls that aren't trained, or, of a fork, in its parent's.
    up = view.links.parent[next(i for i, c in enumerate(calls) if c is first)]
    while up is not None and calls[up].agent == first.agent:
        first, up = calls[up], view.links.parent[up]
    above = [c for c in calls if (c.agent or "main") == first.parent_agent and c.number < first.number]
    if up is not None:
        above = [calls[up]]
    parents = {c.agent: c.parent_agent for c in calls if c.parent_agent}
    depth, at = 1, first.parent_agent
    while at in parents and depth <= len(parents):
        at, depth = parents[at], depth + 1
    return depth, first.spawned_by or (above[-1].id if above else "")


def _account(
    selection: Selection,
    rules: RuleSet,
    rules_hash: str,
    traces: list[BuiltTrace],
    excluded: dict[str, str],
    calls: list[Call],
) -> Built:
    spans = [span for t in traces for span in t.draft.spans if span["trained"]]
    sequences = [c.sequence for c in calls]
    return Built(
        selection=selection,
        rules=rules,
        rules_hash=rules_hash,
        traces=traces,
        excluded=dict(sorted(excluded.items())),
        first=min(sequences, default=selection.until),
        last=selection.seal or selection.until,
        trained=len(spans),
        sampled_tokens=sum(t.draft.action_tokens for t in traces),
        spans=len(spans),
        exact_spans=sum(1 for span in spans if span["context_exact"]),
        ambiguous=sum(1 for t in traces if t.draft.ambiguous),
    )
