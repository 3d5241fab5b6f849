"""Completions as the rules see them: light values read straight from the stored bytes.

`documents` parses bodies (upcasting older schema versions), `blobs_wanted` says which bodies have to be fetched, `call`
makes one `Call`. Everything that may be damaged is checked here or in `contexts`, and errors name completion and place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import orjson
from pydantic import BaseModel

from polar_common.errors import BlobError, Poison, TraceError
from polar_common.events import (
    CompletionAborted,
    CompletionCaptured,
    EngineFacts,
    decode,
    encode,
)
from polar_common.packing import unzip

from .columns import Floats, Ids, blob_of, floats, ids

__all__ = [
    "Aborted", "Call", "Document", "Engine", "Wanted", "aborted", "blobs_wanted", "call", "check_numbers", "document",
]  # fmt: skip

Document = dict[str, Any]
"""A parsed event body of the newest schema version."""

_TEXT, _FLAG, _NUMBER = frozenset((str,)), frozenset((bool,)), frozenset((int, float))
_MAYBE: frozenset[type] = frozenset((bool, type(None)))
_LIST, _OBJECT, _INTEGER = frozenset((list,)), frozenset((dict,)), frozenset((int,))
_READ_LATER: tuple[tuple[str, frozenset[type]], ...] = (
    ("finish", _TEXT), ("closed", _FLAG), ("context", _TEXT), ("parent_by", _TEXT), ("parent_ambiguous", _FLAG),
    ("chain_class", _TEXT), ("context_exact", _MAYBE), ("parallel_of", _TEXT), ("started", _NUMBER),
    ("duration_s", _NUMBER), ("constrained", _FLAG), ("agent", _TEXT), ("parent_agent", _TEXT), ("delivered", _LIST),
    ("messages", _OBJECT), ("additions", _LIST), ("context_faithful", _FLAG), ("native_equal", _MAYBE),
    ("cached_tokens", _INTEGER), ("kv_salt", _TEXT), ("kv_mixed", _FLAG), ("sampling", _OBJECT), ("versions", _LIST),
    ("untrainable", _TEXT), ("parent", _TEXT), ("request_hash", _TEXT), ("replay_of", _TEXT),
    ("spawned_by", _TEXT), ("images", _LIST), ("agent_role", _TEXT),
)  # fmt: skip
"""What is read when asked for has its type checked first, so that damage is named here and nowhere later."""
_read_later = itemgetter(*(key for key, _ in _READ_LATER))
_SOUND: set[tuple[type, ...]] = set()
"""Types of these fields, together, that were found right: a handful."""
_VERSIONS = {"completion.captured": CompletionCaptured.VERSION, "completion.aborted": CompletionAborted.VERSION}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A blob reference as JSON, and which completion's column needs it."""

    ref: dict[str, Any]
    place: str


@dataclass(frozen=True, slots=True)
class Engine:
    """What decides how ids were made; equal for most of a session's calls."""

    name: str
    model: str
    weights_hash: str
    dtype: str
    logprob_kind: str
    tokenizer_hash: str
    template_hash: str
    renderer: str
    renderer_version: str
    vocab_size: int
    end_of_turn: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Call:
    """One captured completion. `length`: ids of its resolved prompt, `context_length`: with the sampled ones.

    What the rules look at most is a field; the rest is read from `doc`, the event's JSON, when asked for.
    """

    id: str
    sequence: int
    base: str
    via: tuple[str, ...]
    shared: int
    new: Ids
    length: int
    sampled: Ids
    logprobs: Floats | None
    untrainable: str
    parent: str
    request_hash: str
    replay_of: str
    head: str
    tools: bool | None
    """Whether the head offers tools; None where another completion holds its body."""
    policy_seq: int
    engine: Engine
    doc: Document
    number: int = -1
    """Rank by sequence among the attempt's completions."""

    @property
    def context_length(self) -> int:
        return self.length + len(self.sampled)

    @property
    def finish(self) -> str:
        return str(self.doc["finish"])

    @property
    def closed(self) -> bool:
        """The sample ends with an end-of-turn id."""
        return bool(self.doc["closed"])

    @property
    def native(self) -> bool:
        return bool(self.doc["context"] == "native")

    @property
    def parent_by(self) -> str:
        return str(self.doc["parent_by"])

    @property
    def parent_ambiguous(self) -> bool:
        return bool(self.doc["parent_ambiguous"])

    @property
    def chain_class(self) -> str:
        return str(self.doc["chain_class"])

    @property
    def context_exact(self) -> bool | None:
        found: bool | None = self.doc["context_exact"]
        return found

    @property
    def parallel_of(self) -> str:
        """The first completion of the same request, where several were sampled at once; else its own id."""
        return str(self.doc["parallel_of"] or self.id)

    @property
    def started(self) -> float:
        return float(self.doc["started"])

    @property
    def ended(self) -> float:
        return float(self.doc["started"]) + float(self.doc["duration_s"])

    @property
    def constrained(self) -> bool:
        return bool(self.doc["constrained"])

    @property
    def agent(self) -> str:
        return str(self.doc["agent"])

    @property
    def parent_agent(self) -> str:
        return str(self.doc["parent_agent"])

    @property
    def agent_role(self) -> str:
        """The sub-agent's kind, where that is known."""
        return str(self.doc["agent_role"])

    @property
    def spawned_by(self) -> str:
        """The completion whose tool call started this sub-agent; only its first call has it."""
        return str(self.doc["spawned_by"])

    @property
    def images(self) -> list[dict[str, Any]]:
        """JSON of `ImageRef` per picture of the request."""
        found: list[dict[str, Any]] = self.doc["images"]
        return found

    @property
    def delivered(self) -> list[str]:
        """Earlier completions whose answers were seen to arrive."""
        return [str(name) for name in self.doc["delivered"]]

    @property
    def echoes(self) -> list[str]:
        """Completions whose answers the harness sent back in this call's new messages."""
        return [str(m["echo"]) for m in self.doc["messages"].get("new", ()) if "echo" in m]


