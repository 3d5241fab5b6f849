"""How a completion refers to earlier ones on the log: the writing half. `records.py` is the reading half.

A completion stores its prompt as *(base, shared, new ids)* and its messages as *(base, shared, new bodies)*, so that a
session grows linearly (LOG §8). Writers keep one `Link` per acknowledged completion and call `refer` and `head_ref`.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from polar_common.packing import INLINE_LIMIT, BlobRef, ColumnType, compress, pack_bytes

from .base import Head
from .canonical import head_key
from .messages import Json, Message, to_json, tool_to_json

__all__ = ["MAX_LINKS", "Blob", "Echo", "Ids", "Link", "Written", "column", "common_prefix", "head_ref", "refer"]

Ids = npt.NDArray[np.int32]
Blob = tuple[BlobRef, bytes]
"""A body that has to be acknowledged before the event that names it is published."""

MAX_LINKS = 32
"""References that a reader follows for one completion at most."""
_WASTE = 8
"""A prompt is written in full when resolving it would read more than this many times its own length."""
_JSON_BLOB = "application/json+zstd"


@dataclass(frozen=True, slots=True)
class Echo:
    """A message that repeats, canonically, the answer of a completion of this session."""

    completion: str


@dataclass(slots=True, eq=False)
class Link:
    """What a later completion has to know about an acknowledged one in order to refer to it.

    `context`: prompt + sampled ids. `messages`: how many the harness sent. `chain`: the completions whose own
    new + sampled ids make up the context, oldest first; None where one of them is shared in part. `links`: references
    to follow; `reads`: ids read in doing so. `message_chain`, `message_links`: the same for messages.
    """

    completion: str
    context: Ids
    messages: int
    chain: tuple[str, ...] | None = None
    links: int = 0
    reads: int = 0
    message_chain: tuple[str, ...] | None = None
    message_links: int = 0


@dataclass(slots=True, eq=False)
class Written:
    """A completion's references as JSON (`PromptRef`, `MessagesRef`), the bodies to be stored before it, and the link
    for those that come after it."""

    prompt: dict[str, Any]
    messages: dict[str, Any]
    blobs: tuple[Blob, ...]
    link: Link


def column(values: npt.NDArray[np.generic], type: ColumnType) -> tuple[dict[str, Any], Blob | None]:
    """`packing.pack` in JSON form: this is the hot path of every call."""
    body = pack_bytes(values, type)
    if len(body) < INLINE_LIMIT:
        return {"type": type, "n": len(values), "data": b64encode(body).decode()}, None
    ref = BlobRef(sha256=hashlib.sha256(body).hexdigest(), size=len(body), media_type=f"application/x-polar-{type}")
    return {"type": type, "n": len(values), "blob": ref.model_dump()}, (ref, body)


def common_prefix(left: Ids, right: Ids) -> int:
    """Number of equal ids at the beginning."""
    size = min(len(left), len(right))
    different = left[:size] != right[:size]
    at = int(different.argmax()) if size else 0
    return at if size and different[at] else size


def refer(
    completion: str,
    prompt: Ids,
    sampled: Ids,
    messages: Sequence[Message | Echo],
    base: Link | None = None,
    shared_messages: int = 0,
) -> Written:
    """Prompt and messages in terms of `base`, whose first `shared_messages` messages begin `messages`."""
    context = np.concatenate((prompt, sampled))
    ids, id_blob, chain, links, reads = _prompt(completion, prompt, len(context), base)
    said, said_blob, message_chain, message_links = _messages(completion, messages, base, shared_messages)
    link = Link(completion, context, len(messages), chain, links, reads, message_chain, message_links)
    return Written(ids, said, tuple(b for b in (id_blob, said_blob) if b is not None), link)


def _prompt(
    completion: str, prompt: Ids, context: int, base: Link | None
) -> tuple[dict[str, Any], Blob | None, tuple[str, ...] | None, int, int]:
    length = len(prompt)
    shared = common_prefix(base.context, prompt) if base is not None else 0
    if base is not None and shared and base.reads <= _WASTE * length:
        chain = base.chain if shared == len(base.context) else None
        grown = (*chain, completion) if chain is not None else None
        if base.links < MAX_LINKS:
            new, blob = column(prompt[shared:], "i32")
            ref = {"base": base.completion, "shared": shared, "new": new, "length": length}
            return ref, blob, grown, base.links + 1, base.reads + context - shared
        if chain is not None:
            new, blob = column(prompt[shared:], "i32")
            return {"via": chain, "shared": shared, "new": new, "length": length}, blob, grown, 0, context
    new, blob = column(prompt, "i32")
    return {"new": new, "length": length}, blob, (completion,), 0, context


def _messages(
    completion: str, messages: Sequence[Message | Echo], base: Link | None, shared: int
) -> tuple[dict[str, Any], Blob | None, tuple[str, ...] | None, int]:
    ref: dict[str, Any] = {}
    links = 0
    chain: tuple[str, ...] | None = (completion,)
    if base is not None and shared:
        known = base.message_chain if shared == base.messages else None
        if base.message_links < MAX_LINKS:
            ref["base"], links = base.completion, base.message_links + 1
            chain = (*known, completion) if known is not None else None
        elif known is not None:
            ref["via"], chain = known, (*known, completion)
        else:
            shared = 0
    else:
        shared = 0
    if shared:
        ref["shared"] = shared
    bodies = [{"echo": m.completion} if isinstance(m, Echo) else to_json(m) for m in messages[shared:]]
    written = orjson.dumps(bodies)
    if len(written) <= INLINE_LIMIT:
        ref["new"] = orjson.Fragment(written)
        return ref, None, chain, links
    blob = _json_blob(written)
    ref["blob"] = blob[0].model_dump()
    return ref, blob, chain, links


def head_ref(head: Head, at: str = "", key: bytes = b"") -> tuple[dict[str, Any], Blob | None]:
    """`HeadRef` as JSON: the head, or the completion `at` which holds it. `key`: its `head_key`, where it is known."""
    name = (key or head_key(head)).hex()
    if at:
        return {"hash": name, "at": at}, None
    body: dict[str, Json] = {
        "tools": [tool_to_json(t) for t in head.tools],
        "response_format": head.response_format,
        "template_args": head.template_args,
    }
    body = {k: v for k, v in body.items() if v}
    written = orjson.dumps(body)
    if len(written) <= INLINE_LIMIT:
        return {"hash": name, "body": orjson.Fragment(written)}, None
    blob = _json_blob(written)
    return {"hash": name, "blob": blob[0].model_dump()}, blob


def _json_blob(written: bytes) -> Blob:
    body = compress(written)
    return BlobRef(sha256=hashlib.sha256(body).hexdigest(), size=len(body), media_type=_JSON_BLOB), body
