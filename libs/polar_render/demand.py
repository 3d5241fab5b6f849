"""Tool calls that a harness demands (`tool_choice`): the grammar that forces them, and how its output is read.

A demanded answer is a JSON list of `{"name": …, "arguments": …}`, whatever the model's own markup is: that much every
engine with guided decoding can force. The ids stay what was sampled; the proxy reads calls from them when it captures,
and whoever parses a recorded sample again does the same (`CompletionCaptured.tool_choice_by == "engine"`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

from .messages import Json, Part, Text, Thinking, ToolCall, ToolSpec
from .parsing import custom_input
from .shape import tool_names, wire_name

__all__ = ["calls_form", "demanded_calls"]

_ARGUMENTS = re.compile(r'\s*\{\s*"name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"arguments"\s*:\s*')
_FREE: dict[str, Json] = {
    "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False,
}  # fmt: skip


def calls_form(tools: Iterable[ToolSpec], *, most: int | None = None) -> dict[str, Json]:
    """The constraint "at least one call of one of `tools`", as `ChatRequest.response_format` has it. `most`: calls."""
    definitions: dict[str, Json] = {}
    choices: list[Json] = []
    for tool in tools:
        schema = dict(_FREE if tool.custom else tool.parameters or {"type": "object"})
        # References are written from the root.
        if isinstance(found := schema.pop("$defs", None), dict):
            definitions |= found
        name: dict[str, Json] = {"type": "string", "enum": [wire_name(tool.name, tool.namespace)]}
        properties: dict[str, Json] = {"name": name, "arguments": schema}
        choices.append(
            {"type": "object", "properties": properties, "required": ["name", "arguments"],
             "additionalProperties": False}
        )  # fmt: skip
    root: dict[str, Json] = {"type": "array", "minItems": 1, "items": {"anyOf": choices}}
    if most is not None:
        root["maxItems"] = most
    if definitions:
        root["$defs"] = definitions
    return {"type": "json_schema", "json_schema": {"name": "calls", "schema": root}}


def demanded_calls(parts: Sequence[Part], tools: Iterable[ToolSpec]) -> tuple[Part, ...]:
    """The answer's parts with its JSON list read as calls, argument bytes as sampled.

    A list that was cut off stays what the parser made of it. A template that opens a thought leaves the list in there.
    """
    for kind in (Text, Thinking):
        text = "".join(p.text for p in parts if isinstance(p, kind))
        calls = _calls(text, tools) if text else None
        if calls is not None:
            return (*(p for p in parts if not isinstance(p, kind)), *calls)
    return tuple(parts)


def _calls(text: str, tools: Iterable[ToolSpec]) -> list[ToolCall] | None:
    known, decoder = tool_names(tools), json.JSONDecoder()
    at, found = text.find("["), list[ToolCall]()
    if at < 0 or text[:at].strip():
        return None
    at += 1
    while (begun := _ARGUMENTS.match(text, at)) is not None:
        try:
            value, end = decoder.raw_decode(text, text.index("{", at))
            _, stop = decoder.raw_decode(text, begun.end())
        except ValueError:
            return None
        found.append(_call(str(cast(dict[str, object], value)["name"]), text[begun.end() : stop], known))
        at = end
        while at < len(text) and text[at] in ", \n\r\t":
            at += 1
    return found if found and text[at : at + 1] == "]" else None


def _call(name: str, arguments: str, known: dict[str, ToolSpec]) -> ToolCall:
    tool = known.get(name)
    if tool is None:
        return ToolCall("", name, arguments)
    call = ToolCall("", tool.name, arguments, tool.namespace, tool.custom)
    raw = custom_input(arguments) if tool.custom else None
    return call if raw is None else replace(call, arguments=raw)
