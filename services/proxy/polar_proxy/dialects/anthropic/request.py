"""Anthropic Messages requests: bytes in, `ChatRequest` out. Content blocks are read in `blocks.py`."""

from __future__ import annotations

from collections.abc import Mapping

from polar_proxy.dialects import fields as f
from polar_proxy.dialects.anthropic.blocks import Blocks
from polar_proxy.dialects.base import ChatRequest, Hints, Sampling
from polar_proxy.dialects.hints import hints_from
from polar_proxy.dialects.openai_chat.request import json_schema_format
from polar_render.billing import split_billing
from polar_render.messages import Message, Text, ToolSpec

__all__ = ["HONOURED", "NOT_FORWARDED", "parse"]

# What a request may say and the engine or the proxy acts on.
HONOURED = f.keys(
    "model messages system max_tokens stop_sequences stream temperature top_p top_k tools tool_choice thinking "
    "context_management output_config output_format"
)

# What harnesses send and no engine could use, with the reason. Recorded in `dropped` like every unknown field.
NOT_FORWARDED = {
    "metadata": "the caller's own bookkeeping",
    "service_tier": "there is one tier",
    "container": "there is no hosted code execution",
    "mcp_servers": "there are no hosted tools",
    "inference_geo": "there is one place",
    "speed": "there is one speed",
    "thinking.display": "thinking is always sent with its text, so that an echo carries it",
    "system[*].cache_control": "the engine keeps its own cache",
    "messages[*].content[*].cache_control": "the engine keeps its own cache",
    "tools[*].cache_control": "the engine keeps its own cache",
    "tools[?name=='DeferredToolPlaceholder']": "it stands for tools that are named later, in the messages",
    "tools[*].eager_input_streaming": "arguments are sent once they are known to be an object",
}

_TOOL = f.keys("type name description input_schema defer_loading")
_CLIENT_TOOLS = ("bash_", "text_editor_", "computer_", "memory_")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _strip_billing(text: str, billing: list[str]) -> str:
    """The text without the billing line at its very start; a mention elsewhere is the harness's own text."""
    line, rest = split_billing(text)
    if line:
        billing.append(line)
    return rest


def _system(body: f.Obj, blocks: Blocks, billing: list[str]) -> list[Message]:
    system = body.get("system")
    if system is None:
        return []
    if type(system) is str:
        texts = [system]
    elif type(system) is list:
        read = [blocks.visible(b, f"system[{i}]", "system[*]") for i, b in enumerate(f.objects(body, "system"))]
        texts = [part.text if isinstance(part, Text) else "" for part in read]
        for index, part in enumerate(read):
            if not isinstance(part, Text):
                raise f.bad(f"system[{index}].type", "must be text")
    else:
        raise f.bad("system", "must be a string or an array of text blocks")
    kept = [Text(rest) for text in texts if (rest := _strip_billing(text, billing)) or rest == text]
    return [Message("system", tuple(kept))] if kept else []


def _tools(body: f.Obj, references: set[str], seen: f.Seen) -> tuple[ToolSpec, ...]:
    out = []
    for index, tool in enumerate(f.objects(body, "tools")):
        path = f"tools[{index}]"
        kind, name = f.text_or_none(tool, "type", path) or "custom", f.text_or_none(tool, "name", path) or ""
        if kind.startswith(_CLIENT_TOOLS):
            raise f.bad(f"{path}.type", f"{kind!r} has no schema that this model could be shown; define a custom tool")
        if kind != "custom":
            seen.add(f"tools[?type=='{kind[:64]}']")
            continue
        seen.extra(tool, _TOOL, "tools[*]")
        schema = f.table(tool, "input_schema", path)
        if schema is None:
            raise f.bad(f"{path}.input_schema", "is required")
        spec = ToolSpec(f.text(tool, "name", path), f.text_or_none(tool, "description", path) or "", schema)
        if f.flag(tool, "defer_loading", path) and name not in references:
            seen.add(f"tools[?name=='{name[:64]}']")
        else:
            out.append(spec)
    return tuple(out)


def _tool_choice(body: f.Obj) -> tuple[str | f.Obj, bool | None]:
    choice = f.table(body, "tool_choice")
    if choice is None:
        return "auto", None
    serial = f.flag(choice, "disable_parallel_tool_use", "tool_choice")
    parallel = None if serial is None else not serial
    kind = f.text(choice, "type", "tool_choice")
    if kind == "tool":
        return {"name": f.text(choice, "name", "tool_choice")}, parallel
    if kind not in _CHOICES:
        raise f.bad("tool_choice.type", f"unknown choice {kind!r}")
    return _CHOICES[kind], parallel


