"""Messages in the shape that chat templates and the `renderers` package expect (the OpenAI chat format).

Whatever can't be put into that shape raises RenderError naming the message; nothing is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polar_common.errors import RenderError

from .jinja import TemplateValue
from .loose import exactly
from .messages import Image, Json, Message, Text, ToolCall, ToolSpec

__all__ = ["Shape", "call_names", "prompt_text", "to_chat", "to_tools", "tool_names", "wire_name"]


@dataclass(frozen=True, slots=True)
class Shape:
    """How one model's template wants its messages.

    `raw_arguments`: it prints a call's arguments as a string verbatim (so their bytes survive); otherwise it gets the
    parsed object. `developer`: the role under which it knows developer messages. `reasoning`: its field for thinking.
    `late_system`: the role under which system and developer messages are shown that stand behind other messages; ""
    leaves them as they are.
    """

    raw_arguments: bool = False
    developer: str = "developer"
    reasoning: str = "reasoning_content"
    late_system: str = ""


def wire_name(name: str, namespace: str) -> str:
    """The name under which the model knows a tool."""
    return f"{namespace}.{name}" if namespace else name


def tool_names(tools: Iterable[ToolSpec]) -> dict[str, ToolSpec]:
    """Tools by the names a model may call them: the full one, and the bare one where it is unambiguous."""
    tools = tuple(tools)
    bare: dict[str, list[ToolSpec]] = {}
    for tool in tools:
        bare.setdefault(tool.name, []).append(tool)
    names = {name: same[0] for name, same in bare.items() if len(same) == 1}
    return names | {wire_name(t.name, t.namespace): t for t in tools}


def to_tools(tools: Iterable[ToolSpec]) -> list[dict[str, TemplateValue]] | None:
    """Tool specs as function definitions. A freeform tool becomes a function of one string, `input`."""
    specs: list[dict[str, TemplateValue]] = []
    for tool in tools:
        parameters = tool.parameters or {"type": "object", "properties": {}}
        if tool.custom:
            parameters = {"type": "object", "properties": {"input": _free_input(tool)}, "required": ["input"]}
        function = {
            "name": wire_name(tool.name, tool.namespace),
            "description": tool.description,
            "parameters": parameters,
        }
        specs.append({"type": "function", "function": function})
    return specs or None


def _free_input(tool: ToolSpec) -> dict[str, Json]:
    grammar = tool.grammar or {}
    form: dict[str, Json] = {"type": "string"}
    if definition := grammar.get("definition"):
        form["description"] = f"follows this {grammar.get('syntax', 'grammar')}: {definition}"
    return form


def prompt_text(message: Message, where: str) -> str:
    """All text of a message as it is prompted: blocks of one turn on lines of their own, an answer's joined.

    Raises RenderError on images. A tool's error says so, in its first word.
    """
    if any(isinstance(p, Image) for p in message.parts):
        raise RenderError(f"{where}: this model's template shows no images")
    texts = [p.text for p in message.parts if isinstance(p, Text) and p.text]
    text = ("" if message.role == "assistant" else "\n").join(texts)
    if message.is_error and not text.lower().startswith(("error", "<tool_use_error>")):
        text = f"Error: {text}"
    return text


def call_names(messages: Iterable[Message]) -> dict[str, str]:
    """Tool names by call id."""
    return {c.id: wire_name(c.name, c.namespace) for m in messages for c in m.tool_calls if c.id}


def _arguments(call: ToolCall, raw: bool) -> Json:
    text = call.arguments
    if call.custom:
        return json.dumps({"input": text}, ensure_ascii=False) if raw else {"input": text}
    if not text.strip():
        return "{}" if raw else {}
    if raw:
        return text
    try:
        value = exactly(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _assistant(message: Message, where: str, shape: Shape) -> dict[str, TemplateValue]:
    out: dict[str, TemplateValue] = {"role": "assistant", "content": prompt_text(message, where)}
    if thinking := "".join(t.text for t in message.thinking if not t.redacted):
        out[shape.reasoning] = thinking
    if calls := message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": wire_name(call.name, call.namespace),
                    "arguments": _arguments(call, shape.raw_arguments),
                },
            }
            for call in calls
        ]
    return out


def to_chat(
    messages: Sequence[Message], shape: Shape, names: dict[str, str] | None = None, *, late: bool = False
) -> list[dict[str, TemplateValue]]:
    """Chat dicts, one per message. `names` are tool names by call id, for tool results; `late` says that
    other messages stand before these.

    Raises RenderError naming the message.
    """
    names = call_names(messages) if names is None else names
    chat: list[dict[str, TemplateValue]] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role == "assistant":
            chat.append(_assistant(message, where, shape))
            late = True
            continue
        role = shape.developer if message.role == "developer" else message.role
        if message.role not in ("system", "developer"):
            late = True
        elif late and shape.late_system:
            role = shape.late_system
        entry: dict[str, TemplateValue] = {"role": role, "content": prompt_text(message, where)}
        if message.name:
            entry["name"] = message.name
        if message.role == "tool":
            entry["tool_call_id"] = message.call_id
            if not message.name and (name := names.get(message.call_id, "")):
                entry["name"] = name
        chat.append(entry)
    return chat
