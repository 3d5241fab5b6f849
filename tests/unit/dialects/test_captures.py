"""What real harnesses sent is all understood; what isn't told to the engine is on a list, with its reason."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import orjson
import pytest

from captures_kit import Capture, captures
from polar_common.errors import RequestError
from polar_proxy.dialects import route
from polar_proxy.dialects.anthropic.request import NOT_FORWARDED as ANTHROPIC
from polar_proxy.dialects.base import ChatRequest
from polar_proxy.dialects.google.request import NOT_FORWARDED as GOOGLE
from polar_proxy.dialects.openai_chat.request import NOT_FORWARDED as CHAT
from polar_proxy.dialects.openai_responses.request import NOT_FORWARDED as RESPONSES

LISTED = {"anthropic": ANTHROPIC, "google": GOOGLE, "openai_chat": CHAT, "openai_responses": RESPONSES}

# Leaving these out changes nothing, because they say what is so anyway.
DEFAULTS = {
    "anthropic": {
        "messages[*].content[*].is_error": "false, as without it",
        "context_management": "an edit that keeps everything, as without it",
    },
    "openai_chat": {
        "tool_choice": "auto, as without it",
        "messages[*].tool_calls[*].type": "function, as without it",
        "tools[*].type": "function, as without it",
    },
    "openai_responses": {
        "tool_choice": "auto, as without it",
        "include[*]": "reasoning is always given in a form that can be sent back",
        "include": "reasoning is always given in a form that can be sent back",
        "reasoning": "summary alone: thoughts are shown whole",
        "reasoning.summary": "thoughts are shown whole",
        "input[*].type": "message, as without it",
        "input[*].status": "completed, as without it",
        "tools[*].external_web_access": "of a hosted tool, which as a whole is on record",
        "tools[*].tools[*].strict": "on record as of all tools",
        "client_metadata": "who calls, which the headers say too",
    },
    "google": {
        "contents[*].role": "user, as without it",
        "contents[*].parts[*].functionResponse.id": "paired by name where it has none",
        "systemInstruction.role": "its place says it",
    },
}  # fmt: skip

_GENERATE = [c for c in captures() if route(c.method, c.path, c.params, c.headers)[1].kind == "generate"]


def parsed(capture: Capture, body: Any) -> ChatRequest:
    dialect, found = route(capture.method, capture.path, capture.params, capture.headers)
    return dialect.parse(found, capture.headers, orjson.dumps(body))


def _places(node: Any, path: str = "") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(path with `[*]`, keys) of everything in a body; schemas and arguments are values of their own."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        at = f"{path}[*]" if isinstance(key, int) else f"{path}.{key}".lstrip(".")
        if value not in (None, [], {}, ""):
            yield at, (key,)
        opaque = re.search(r"(input_schema|parameters\w*|\.args|\.input|\.response|_metadata|\.schema)$", at)
        if isinstance(value, dict | list) and not opaque:
            for inner, keys in _places(value, at):
                yield inner, (key, *keys)


def _without(body: Any, keys: tuple[Any, ...]) -> Any:
    out = copy.deepcopy(body)
    holder = out
    for key in keys[:-1]:
        holder = holder[key]
    del holder[keys[-1]]
    return out


def test_the_captures_are_those_of_every_harness() -> None:
    assert {c.harness for c in captures()} == {
        "aider", "claude", "codex", "gemini", "lmeval", "mini", "opencode", "pi", "qwen", "sdk"
    }  # fmt: skip
    assert len(_GENERATE) > 110


@pytest.mark.parametrize("capture", _GENERATE, ids=lambda c: c.label)
def test_what_is_dropped_is_listed_with_its_reason(capture: Capture) -> None:
    request = parsed(capture, capture.body)
    assert set(request.dropped) <= LISTED[request.dialect].keys()
    assert request.messages


@pytest.mark.parametrize("harness", sorted({c.harness for c in captures()}))
def test_nothing_is_left_out_in_silence(harness: str) -> None:
    """Taking any field away changes what the engine is told, is refused, or was on record as dropped."""
    silent: set[tuple[str, str]] = set()
    for capture in (c for c in _GENERATE if c.harness == harness):
        whole = parsed(capture, capture.body)
        for path, keys in _once(capture.body):
            try:
                less = parsed(capture, _without(capture.body, keys))
            except RequestError:
                continue
            if _told(less) == _told(whole) and less.dropped == whole.dropped and not _recorded(path, whole):
                silent.add((whole.dialect, path))
    assert not silent


def _once(body: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """One place of each path."""
    return list(dict(_places(body)).items())


def _recorded(path: str, request: ChatRequest) -> bool:
    known = {*request.dropped, *DEFAULTS[request.dialect]}
    return any(path == one or path.startswith(f"{one}.") for one in known)


def _told(request: ChatRequest) -> ChatRequest:
    return replace(request, raw_hash="", dropped=())
