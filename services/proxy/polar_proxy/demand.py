"""What a harness demands of the answer's tool calls (`tool_choice`), and how far the engine can be held to it.

`none` hides the tools. `required` and named tools become a grammar where the engine takes one; where it takes none,
they are recorded as dropped. docs/decisions says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from polar_common.errors import RequestError
from polar_proxy.dialects.base import ChatRequest
from polar_render.demand import calls_form
from polar_render.messages import Json, ToolSpec
from polar_render.shape import wire_name

__all__ = ["NOTHING", "Demand", "demand_of", "without_hidden"]

By = Literal["", "tools_hidden", "engine", "dropped"]


@dataclass(frozen=True, slots=True)
class Demand:
    """`told` as the event records it. `form`: the grammar; `tools`: those that it lets be called."""

    told: str = ""
    by: By = ""
    form: dict[str, Json] | None = None
    tools: tuple[ToolSpec, ...] = ()


NOTHING = Demand()


def without_hidden(request: ChatRequest) -> ChatRequest:
    """`none`: the tools aren't shown, so that none can be called. The list is recorded as dropped."""
    if request.tool_choice != "none" or not request.tools:
        return request
    return replace(request, tools=(), dropped=(*request.dropped, "tools"))


def demand_of(request: ChatRequest, *, guides: bool) -> Demand:
    """Raises RequestError where a tool is demanded that isn't offered, as the providers do."""
    choice = request.tool_choice
    if choice == "auto":
        return NOTHING
    if choice == "none":
        return Demand("none", "tools_hidden") if "tools" in request.dropped else NOTHING
    tools = _demanded(request)
    names = "" if choice == "required" else ":" + ",".join(wire_name(t.name, t.namespace) for t in tools)
    if isinstance(choice, dict) and choice.get("mode") == "auto":
        # A grammar for "text, or one of these calls" would have to know the model's own markup.
        return Demand(f"auto{names}", "dropped")
    if not guides:
        return Demand(f"required{names}", "dropped")
    most = 1 if request.parallel_tool_calls is False else None
    return Demand(f"required{names}", "engine", calls_form(tools, most=most), tools)


def _demanded(request: ChatRequest) -> tuple[ToolSpec, ...]:
    choice, tools = request.tool_choice, request.tools
    if not isinstance(choice, dict):
        found: Sequence[ToolSpec] = tools
    elif (allowed := choice.get("allowed")) is not None:
        wanted = allowed if isinstance(allowed, list) else []
        found = [t for t in tools if t.name in wanted or wire_name(t.name, t.namespace) in wanted]
    else:
        space = choice.get("namespace") or ""
        found = [t for t in tools if (t.name, t.namespace) == (choice.get("name"), space)]
        found = found or [t for t in tools if wire_name(t.name, t.namespace) == choice.get("name")]
    if not found:
        raise RequestError("demands a tool that isn't among the tools", path="tool_choice")
    return tuple(found)
