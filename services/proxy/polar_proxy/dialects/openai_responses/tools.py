"""Tools in Responses requests: functions, freeform tools, and namespaces of both."""

from __future__ import annotations

from polar_proxy.dialects import fields as f
from polar_render.messages import ToolSpec

__all__ = ["tool_choice", "tool_specs"]

_FUNCTION = f.keys("type name description parameters")
_CUSTOM = f.keys("type name description format")
_FORMAT = f.keys("type syntax definition")
_MODES = ("auto", "none", "required")


def tool_specs(holder: f.Obj, seen: f.Seen, path: str = "") -> list[ToolSpec]:
    """The specs in `holder["tools"]`. Hosted tools (web search, …) don't exist here and are noted as dropped."""
    out: list[ToolSpec] = []
    where = f"{path}.tools" if path else "tools"
    for index, tool in enumerate(f.objects(holder, "tools", path)):
        at = f"{where}[{index}]"
        kind = f.text(tool, "type", at)
        if kind == "namespace":
            seen.extra(tool, f.keys("type name tools"), "tools[?type=='namespace']")
            name = f.text(tool, "name", at)
            for inner_index, inner in enumerate(f.objects(tool, "tools", at)):
                out += _one(inner, f"{at}.tools[{inner_index}]", name, seen)
        else:
            out += _one(tool, at, "", seen)
    return out


def _one(tool: f.Obj, path: str, namespace: str, seen: f.Seen) -> list[ToolSpec]:
    kind = f.text(tool, "type", path)
    if kind not in ("function", "custom"):
        seen.add(f"tools[?type=='{kind[:64]}']")
        return []
    name, description = f.text(tool, "name", path), f.text_or_none(tool, "description", path) or ""
    if kind == "function":
        seen.extra(tool, _FUNCTION, "tools[*]")
        return [ToolSpec(name, description, f.table(tool, "parameters", path), namespace)]
    seen.extra(tool, _CUSTOM, "tools[*]")
    form = f.table(tool, "format", path) or {}
    seen.extra(form, _FORMAT, "tools[*].format")
    grammar: f.Obj = {key: form[key] for key in ("syntax", "definition") if key in form}
    return [ToolSpec(name, description, namespace=namespace, custom=True, grammar=grammar or None)]


def tool_choice(body: f.Obj) -> str | f.Obj:
    """`ChatRequest.tool_choice`."""
    choice = body.get("tool_choice")
    if choice is None:
        return "auto"
    if type(choice) is str:
        if choice not in _MODES:
            raise f.bad("tool_choice", f"unknown choice {choice!r}")
        return choice
    if type(choice) is not dict:
        raise f.bad("tool_choice", "must be a string or an object")
    kind = f.text(choice, "type", "tool_choice")
    if kind in ("function", "custom"):
        named: f.Obj = {"name": f.text(choice, "name", "tool_choice")}
        if namespace := f.text_or_none(choice, "namespace", "tool_choice"):
            named["namespace"] = namespace
        return named
    if kind == "allowed_tools":
        allowed = f.objects(choice, "tools", "tool_choice")
        names: list[f.Json] = [f.text(one, "name", f"tool_choice.tools[{i}]") for i, one in enumerate(allowed)]
        return {"mode": f.text_or_none(choice, "mode", "tool_choice") or "auto", "allowed": names}
    raise f.bad("tool_choice.type", f"unknown choice {kind!r}")
