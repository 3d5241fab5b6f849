"""Whose call a request is: the session's own agent, or a sub-agent, by the harness's word or by the task it was given.

Claude Code, Codex and opencode name their sub-agents in headers; Qwen Code and Gemini CLI don't. All of them start one
by a tool call, whose prompt argument is then the sub-agent's first message. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import orjson

from polar_common.events.completion_captured import ChainClass
from polar_proxy.dialects.base import ChatRequest
from polar_render.messages import Message, Text, ToolCall

from .nodes import Node, SessionIndex

__all__ = ["MAIN", "attributed", "spawner"]

MAIN = "main"
"""What a sub-agent's `parent_agent` is where the session's own agent has no name."""
_KINDS = ("subagent_type", "agent_type", "agent_name")
"""Claude Code, Qwen Code and opencode; Codex; Gemini CLI."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
_SHORTEST = 8
"""Tasks shorter than this could be any argument of any tool."""


def spawner(index: SessionIndex, messages: Sequence[Message]) -> tuple[Node, ToolCall] | None:
    """The latest tool call that has just this conversation's task as an argument. None for one that is under way."""
    if any(m.role == "assistant" for m in messages):
        return None
    asked = {p.text.strip() for m in messages if m.role == "user" for p in m.parts if isinstance(p, Text)}
    for node in reversed(list(index.nodes.values())):
        for call in node.answer.tool_calls:
            if any(text in asked for text in _texts(call)):
                return node, call
    return None


def _arguments(call: ToolCall) -> dict[str, str]:
    """The call's arguments that are texts."""
    try:
        arguments = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        return {}
    items = arguments.items() if isinstance(arguments, dict) else ()
    return {k: v.strip() for k, v in items if isinstance(v, str)}


def _texts(call: ToolCall) -> list[str]:
    return [t for t in _arguments(call).values() if len(t) >= _SHORTEST]


def _role(call: ToolCall) -> str:
    """The kind of agent that the call starts, "" where it names none."""
    arguments = _arguments(call)
    named = next((arguments[k] for k in _KINDS if k in arguments), "")
    return named if _NAME.fullmatch(named) and named != MAIN else ""


def attributed(
    index: SessionIndex, request: ChatRequest, parent: Node | None, chain: ChainClass
) -> tuple[ChatRequest, str]:
    """The request with its agent and that one's role and parent, named as far as they're known, and the completion that
    started the agent with this call, or "". A sub-agent without a name is named by the tool call that started it."""
    hints, by = request.hints, ""
    agent, above, role = hints.agent, hints.parent_agent, ""
    if parent is not None:
        agent, above, role = agent or parent.agent, above or parent.parent_agent, parent.agent_role
    elif chain in ("subagent", "native"):
        if (found := spawner(index, request.messages)) is not None:
            node, call = found
            agent, above, by = agent or call.id, above or node.agent or MAIN, node.completion
            role = _role(call)
        elif chain == "subagent":
            above = above or MAIN
    if (agent, above, role) == (hints.agent, hints.parent_agent, ""):
        return request, by
    return replace(request, hints=replace(hints, agent=agent, parent_agent=above, agent_role=role)), by
