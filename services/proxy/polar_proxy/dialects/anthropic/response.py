"""Anthropic Messages answers: whole, or as a stream of content blocks. The requests are in `request.py`.

Blocks are strictly one after the other in this protocol. Events that would interleave (two tool calls at once, text
within a call) wait until the open call is closed. The stop of a `tool_use` block and the end of the message are
actionable. A call's arguments go out in one piece when they are complete: clients of this API take them for an object,
and only then is it known whether they are one.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from polar_common.errors import PolarError
from polar_proxy.dialects import sequence
from polar_proxy.dialects.arguments import as_object, object_text
from polar_proxy.dialects.base import ChatRequest, Finish, Frame, Minted, Reply, Usage
from polar_proxy.dialects.faults import Fault, in_stream, token_counts
from polar_proxy.dialects.fields import Json, Obj
from polar_proxy.dialects.parts import joined
from polar_render.base import AnswerEvent
from polar_render.messages import Part, Text, Thinking, ToolCall

__all__ = ["AnthropicEncoder", "encode", "error_body", "models"]

_dumps = orjson.dumps
_STOP: dict[Finish, str] = {
    "stop": "end_turn",
    "stop_string": "stop_sequence",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
_BODY = {
    "text": b'{"type":"text_delta","text":',
    "thinking": b'{"type":"thinking_delta","thinking":',
    "signature": b'{"type":"signature_delta","signature":',
    "tool": b'{"type":"input_json_delta","partial_json":',
}


def _usage(usage: Usage, completion_tokens: int) -> Obj:
    """In this API `input_tokens` is what wasn't read from a cache; the sum of all three is the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": completion_tokens,
    }


def _stop_reason(reply: Reply) -> str:
    if reply.finish == "stop" and any(isinstance(part, ToolCall) for part in reply.parts):
        return "tool_use"
    return _STOP[reply.finish]


def _block(part: Part, signature: str) -> Obj:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": as_object(part.arguments)}
    if isinstance(part, Thinking):
        if part.redacted:
            return {"type": "redacted_thinking", "data": part.signature}
        return {"type": "thinking", "thinking": part.text, "signature": signature}
    raise TypeError(f"an answer can't hold {type(part).__name__}")


def _blocks(reply: Reply) -> list[Json]:
    out: list[Json] = []
    thoughts = 0
    for part in joined(reply.parts):
        out.append(_block(part, reply.minted.signature(thoughts)))
        thoughts += isinstance(part, Thinking)
    return out


def encode(replies: Sequence[Reply], request: ChatRequest) -> bytes:
    """The whole answer. This API has no `n`."""
    reply = replies[0]
    return _dumps(
        {
            "id": f"msg_{reply.minted.message_id()}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": _blocks(reply),
            "stop_reason": _stop_reason(reply),
            "stop_sequence": reply.stop_sequence if reply.finish == "stop_string" else None,
            "usage": _usage(reply.usage, reply.usage.completion_tokens),
        }
    )


def _event(name: bytes, data: Obj) -> bytes:
    return b"event: " + name + b"\ndata: " + _dumps(data) + b"\n\n"


class AnthropicEncoder:
    """One streamed message."""

    def __init__(self, request: ChatRequest, minted: Sequence[Minted]) -> None:
        self._request = request
        self._minted = minted[0]
        self._order = sequence.Sequence()
        self._index = -1
        self._thoughts = 0
        self._arguments: list[str] = []

    def start(self, usage: Usage) -> list[Frame]:
        message: Obj = {
            "id": f"msg_{self._minted.message_id()}",
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage, 0),
        }
        return [Frame(_event(b"message_start", {"type": "message_start", "message": message}) + _PING)]

    def feed(self, event: AnswerEvent, choice: int = 0) -> list[Frame]:
        return [frame for step in self._order.feed(event) for frame in self._frames(step)]

    def _frames(self, step: sequence.Step) -> list[Frame]:
        if isinstance(step, sequence.Piece):
            if step.kind == "tool":
                self._arguments.append(step.text)
                return []
            return [self._delta(_BODY[step.kind], step.text)]
        if isinstance(step, sequence.Opened):
            return [self._opened(step)]
        return self._closed(step)

    def _delta(self, body: bytes, text: str) -> Frame:
        return Frame(_DELTA % self._index + body + _dumps(text) + b"}}\n\n")

    def _opened(self, step: sequence.Opened) -> Frame:
        self._index += 1
        block: Obj = {"type": "text", "text": ""}
        if step.kind == "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif step.call is not None:
            self._arguments = []
            identity = self._minted.tool_id(step.call.index)
            block = {"type": "tool_use", "id": identity, "name": step.call.name, "input": {}}
        start: Obj = {"type": "content_block_start", "index": self._index, "content_block": block}
        return Frame(_event(b"content_block_start", start))

    def _closed(self, step: sequence.Closed) -> list[Frame]:
        """A thought ends with its signature, a call with its arguments: only now is it known that they are valid."""
        frames = []
        if step.kind == "thinking":
            frames.append(self._delta(_BODY["signature"], self._minted.signature(self._thoughts)))
            self._thoughts += 1
        elif step.kind == "tool":
            frames.append(self._delta(_BODY["tool"], object_text("".join(self._arguments))))
        stop = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n' % self._index
        return [*frames, Frame(stop, actionable=step.kind == "tool")]

    def finish(self, reply: Reply, choice: int = 0) -> list[Frame]:
        frames = [frame for step in self._order.finish() for frame in self._frames(step)]
        delta: Obj = {
            "type": "message_delta",
            "delta": {
                "stop_reason": _stop_reason(reply),
                "stop_sequence": reply.stop_sequence if reply.finish == "stop_string" else None,
            },
            "usage": _usage(reply.usage, reply.usage.completion_tokens),
        }
        return [*frames, Frame(_event(b"message_delta", delta), actionable=True)]

    def end(self, usage: Usage) -> list[Frame]:
        return [Frame(b'event: message_stop\ndata: {"type":"message_stop"}\n\n', actionable=True)]

    def fail(self, error: PolarError) -> list[Frame]:
        return [Frame(b"event: error\ndata: " + error_body(in_stream(error)) + b"\n\n", actionable=True)]

    def keepalive(self) -> bytes:
        return _PING


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_body(what: Fault) -> bytes:
    """Anthropic's error object. An overflow says `prompt is too long`, which its clients look for."""
    kind = _KINDS.get(what.status, "api_error" if what.status >= 500 else "invalid_request_error")
    message = what.message
    if what.overflow:
        counts = token_counts(message)
        said = f"{counts[0]} tokens > {counts[1]} maximum" if counts else message
        message = f"prompt is too long: {said}"
    return _dumps({"type": "error", "error": {"type": kind, "message": message}})


def models(ids: Sequence[str], context_window: int, wanted: str) -> bytes | None:
    """The listing, or the one model `wanted`; None where it isn't served."""
    cards = [
        {
            "type": "model",
            "id": one,
            "display_name": one,
            "created_at": "1970-01-01T00:00:00Z",
            "max_input_tokens": context_window,
        }
        for one in ids
    ]
    if not wanted:
        page = {"data": cards, "has_more": False, "first_id": None, "last_id": None}
        if ids:
            page |= {"first_id": ids[0], "last_id": ids[-1]}
        return _dumps(page)
    return next((_dumps(card) for card in cards if card["id"] == wanted), None)
