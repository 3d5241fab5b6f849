"""Chat Completions answers: whole, or as a stream of chunks. The requests are in `request.py`.

Visible text and reasoning are two fields, tool calls a third: the order between them can't be said in this protocol.
The finish chunk and all that follows it are actionable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import orjson

from polar_common.errors import PolarError
from polar_proxy.dialects.base import ChatRequest, Finish, Frame, Minted, Reply, Usage
from polar_proxy.dialects.faults import Fault, in_stream
from polar_proxy.dialects.fields import Obj
from polar_render.base import (
    AnswerEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from polar_render.messages import Text, Thinking, ToolCall

__all__ = ["ChatEncoder", "encode", "error_body", "models", "usage_json"]

_dumps = orjson.dumps
_FINISH: dict[Finish, str] = {
    "stop": "stop",
    "stop_string": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
}
_NO_LOGPROB = -9999.0


def usage_json(usage: Usage) -> Obj:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _finish(reply: Reply) -> str:
    if reply.finish == "stop" and any(isinstance(part, ToolCall) for part in reply.parts):
        return "tool_calls"
    return _FINISH[reply.finish]


def _logprobs(reply: Reply, request: ChatRequest) -> Obj | None:
    """Per-token log-probs. Values JSON can't carry become the protocol's own "very unlikely"."""
    if not request.sampling.logprobs or reply.logprobs is None:
        return None
    texts = reply.token_texts or ("",) * len(reply.logprobs)
    content: list[Obj] = [
        {
            "token": token,
            "logprob": value if math.isfinite(value) else _NO_LOGPROB,
            "bytes": None if "\ufffd" in token else list(token.encode()),
            "top_logprobs": [],
        }
        for token, value in zip(texts, reply.logprobs, strict=False)
    ]
    return {"content": content, "refusal": None}  # type: ignore[dict-item]


def _call_json(call: ToolCall) -> Obj:
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _message(reply: Reply) -> Obj:
    text = "".join(part.text for part in reply.parts if isinstance(part, Text))
    thought = "".join(part.text for part in reply.parts if isinstance(part, Thinking))
    calls = [_call_json(part) for part in reply.parts if isinstance(part, ToolCall)]
    message: Obj = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = list(calls)
    return message


def encode(replies: Sequence[Reply], request: ChatRequest) -> bytes:
    """The whole answer; one choice per reply. The prompt is counted once."""
    first = replies[0]
    total = Usage(
        prompt_tokens=first.usage.prompt_tokens,
        completion_tokens=sum(reply.usage.completion_tokens for reply in replies),
        cached_tokens=first.usage.cached_tokens,
        reasoning_tokens=sum(reply.usage.reasoning_tokens for reply in replies),
    )
    choices: list[Obj] = [
        {
            "index": index,
            "message": _message(reply),
            "logprobs": _logprobs(reply, request),
            "finish_reason": _finish(reply),
        }
        for index, reply in enumerate(replies)
    ]
    return _dumps(
        {
            "id": f"chatcmpl-{first.minted.message_id()}",
            "object": "chat.completion",
            "created": first.minted.created,
            "model": request.model,
            "choices": choices,
            "usage": usage_json(total),
        }
    )


class ChatEncoder:
    """Chunks of a streamed answer. The constant start of every chunk is formatted once."""

    def __init__(self, request: ChatRequest, minted: Sequence[Minted]) -> None:
        head = {
            "id": f"chatcmpl-{minted[0].message_id()}",
            "object": "chat.completion.chunk",
            "created": minted[0].created,
            "model": request.model,
        }
        self._request = request
        self._minted = minted
        self._head = b"data: " + _dumps(head)[:-1]
        self._choice = [self._head + b',"choices":[{"index":%d,"delta":' % index for index in range(len(minted))]
        self._freeform: set[tuple[int, int]] = set()

    def _chunk(self, choice: int, delta: bytes) -> Frame:
        return Frame(self._choice[choice] + delta + b',"finish_reason":null}]}\n\n')

    def start(self, usage: Usage) -> list[Frame]:
        return [self._chunk(index, b'{"role":"assistant","content":""}') for index in range(len(self._minted))]

    def feed(self, event: AnswerEvent, choice: int = 0) -> list[Frame]:
        if isinstance(event, TextDelta):
            return [self._chunk(choice, b'{"content":' + _dumps(event.text) + b"}")] if event.text else []
        if isinstance(event, ToolCallDelta):
            return self._arguments(event, choice)
        if isinstance(event, ThinkingDelta):
            return [self._chunk(choice, b'{"reasoning_content":' + _dumps(event.text) + b"}")] if event.text else []
        if isinstance(event, ToolCallStarted):
            return [self._started(event, choice)]
        return []

    def _started(self, event: ToolCallStarted, choice: int) -> Frame:
        call = ToolCall(self._minted[choice].tool_id(event.index), event.name, "", custom=event.custom)
        if event.custom:
            self._freeform.add((choice, event.index))
        begun = self._chunk(choice, _dumps({"tool_calls": [{"index": event.index, **_call_json(call)}]}))
        return replace(begun, actionable=self._request.hints.keeps_broken_calls)

    def _arguments(self, event: ToolCallDelta, choice: int) -> list[Frame]:
        if not event.arguments:
            return []
        field = b'"custom":{"input":' if (choice, event.index) in self._freeform else b'"function":{"arguments":'
        delta = b'{"tool_calls":[{"index":%d,' % event.index + field
        return [self._chunk(choice, delta + _dumps(event.arguments) + b"}}]}")]

    def finish(self, reply: Reply, choice: int = 0) -> list[Frame]:
        closing = self._choice[choice] + b"{}"
        if (logprobs := _logprobs(reply, self._request)) is not None:
            closing += b',"logprobs":' + _dumps(logprobs)
        return [Frame(closing + b',"finish_reason":' + _dumps(_finish(reply)) + b"}]}\n\n", actionable=True)]

    def end(self, usage: Usage) -> list[Frame]:
        frames = []
        if self._request.include_usage:
            data = self._head + b',"choices":[],"usage":' + _dumps(usage_json(usage)) + b"}\n\n"
            frames.append(Frame(data, actionable=True))
        frames.append(Frame(b"data: [DONE]\n\n", actionable=True))
        return frames

    def fail(self, error: PolarError) -> list[Frame]:
        return [Frame(b"data: " + error_body(in_stream(error), numbered=True) + b"\n\n", actionable=True)]

    def keepalive(self) -> bytes:
        return b": keepalive\n\n"


def _code(what: Fault) -> tuple[str, str | int | None]:
    if what.overflow:
        return "invalid_request_error", "context_length_exceeded"
    codes = {
        401: ("authentication_error", "invalid_api_key"),
        403: ("permission_error", None),
        404: ("invalid_request_error", "not_found"),
        409: ("conflict_error", "session_sealed"),
        413: ("invalid_request_error", "request_too_large"),
        429: ("rate_limit_error", "rate_limit_exceeded"),
    }
    if what.status >= 500:
        return "server_error", None
    return codes.get(what.status, (what.kind or "invalid_request_error", None))


def error_body(what: Fault, *, numbered: bool = False) -> bytes:
    """OpenAI's error object; `param` is the offending path. `numbered`: where there is no status line, the code of a
    server's error is its status, as other engines say it."""
    kind, code = _code(what)
    if numbered and code is None and what.status >= 500:
        code = what.status
    message = what.message
    if what.overflow:
        message = f"Your input exceeds the context window of this model (maximum context length): {message}"
    param = what.path or ("messages" if what.overflow else None)
    return _dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def models(ids: Sequence[str], context_window: int, wanted: str) -> bytes | None:
    """The listing, or the one model `wanted`; None where it isn't served."""
    cards = [
        {"id": one, "object": "model", "created": 0, "owned_by": "polar", "max_model_len": context_window}
        for one in ids
    ]
    if not wanted:
        return _dumps({"object": "list", "data": cards})
    for card in cards:
        if card["id"] == wanted:
            return _dumps(card)
    return None
