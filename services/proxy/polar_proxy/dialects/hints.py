"""What request headers reveal about the caller: which agent, whose child, the how-manieth try.

Only known harness headers are read. A header that can't be parsed is no reason to refuse a request.
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from .base import Hints

__all__ = ["hints_from"]

_AGENT = ("x-claude-code-agent-id", "thread-id", "x-session-id", "session_id", "conversation_id")
_PARENT = ("x-codex-parent-thread-id", "x-parent-session-id")


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    for name in names:
        if value := headers.get(name):
            return value
    return ""


def _turn_metadata(raw: str) -> dict[str, object]:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def hints_from(
    headers: Mapping[str, str],
    *,
    agent: str = "",
    previous_response: str = "",
    context_edits: tuple[str, ...] = (),
    turn_metadata: str = "",
) -> Hints:
    """Hints from headers (lower-case names); the keyword arguments are what a dialect found in the body."""
    raw = headers.get("x-codex-turn-metadata") or turn_metadata
    meta = _turn_metadata(raw) if raw else {}
    told = meta.get("request_kind")
    kind = told if isinstance(told, str) else ""
    if kind in ("", "turn"):
        kind = headers.get("x-openai-subagent") or kind
    parent = _first(headers, _PARENT) or meta.get("parent_thread_id")
    tries = headers.get("x-stainless-retry-count", "0")
    return Hints(
        agent=_first(headers, _AGENT) or agent,
        parent_agent=parent if isinstance(parent, str) else "",
        retry=int(tries) if tries.isascii() and tries.isdigit() and len(tries) < 6 else 0,
        previous_response=previous_response,
        request_kind=kind,
        context_edits=context_edits,
        keeps_broken_calls=headers.get("user-agent", "").startswith("opencode/"),
        errors_in_stream=headers.get("originator", "").startswith("codex"),
    )
