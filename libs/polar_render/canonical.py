"""Which messages count as the same when a harness sends them again (EXACT §2), as pure functions.

A message's key is a hash of its canonical form, a history's keys are a rolling hash, so that "does this request begin
with that conversation" is one dictionary look-up. Thinking is no part of the keys: a harness may leave out what it was
given, which makes sameness of thinking no equivalence; `same_thinking` decides it for the candidates that remain.

Equal are: a string and one text block; empty blocks, null and ""; parsed arguments however they are written (bytes
where they don't parse, a freeform tool's raw input and `{"input": raw}`); a prefilled turn and prefill + sample.
Call ids are compared by what they refer to, not by their spelling. Different stay system and developer.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Iterable, Sequence

import orjson

from .base import Head
from .loose import loads
from .messages import Image, Json, Message, Text, ToolCall, dump, tool_to_json

__all__ = [
    "canonical_key", "first_difference", "head_key", "prefix_keys", "same_message", "same_thinking", "thinking_key",
    "with_prefill",
]  # fmt: skip

_SIZE = 16
"""Bytes of a key: 128 bits, so that a collision is no practical concern within a session or across all of them."""
_WHOLE = 2**53
"""Below it every whole double is one integer."""


def _hash(*fields: bytes) -> bytes:
    joined = b"".join([part for field in fields for part in (len(field).to_bytes(8, "little"), field)])
    return hashlib.blake2b(joined, digest_size=_SIZE).digest()


def _arguments(call: ToolCall) -> bytes:
    """Parsed arguments in one spelling, or the bytes that don't parse. A freeform tool's raw input is an object."""
    text = call.arguments
    if call.custom:
        return b"j" + dump({"input": text})
    if not text.strip():
        return b"j{}"
    try:
        return b"j" + orjson.dumps(_doubles(loads(text)), option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, RecursionError):
        return b"r" + text.encode("utf-8", "surrogatepass")


def _doubles(value: Json) -> Json:
    """Numbers as JavaScript has them, which knows doubles alone: a harness in it writes 30.0 as 30."""
    if isinstance(value, dict):
        return {k: _doubles(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_doubles(v) for v in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        double = float(value)
        return int(double) if abs(double) < _WHOLE and double.is_integer() else double
    return value


def _image(image: Image) -> bytes:
    """Content where it is known (data and blob name the same bytes), else the address."""
    if image.data:
        try:
            content = hashlib.sha256(base64.b64decode(image.data, validate=False)).hexdigest()
        except binascii.Error:
            content = image.data
        return f"i{content}".encode()
    return f"i{image.blob}".encode() if image.blob else f"u{image.url}".encode()


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _assistant_fields(message: Message) -> list[bytes]:
    """Joined text, then images, then calls: protocols differ in whether they keep an answer's blocks apart."""
    texts = _text("".join(p.text for p in message.parts if isinstance(p, Text)))
    images = [_image(p) for p in message.parts if isinstance(p, Image)]
    calls = [_hash(_text(c.namespace), _text(c.name), _arguments(c)) for c in message.tool_calls]
    return [texts, *images, *calls]


def _other_fields(message: Message) -> list[bytes]:
    fields = [b"e" if message.is_error else b""]
    for part in message.parts:
        if isinstance(part, Text):
            if part.text:
                fields.append(b"t" + _text(part.text))
        elif isinstance(part, Image):
            fields.append(_image(part))
        elif isinstance(part, ToolCall):
            fields.append(b"c" + _hash(_text(part.namespace), _text(part.name), _arguments(part)))
    return fields


def canonical_key(message: Message) -> bytes:
    """16 bytes; equal for messages that count as the same, thinking and call ids left aside."""
    fields = _assistant_fields(message) if message.role == "assistant" else _other_fields(message)
    name = message.name if message.role not in ("assistant", "tool") else ""
    return _hash(message.role.encode(), _text(name), *fields)


def prefix_keys(messages: Iterable[Message], start: bytes = b"", calls: dict[str, int] | None = None) -> list[bytes]:
    """Key i stands for messages[: i + 1]. `start` is the key before them (a head's, or an earlier prefix's).

    A tool result is tied to the position of the call it answers. To go on from an earlier prefix pass the same `calls`
    dictionary (call id → position), which is filled on the way.
    """
    calls = {} if calls is None else calls
    keys: list[bytes] = []
    key = start
    for message in messages:
        reference = b""
        if message.role == "tool" and message.call_id:
            reference = str(calls.get(message.call_id, "?")).encode()
        for call in message.tool_calls:
            calls[call.id] = calls[""] = calls.get("", 0) + 1
        key = _hash(key, canonical_key(message), reference)
        keys.append(key)
    return keys


def head_key(head: Head, start: bytes = b"") -> bytes:
    """16 bytes for what stands before the messages: tools in their order, response format, template arguments."""
    tools = dump([tool_to_json(t) for t in head.tools])
    return _hash(start, tools, dump(head.response_format or None), dump(head.template_args))


def thinking_key(message: Message) -> bytes:
    """Of a message's thinking, b"" if it has none. Equal keys need no `same_thinking`."""
    text = "".join(t.text for t in message.thinking)
    return _hash(_text(text)) if text else b""


def _nobody(signature: str) -> bool:
    return False


def same_thinking(recorded: Message, echoed: Message, ours: Callable[[str], bool] = _nobody) -> bool:
    """Whether the thinking a harness sends back is what it was given: absent, empty, equal or under our signature.

    `ours` recognises signatures that Polar minted for this very completion. Anything else is an edit.
    """
    if all((not t.text and not t.redacted) or (t.signature and ours(t.signature)) for t in echoed.thinking):
        return True
    return [t.text for t in echoed.thinking if t.text] == [t.text for t in recorded.thinking if t.text]


def same_message(recorded: Message, echoed: Message, *, ours: Callable[[str], bool] = _nobody) -> bool:
    """Canonical equality of one message; see the module."""
    return canonical_key(recorded) == canonical_key(echoed) and same_thinking(recorded, echoed, ours)


def first_difference(
    recorded: Sequence[Message], echoed: Sequence[Message], *, ours: Callable[[str], bool] = _nobody
) -> int | None:
    """Index of the first recorded message that `echoed` doesn't repeat; None if it begins with all of them."""
    calls: tuple[dict[str, int], dict[str, int]] = ({}, {})
    pairs = zip(prefix_keys(recorded, b"", calls[0]), prefix_keys(echoed[: len(recorded)], b"", calls[1]), strict=False)
    for index, (left, right) in enumerate(pairs):
        if left != right or not same_thinking(recorded[index], echoed[index], ours):
            return index
    return None if len(echoed) >= len(recorded) else len(echoed)


def with_prefill(prefill: Message, sampled: Message) -> Message:
    """The whole turn of which `prefill` was given by the request and the rest was sampled."""
    return Message("assistant", (*prefill.parts, *sampled.parts), name=sampled.name, item_id=sampled.item_id)