@dataclass(slots=True, eq=False)
class Aborted:
    """A call that ended before its answer was complete."""

    id: str
    sequence: int
    request_hash: str
    prompt_tokens: int
    sampled: Ids | None
    logprobs: Floats | None
    number: int = -1


def document(body: bytes) -> Document:
    """Parse one body. Raises Poison (FromTheFuture for a newer schema version) as `events.decode` does."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Poison(f"not JSON: {error}") from error
    if isinstance(value, dict) and value.get("schema_version") == _VERSIONS.get(str(value.get("kind"))):
        # The proxy leaves out what is the default.
        return _DEFAULTS[value["kind"]] | value
    newest: Document = orjson.loads(encode(decode(body)))
    return newest


def _defaults(model: type[BaseModel]) -> Document:
    """What a body says by leaving a field out."""
    fields = model.model_fields.items()
    found = {name: field.get_default(call_default_factory=False) for name, field in fields if not field.is_required()}
    # As JSON has them: a document's lists are lists.
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


_DEFAULTS = {"completion.captured": _defaults(CompletionCaptured), "completion.aborted": _defaults(CompletionAborted)}
_ENGINE_DEFAULTS = _defaults(EngineFacts)


def blobs_wanted(doc: Document) -> list[Wanted]:
    """The blobs that `call` and `aborted` need for a document."""
    prompt = doc.get("prompt")
    new = prompt.get("new") if isinstance(prompt, dict) else None
    found = []
    for label, holder in (
        ("prompt", new), ("sampled", doc.get("sampled")), ("logprobs", doc.get("logprobs")), ("head", doc.get("head")),
    ):  # fmt: skip
        if isinstance(holder, dict) and "blob" in holder and blob_of(holder):
            found.append(Wanted(holder["blob"], f"completion {doc.get('completion')}, {label}"))
    return found


def call(doc: Document, sequence: int, blobs: Mapping[str, bytes], engines: dict[bytes, Engine]) -> Call:
    """A captured completion. `engines` keeps equal engine facts as one value. Raises TraceError or BlobError."""
    name = str(doc.get("completion"))
    _check_types(doc, name)
    try:
        prompt, head, column = doc["prompt"], doc["head"], doc["logprobs"]
        sampled = ids(doc["sampled"], blobs, name, "sampled")
        _check_versions(doc["versions"], len(sampled), name)
        _check_nested(doc["sampling"], doc["messages"])
        made = Call(
            name,
            sequence,
            prompt.get("base", ""),
            tuple(prompt.get("via", ())),
            _count(prompt.get("shared", 0)),
            ids(prompt["new"], blobs, name, "prompt"),
            _count(prompt["length"]),
            sampled,
            None if column is None else floats(column, blobs, name, "logprobs"),
            doc["untrainable"],
            doc["parent"],
            doc["request_hash"],
            doc["replay_of"],
            head["hash"],
            _tools(head, blobs, name),
            _count(doc["policy_seq"]),
            _engine(doc["engine"], engines),
            doc,
        )
        _forget(doc)
        return made
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"completion {name}: damaged event: {error!r}") from error


def _check_types(doc: Document, name: str) -> None:
    """Raises TraceError naming the first field that isn't what it has to be. Most bodies have types seen before."""
    try:
        types = tuple(map(type, _read_later(doc)))
        if types in _SOUND:
            return
    except KeyError:
        pass
    for key, kinds in _READ_LATER:
        if type(doc.get(key, _READ_LATER)) not in kinds:
            raise TraceError(f"completion {name}: damaged event: {key} is {doc.get(key, 'missing')!r}")
    _SOUND.add(types)


