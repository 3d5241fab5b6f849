"""Responses requests: bytes in, `ChatRequest` out. Input items are read in `items.py`, tools in `tools.py`.

Nothing is looked up: `previous_response_id` is passed on as a hint, and items are taken as they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping

from polar_proxy.dialects import fields as f
from polar_proxy.dialects.base import ChatRequest, Hints, Sampling
from polar_proxy.dialects.hints import hints_from
from polar_proxy.dialects.openai_chat.request import json_schema_format
from polar_proxy.dialects.openai_responses.items import Items
from polar_proxy.dialects.openai_responses.tools import tool_choice, tool_specs
from polar_render.messages import Message, Text

__all__ = ["HONOURED", "NOT_FORWARDED", "parse"]

# What a request may say and the engine or the proxy acts on.
HONOURED = f.keys(
    "model input instructions tools tool_choice parallel_tool_calls text reasoning max_output_tokens temperature top_p "
    "stream store include previous_response_id client_metadata"
)

# What harnesses send and no engine could use, with the reason. Recorded in `dropped` like every unknown field.
NOT_FORWARDED = {
    "metadata": "the caller's own bookkeeping",
    "user": "an end user's id, for abuse reports",
    "safety_identifier": "an end user's id, for abuse reports",
    "prompt_cache_key": "routing is by conversation",
    "prompt_cache_retention": "the engine keeps its own cache",
    "service_tier": "there is one tier",
    "truncation": "history is never cut in silence; an overflow is an error",
    "stream_options": "obfuscation would only add bytes",
    "top_logprobs": "log-probs are given to Chat clients",
    "text.verbosity": "a property of the provider's own models",
    "tools[?type=='web_search']": "there are no hosted tools",
    "tools[?type=='namespace'].description": "each of its tools has its own",
    "tools[*].strict": "grammars are the engine's business",
    "max_tool_calls": "concerns hosted tools only",
}

# Fields that would change the meaning of the request if they were dropped.
_REFUSED = {
    "background": "answers aren't kept for later; call without background",
    "conversation": "conversations aren't stored; send the items",
    "prompt": "prompt templates aren't stored; send the messages",
}


def _input(body: f.Obj, items: Items) -> None:
    given = body.get("input")
    if type(given) is str:
        items.read({"role": "user", "content": given}, "input")
        return
    if given is not None and type(given) is not list:
        raise f.bad("input", "must be a string or an array of items")
    for index, item in enumerate(f.objects(body, "input")):
        items.read(item, f"input[{index}]")


def _instructions(body: f.Obj) -> list[Message]:
    told = f.text_or_none(body, "instructions")
    return [Message("system", (Text(told),))] if told else []


def _format(body: f.Obj, seen: f.Seen) -> f.Obj | None:
    text = f.table(body, "text") or {}
    seen.extra(text, frozenset(("format",)), "text")
    wanted = f.table(text, "format", "text")
    if wanted is None:
        return None
    kind = f.text(wanted, "type", "text.format")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise f.bad("text.format.type", f"unknown format {kind!r}")
    schema = f.table(wanted, "schema", "text.format")
    if schema is None:
        raise f.bad("text.format.schema", "is required")
    name = f.text_or_none(wanted, "name", "text.format") or "answer"
    return json_schema_format(schema, name, f.flag(wanted, "strict", "text.format"))


def _thinking(body: f.Obj, seen: f.Seen) -> f.Obj | None:
    asked = f.table(body, "reasoning") or {}
    seen.extra(asked, f.keys("effort summary"), "reasoning")
    effort = f.text_or_none(asked, "effort", "reasoning")
    return {"effort": effort} if effort else None


def _include(body: f.Obj, seen: f.Seen) -> None:
    for wanted in f.strings(body, "include"):
        if wanted != "reasoning.encrypted_content":
            seen.add(f"include[?@=='{wanted[:64]}']")


def _sampling(body: f.Obj) -> Sampling:
    return Sampling(
        max_tokens=f.integer_or_none(body, "max_output_tokens", low=1),
        temperature=f.number(body, "temperature", low=0, high=2),
        top_p=f.number(body, "top_p", low=0, high=1),
    )


def _hints(headers: Mapping[str, str], body: f.Obj, previous: str) -> Hints:
    metadata = f.table(body, "client_metadata") or {}
    told = metadata.get("x-codex-turn-metadata")
    return hints_from(headers, previous_response=previous, turn_metadata=told if isinstance(told, str) else "")


def _refuse(body: f.Obj) -> None:
    for key, why in _REFUSED.items():
        if body.get(key) not in (None, False):
            raise f.bad(key, why)


def parse(headers: Mapping[str, str], raw: bytes) -> ChatRequest:
    """Raises RequestError with the offending path."""
    body, seen = f.load(raw), f.Seen()
    model = f.text(body, "model")
    _refuse(body)
    items = Items(seen)
    _input(body, items)
    previous = f.text_or_none(body, "previous_response_id") or ""
    messages = tuple(_instructions(body) + items.messages())
    if not messages and not previous:
        raise f.bad("input", "is required and must hold at least one item")
    tools = tuple(tool_specs(body, seen) + items.tools)
    choice, sampling, form = tool_choice(body), _sampling(body), _format(body, seen)
    thinking, parallel = _thinking(body, seen), f.flag(body, "parallel_tool_calls")
    _include(body, seen)
    seen.extra(body, HONOURED)
    return ChatRequest(
        dialect="openai_responses",
        model=model,
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=form,
        sampling=sampling,
        stream=bool(f.flag(body, "stream")),
        thinking=thinking,
        hints=_hints(headers, body, previous),
        dropped=seen.paths(),
        raw_hash=f.fingerprint(model, previous, messages, tools, choice, parallel, form, sampling, thinking),
        store=f.flag(body, "store") is not False,
    )
