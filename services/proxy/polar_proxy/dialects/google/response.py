"""Google generateContent answers: whole, or as a stream of responses (SSE, or one JSON array).

A function call is sent whole, once its arguments are complete, and with what follows it is actionable. The finish
reason comes last, never before a call. Thoughts are sent where the request asked for them; their signature travels with
the first call, or with the last text, and is base64 because clients decode it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence

import orjson

from polar_common.errors import PolarError
from polar_proxy.dialects.arguments import as_object
from polar_proxy.dialects.base import ChatRequest, Finish, Frame, Minted, Reply, Usage
from polar_proxy.dialects.faults import Fault, in_stream, token_counts
from polar_proxy.dialects.fields import Json, Obj
from polar_proxy.dialects.parts import joined
from polar_render.base import AnswerEvent, TextDelta, ThinkingDelta, ToolCallDelta, ToolCallDone, ToolCallStarted
from polar_render.messages import Text, Thinking, ToolCall

__all__ = ["GoogleEncoder", "encode", "error_body", "models"]

_dumps = orjson.dumps
_FINISH: dict[Finish, str] = {"stop": "STOP", "stop_string": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}


def _usage(usage: Usage) -> Obj:
    out: Obj = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens - usage.reasoning_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.reasoning_tokens:
        out["thoughtsTokenCount"] = usage.reasoning_tokens
    if usage.cached_tokens:
        out["cachedContentTokenCount"] = usage.cached_tokens
    return out


def _shows_thoughts(request: ChatRequest) -> bool:
    return (request.thinking or {}).get("show") is True


def _signature(minted: Minted) -> str:
    return base64.b64encode(minted.signature(0).encode()).decode()


def _call_part(call: ToolCall) -> Obj:
    return {"functionCall": {"id": call.id, "name": call.name, "args": as_object(call.arguments)}}


def _parts(reply: Reply, request: ChatRequest) -> list[Json]:
    out: list[Json] = []
    unsigned = False
    for part in joined(reply.parts):
        if isinstance(part, Thinking):
            unsigned = True
            if _shows_thoughts(request):
                out.append({"text": part.text, "thought": True})
        elif isinstance(part, Text):
            out.append({"text": part.text})
        elif isinstance(part, ToolCall):
            item = _call_part(part)
            if unsigned:
                item["thoughtSignature"] = _signature(reply.minted)
                unsigned = False
            out.append(item)
    if unsigned:
        out.append({"text": "", "thoughtSignature": _signature(reply.minted)})
    return out or [{"text": ""}]


def _logprobs(reply: Reply, request: ChatRequest) -> Obj | None:
    if not request.sampling.logprobs or reply.logprobs is None:
        return None
    texts = reply.token_texts or ("",) * len(reply.logprobs)
    ids = reply.ids or (0,) * len(reply.logprobs)
    chosen: list[Json] = [
        {"token": text, "tokenId": number, "logProbability": value if math.isfinite(value) else -9999.0}
        for text, number, value in zip(texts, ids, reply.logprobs, strict=False)
    ]
    return {"chosenCandidates": chosen, "topCandidates": []}


def _candidate(index: int, parts: list[Json], reply: Reply | None = None, request: ChatRequest | None = None) -> Obj:
    out: Obj = {"content": {"role": "model", "parts": parts}, "index": index}
    if reply is not None and request is not None:
        out["finishReason"] = _FINISH[reply.finish]
        if (logprobs := _logprobs(reply, request)) is not None:
            out["logprobsResult"] = logprobs
    return out


def encode(replies: Sequence[Reply], request: ChatRequest) -> bytes:
    """The whole answer; one candidate per reply. The prompt is counted once."""
    first = replies[0]
    total = Usage(
        prompt_tokens=first.usage.prompt_tokens,
        completion_tokens=sum(reply.usage.completion_tokens for reply in replies),
        cached_tokens=first.usage.cached_tokens,
        reasoning_tokens=sum(reply.usage.reasoning_tokens for reply in replies),
    )
    candidates: list[Json] = [
        _candidate(index, _parts(reply, request), reply, request) for index, reply in enumerate(replies)
    ]
    return _dumps(
        {
            "candidates": candidates,
            "usageMetadata": _usage(total),
            "modelVersion": request.model,
            "responseId": first.minted.message_id(),
        }
    )


class GoogleEncoder:
    """One streamed answer, all candidates in one stream."""

    def __init__(self, request: ChatRequest, minted: Sequence[Minted], *, sse: bool = True) -> None:
        self._request = request
        self._minted = minted
        self._sse = sse
        self._first = True
        self._shows = _shows_thoughts(request)
        self._calls: dict[tuple[int, int], tuple[ToolCallStarted, list[str]]] = {}
        self._unsigned: set[int] = set()
        tail = {"modelVersion": request.model, "responseId": minted[0].message_id()}
        self._tail = b"," + _dumps(tail)[1:]

    def _chunk(self, data: bytes, *, actionable: bool = False) -> Frame:
        if self._sse:
            return Frame(b"data: " + data + b"\r\n\r\n", actionable)
        lead, self._first = (b"[" if self._first else b",\r\n"), False
        return Frame(lead + data, actionable)

    def _say(self, choice: int, part: bytes, *, actionable: bool = False) -> Frame:
        head = b'{"candidates":[{"content":{"role":"model","parts":['
        return self._chunk(head + part + b']},"index":%d}]' % choice + self._tail, actionable=actionable)

    def start(self, usage: Usage) -> list[Frame]:
        return []

    def feed(self, event: AnswerEvent, choice: int = 0) -> list[Frame]:
        if isinstance(event, TextDelta):
            return [self._say(choice, b'{"text":' + _dumps(event.text) + b"}")] if event.text else []
        if isinstance(event, ThinkingDelta):
            return self._thought(event.text, choice)
        if isinstance(event, ToolCallStarted):
            self._calls[choice, event.index] = (event, [])
        elif isinstance(event, ToolCallDelta):
            if (open_call := self._calls.get((choice, event.index))) is not None:
                open_call[1].append(event.arguments)
        elif isinstance(event, ToolCallDone):
            return self._call(choice, event.index)
        return []

    def _thought(self, text: str, choice: int) -> list[Frame]:
        if not text:
            return []
        self._unsigned.add(choice)
        return [self._say(choice, b'{"text":' + _dumps(text) + b',"thought":true}')] if self._shows else []

    def _call(self, choice: int, index: int) -> list[Frame]:
        found = self._calls.pop((choice, index), None)
        if found is None:
            return []
        call = ToolCall(self._minted[choice].tool_id(index), found[0].name, "".join(found[1]))
        part = _call_part(call)
        if choice in self._unsigned:
            self._unsigned.discard(choice)
            part["thoughtSignature"] = _signature(self._minted[choice])
        return [self._say(choice, _dumps(part), actionable=True)]

    def finish(self, reply: Reply, choice: int = 0) -> list[Frame]:
        unclosed = [index for which, index in self._calls if which == choice]
        frames = [frame for index in unclosed for frame in self._call(choice, index)]
        part: Obj = {"text": ""}
        if choice in self._unsigned:
            part["thoughtSignature"] = _signature(self._minted[choice])
        closing: Obj = {"candidates": [_candidate(choice, [part], reply, self._request)]}
        if len(self._minted) == 1:
            closing["usageMetadata"] = _usage(reply.usage)
        frames.append(self._chunk(_dumps(closing)[:-1] + self._tail, actionable=True))
        return frames

    def end(self, usage: Usage) -> list[Frame]:
        frames = []
        if len(self._minted) > 1:
            data = _dumps({"usageMetadata": _usage(usage)})[:-1] + self._tail
            frames.append(self._chunk(data, actionable=True))
        if not self._sse:
            frames.append(Frame(b"[]" if self._first else b"]", actionable=True))
        return frames

    def fail(self, error: PolarError) -> list[Frame]:
        body = error_body(in_stream(error))
        if self._sse:
            # Clients look for an error that stands by itself; one in a `data:` line they take for an empty answer.
            return [Frame(body + b"\r\n", actionable=True)]
        return [self._chunk(body, actionable=True), Frame(b"]", actionable=True)]

    def keepalive(self) -> bytes:
        """Nothing: clients take every line of this stream for data."""
        return b""


_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def error_body(what: Fault) -> bytes:
    """Google's error object."""
    message = what.message
    if what.overflow:
        counts = token_counts(message)
        asked, allowed = (f" ({counts[0]})", f" ({counts[1]})") if counts else ("", "")
        message = f"The input token count{asked} exceeds the maximum number of tokens allowed{allowed}."
        if not counts:
            message = f"{message} {what.message}"
    error: Obj = {
        "code": what.status,
        "message": message,
        "status": _STATUS.get(what.status, "UNAVAILABLE" if what.status >= 500 else "FAILED_PRECONDITION"),
    }
    if what.path:
        field: Obj = {"field": what.path, "description": what.message}
        error["details"] = [{"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [field]}]
    return _dumps({"error": error})


def models(ids: Sequence[str], context_window: int, wanted: str) -> bytes | None:
    """The listing, or the one model `wanted`; None where it isn't served."""
    cards = {
        one: {
            "name": f"models/{one}",
            "baseModelId": one,
            "version": "1",
            "displayName": one,
            "description": "",
            "inputTokenLimit": context_window,
            "outputTokenLimit": context_window,
            "supportedGenerationMethods": ["generateContent", "countTokens"],
        }
        for one in ids
    }
    if not wanted:
        return _dumps({"models": list(cards.values())})
    return _dumps(cards[wanted]) if wanted in cards else None