def _forget(doc: Document) -> None:
    """Drop the text of columns and messages: a long session's would be most of what the build holds."""
    doc["prompt"] = doc["sampled"] = doc["logprobs"] = None
    doc["messages"] = {"new": [m for m in doc["messages"].get("new", ()) if "echo" in m]}


def aborted(doc: Document, sequence: int, blobs: Mapping[str, bytes]) -> Aborted:
    """A partial call. Raises TraceError or BlobError."""
    name = str(doc.get("completion"))
    try:
        sampled, logprobs = doc["sampled"], doc["logprobs"]
        if type(doc["request_hash"]) is not str:
            raise ValueError(f"request_hash is {doc['request_hash']!r}")
        return Aborted(
            name,
            sequence,
            doc["request_hash"],
            _count(doc["prompt_tokens"]),
            None if sampled is None else ids(sampled, blobs, name, "sampled"),
            None if logprobs is None else floats(logprobs, blobs, name, "logprobs"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"completion {name}: damaged event: {error!r}") from error


def check_numbers(calls: list[Call], highest: int) -> None:
    """Ids within the vocabulary, as many log-probs as ids, all finite where the call claims to be trainable.

    `highest`: the largest id in any of the calls' contexts, unsigned. Raises TraceError naming completion, column and
    position. Checked over all at once; only a failure looks for its place.
    """
    engines = {id(c.engine): c.engine for c in calls}.values()
    if highest >= min((e.vocab_size for e in engines if e.vocab_size), default=1 << 31):
        for one in calls:
            _check_ids(one)
    for one in calls:
        if one.untrainable:
            continue
        if one.logprobs is None:
            raise TraceError(f"completion {one.id}: no log-probs and no reason for it")
        if len(one.logprobs) != len(one.sampled):
            raise TraceError(f"completion {one.id}: {len(one.sampled)} sampled ids, {len(one.logprobs)} log-probs")
    claimed = [c.logprobs for c in calls if not c.untrainable and c.logprobs is not None]
    if claimed and not np.isfinite(np.concatenate(claimed)).all():
        _find_non_finite(calls)


def _check_ids(one: Call) -> None:
    bound = one.engine.vocab_size or 1 << 31
    for label, column, offset in (("prompt", one.new, one.shared), ("sampled", one.sampled, 0)):
        bad = np.flatnonzero(column.view("<u4") >= bound)
        if len(bad):
            at, value = int(bad[0]), int(column[bad[0]])
            what = "a negative id" if value < 0 else f"id {value} beyond the vocabulary of {bound}"
            raise TraceError(f"completion {one.id}: {label}[{at + offset}] is {what}")


def _find_non_finite(calls: list[Call]) -> None:
    for one in calls:
        if one.untrainable or one.logprobs is None:
            continue
        bad = np.flatnonzero(~np.isfinite(one.logprobs))
        if len(bad):
            raise TraceError(f"completion {one.id}: logprobs[{int(bad[0])}] is {one.logprobs[bad[0]]}")


def _tools(head: dict[str, Any], blobs: Mapping[str, bytes], name: str) -> bool | None:
    body, blob = head.get("body"), head.get("blob")
    if blob is not None:
        stored = blobs.get(str(blob["sha256"]))
        if stored is None:
            raise BlobError(f"completion {name}, head: blob {blob['sha256']} is missing")
        body = orjson.loads(unzip(stored))
    return None if body is None else bool(body.get("tools"))


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _check_nested(sampling: dict[str, Any], messages: dict[str, Any]) -> None:
    for key in ("temperature", "top_p", "top_k", "min_p"):
        if type(sampling[key]) not in _NUMBER:
            raise ValueError(f"sampling.{key} is {sampling[key]!r}")
    if not all(type(m) is dict for m in messages.get("new", ())):
        raise ValueError("messages.new holds what is no message")


def _check_versions(spans: list[dict[str, Any]], length: int, name: str) -> None:
    starts = [_count(s["start"]) for s in spans if type(s["version"]) is str]
    if len(starts) < len(spans):
        raise ValueError("a version that is no text")
    if not starts or starts == [0]:
        return
    if starts[0] != 0 or sorted(set(starts)) != starts or starts[-1] > length:
        raise TraceError(f"completion {name}: version spans start at {starts} in {length} sampled ids")


_ENGINE_TEXT = (
    "name", "model", "weights_hash", "dtype", "logprob_kind", "tokenizer_hash", "template_hash", "renderer",
    "renderer_version",
)  # fmt: skip


def _engine(facts: dict[str, Any], known: dict[bytes, Engine]) -> Engine:
    key = orjson.dumps(facts)
    found = known.get(key)
    if found is None:
        told = _ENGINE_DEFAULTS | facts
        found = known[key] = Engine(
            **{k: str(told[k]) for k in _ENGINE_TEXT},
            vocab_size=int(told["vocab_size"]),
            end_of_turn=tuple(told["end_of_turn"]),
        )
    return found
