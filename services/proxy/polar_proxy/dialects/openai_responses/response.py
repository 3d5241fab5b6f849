"""Responses answers as a whole: the response object and its output items. The stream is in `stream.py`."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from polar_proxy.dialects.arguments import as_object
from polar_proxy.dialects.base import ChatRequest, Minted, Reply, Usage
from polar_proxy.dialects.faults import Fault
from polar_proxy.dialects.fields import Json, Obj
from polar_proxy.dialects.parts import joined
from polar_render.messages import Part, Text, Thinking, ToolCall

__all__ = ["call_item", "encode", "failure", "message_item", "reasoning_item", "response_json", "usage_json"]


def usage_json(usage: Usage) -> Obj:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def response_json(request: ChatRequest, minted: Minted, status: str, output: list[Json], usage: Usage | None) -> Obj:
    """The response object; `status` is in_progress, completed, incomplete or failed."""
    choice = request.tool_choice
    thinking = request.thinking or {}
    return {
        "id": f"resp_{minted.message_id()}",
        "object": "response",
        "created_at": minted.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "max_output_tokens": request.sampling.max_tokens,
        "metadata": {},
        "model": request.model,
        "output": output,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.hints.previous_response or None,
        "reasoning": {"effort": thinking.get("effort"), "summary": None},
        "store": request.store,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else "auto",
        "tools": [],
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": None if usage is None else usage_json(usage),
    }


def reasoning_item(item_id: str, text: str, signature: str) -> Obj:
    summary: list[Json] = [{"type": "summary_text", "text": text}] if text else []
    return {"id": item_id, "type": "reasoning", "summary": summary, "encrypted_content": signature}


def message_item(item_id: str, text: str, status: str) -> Obj:
    part: Obj = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": [part]}


def call_item(item_id: str, call: ToolCall, status: str) -> Obj:
    item: Obj = {"id": item_id, "type": "function_call", "status": status, "call_id": call.id, "name": call.name}
    if call.namespace:
        item["namespace"] = call.namespace
    if call.custom:
        return {**item, "type": "custom_tool_call", "input": call.arguments}
    return {**item, "arguments": call.arguments}


def _item(part: Part, item_id: str, signature: str, cut: bool) -> Obj:
    if isinstance(part, Text):
        return message_item(item_id, part.text, "incomplete" if cut else "completed")
    if isinstance(part, ToolCall):
        broken = cut and "_raw" in as_object(part.arguments)
        return call_item(item_id, part, "incomplete" if broken else "completed")
    if isinstance(part, Thinking):
        return reasoning_item(item_id, part.text, part.signature if part.redacted else signature)
    raise TypeError(f"an answer can't hold {type(part).__name__}")


def encode(replies: Sequence[Reply], request: ChatRequest) -> bytes:
    """The whole answer. This API has no `n`."""
    reply = replies[0]
    parts = joined(reply.parts)
    output: list[Json] = []
    thoughts = 0
    for index, part in enumerate(parts):
        cut = reply.finish == "length" and index == len(parts) - 1
        output.append(_item(part, reply.minted.item_id(index), reply.minted.signature(thoughts), cut))
        thoughts += isinstance(part, Thinking)
    status = "incomplete" if reply.finish == "length" else "completed"
    return orjson.dumps(response_json(request, reply.minted, status, output, reply.usage))


def failure(what: Fault) -> Obj:
    """The `error` of a failed response, with the codes that clients act on.

    An overload isn't said with a code of its own: Codex gives up on those, and tries again on all others.
    """
    message = what.message
    if what.overflow:
        code = "context_length_exceeded"
    elif what.status == 429:
        code = "rate_limit_exceeded"
        message = f"{message}. Please try again in {what.retry_after}s."
    else:
        code = "server_error" if what.status >= 500 else "invalid_prompt"
    return {"code": code, "message": message}