def _thinking(body: f.Obj, config: f.Obj, seen: f.Seen) -> f.Obj | None:
    asked = f.table(body, "thinking")
    effort = f.text_or_none(config, "effort", "output_config")
    out: f.Obj = {}
    if asked is not None:
        kind = f.text(asked, "type", "thinking")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise f.bad("thinking.type", f"unknown type {kind!r}")
        seen.extra(asked, f.keys("type budget_tokens"), "thinking")
        out["enabled"] = kind != "disabled"
        budget = f.integer_or_none(asked, "budget_tokens", "thinking")
        if budget is not None:
            out["budget"] = budget
    if effort:
        out["effort"] = effort
    return out or None


def _format(body: f.Obj, config: f.Obj) -> f.Obj | None:
    wanted, path = f.table(config, "format", "output_config"), "output_config.format"
    if wanted is None:
        wanted, path = f.table(body, "output_format"), "output_format"
    if wanted is None:
        return None
    kind = f.text(wanted, "type", path)
    if kind != "json_schema":
        raise f.bad(f"{path}.type", f"unknown format {kind!r}")
    schema = f.table(wanted, "schema", path)
    if schema is None:
        raise f.bad(f"{path}.schema", "is required")
    return json_schema_format(schema)


def _edits(body: f.Obj, seen: f.Seen) -> tuple[str, ...]:
    """Edits that remove something; `keep: all` removes nothing."""
    management = f.table(body, "context_management") or {}
    seen.extra(management, frozenset(("edits",)), "context_management")
    edits = []
    for index, edit in enumerate(f.objects(management, "edits", "context_management")):
        f.text(edit, "type", f"context_management.edits[{index}]")
        if edit.get("keep") != "all":
            edits.append(f.compact(edit))
    return tuple(edits)


def _sampling(body: f.Obj, counting: bool) -> Sampling:
    limit = f.integer_or_none(body, "max_tokens", low=1) if counting else f.integer(body, "max_tokens", low=1)
    return Sampling(
        max_tokens=limit,
        temperature=f.number(body, "temperature", low=0, high=2),
        top_p=f.number(body, "top_p", low=0, high=1),
        top_k=f.integer_or_none(body, "top_k", low=-1),
        stop=f.strings(body, "stop_sequences"),
    )


def _hints(headers: Mapping[str, str], billing: list[str], edits: tuple[str, ...]) -> Hints:
    child = any("cc_is_subagent=true" in line for line in billing)
    return hints_from(headers, agent="subagent" if child else "", context_edits=edits)


def parse(headers: Mapping[str, str], raw: bytes, *, counting: bool = False) -> ChatRequest:
    """Raises RequestError with the offending path. `counting`: a token count, which needs no `max_tokens`."""
    body, seen = f.load(raw), f.Seen()
    model, blocks, billing = f.text(body, "model"), Blocks(seen), list[str]()
    system = _system(body, blocks, billing)
    turns = [
        turn
        for index, message in enumerate(f.objects(body, "messages"))
        for turn in blocks.messages(message, f"messages[{index}]")
    ]
    if not turns:
        raise f.bad("messages", "is required and must hold at least one message")
    messages = tuple(system + turns)
    tools = _tools(body, blocks.references, seen)
    sampling, (choice, parallel) = _sampling(body, counting), _tool_choice(body)
    config = f.table(body, "output_config") or {}
    seen.extra(config, f.keys("effort format"), "output_config")
    thinking, form, edits = _thinking(body, config, seen), _format(body, config), _edits(body, seen)
    seen.extra(body, HONOURED)
    prefill = messages[-1].role == "assistant" and not messages[-1].tool_calls
    return ChatRequest(
        dialect="anthropic",
        model=model,
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=form,
        sampling=sampling,
        stream=bool(f.flag(body, "stream")),
        thinking=thinking,
        hints=_hints(headers, billing, edits),
        prefill=prefill,
        billing=tuple(billing),
        dropped=seen.paths(),
        raw_hash=f.fingerprint(model, messages, tools, choice, parallel, form, sampling, thinking, edits, prefill),
    )
