"""Requests as each known CLI makes them (own wording), and helpers that play the client's side of each protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from polar_proxy.dialects import route
from polar_proxy.dialects.base import ChatRequest, Dialect, Finish, Frame, Minted, Reply, Usage
from polar_render.base import AnswerEvent
from polar_render.messages import Part, Text, Thinking, ToolCall

SHELL_SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "what to run"}},
    "required": ["command"],
}
COMMAND = '{"command": "printf \'hi\\n\' > hello.txt"}'


@dataclass(frozen=True)
class Case:
    """One request line with its body; `dropped` is all that may stay unheard."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()


def function(name: str, **extra: Any) -> dict[str, Any]:
    inner = {"name": name, "description": f"the {name} tool", "parameters": SHELL_SCHEMA, **extra}
    return {"type": "function", "function": inner}


def _chat_history(content: Any = None, **extra: Any) -> list[dict[str, Any]]:
    call = {"id": "call_c1_0", "type": "function", "function": {"name": "bash", "arguments": COMMAND}}
    return [
        {"role": "system", "content": "Help with files."},
        {"role": "user", "content": [{"type": "text", "text": "Write hello.txt"}]},
        {"role": "assistant", "content": content, "tool_calls": [call], **extra},
        {"role": "tool", "tool_call_id": "call_c1_0", "content": "(nothing)"},
    ]


_STAINLESS = {"x-stainless-retry-count": "0"}
_SDK_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_CACHE = {"cache_control": {"type": "ephemeral"}}


def _claude(**extra: Any) -> dict[str, Any]:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=9.9.9.abc; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are an agent.", **_CACHE},
    ]
    use = {"type": "tool_use", "id": "call_c1_0", "name": "Bash", "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": "call_c1_0", "content": "a.txt", "is_error": False, **_CACHE}
    return {
        "model": "m",
        "max_tokens": 32000,
        "system": system,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<reminder>"}, {"type": "text", "text": "Go"}]},
            {"role": "system", "content": "In the middle."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Let me see.", "signature": "polar.c1.0"},
                    {"type": "text", "text": "Looking."},
                    use,
                ],
            },
            {"role": "user", "content": [result]},
        ],
        "tools": [
            {"name": "Bash", "description": "runs", "input_schema": SHELL_SCHEMA},
            {"name": "Later", "description": "hidden", "input_schema": {"type": "object"}, "defer_loading": True},
        ],
        "metadata": {"user_id": '{"session_id":"s"}'},
        "thinking": {"type": "enabled", "budget_tokens": 31999, "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
        **extra,
    }


def _codex(**extra: Any) -> dict[str, Any]:
    function_tool = {"type": "function", "name": "exec_command", "strict": False, "parameters": SHELL_SCHEMA}
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    spawn = {"type": "function", "name": "spawn_agent", "description": "starts one", "parameters": SHELL_SCHEMA}
    return {
        "model": "m",
        "stream": True,
        "input": [
            {
                "type": "message",
                "id": "msg_a",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Rules."}, {"type": "input_text", "text": "More rules."}],
            },
            {"type": "message", "id": "msg_b", "role": "user", "content": [{"type": "input_text", "text": "Go"}]},
            {
                "type": "reasoning",
                "id": "item_c1_0",
                "summary": [{"type": "summary_text", "text": "Hm."}],
                "content": None,
                "encrypted_content": "polar.c1.0",
            },
            {
                "type": "function_call",
                "status": "completed",
                "id": "item_c1_1",
                "name": "exec_command",
                "arguments": COMMAND,
                "call_id": "call_c1_0",
            },
            {"type": "function_call_output", "id": "fco_1", "call_id": "call_c1_0", "output": "done"},
        ],
        "tools": [
            function_tool,
            {
                "type": "custom",
                "name": "apply_patch",
                "format": grammar,
            },
            {"type": "namespace", "name": "agents", "description": "others", "tools": [spawn]},
            {"type": "web_search", "external_web_access": True},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
        "client_metadata": {"thread_id": "thread"},
        **extra,
    }


def _gemini(**extra: Any) -> dict[str, Any]:
    call = {"functionCall": {"id": "call_c1_0", "name": "run", "args": {"command": "ls"}}}
    declared = {"name": "run", "description": "r", "parametersJsonSchema": SHELL_SCHEMA}
    answer = {"functionResponse": {"id": "call_c1_0", "name": "run", "response": {"output": "a.txt"}}}
    return {
        "contents": [
            {"role": "user", "parts": [{"text": "Context."}, {"text": "Go"}]},
            {"role": "model", "parts": [{**call, "thoughtSignature": "skip_thought_signature_validator"}]},
            {"role": "user", "parts": [answer]},
        ],
        "systemInstruction": {"role": "user", "parts": [{"text": "Help."}]},
        "tools": [{"functionDeclarations": [declared]}],
        "generationConfig": {
            "temperature": 1,
            "topP": 0.95,
            "topK": 64,
            "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 8192},
        },
        **extra,
    }


_CHAT = "/v1/chat/completions"
_GOOGLE = "/v1beta/models/m:streamGenerateContent"

CASES: dict[str, Case] = {
    "pi_chat": Case(
        _CHAT,
        {
            "model": "m",
            "messages": _chat_history(reasoning_content="Let me think."),
            "store": False,
            "max_completion_tokens": 16384,
            "tools": [function("bash", strict=False)],
            **_SDK_STREAM,
        },
        _STAINLESS,
        dropped=("tools[*].function.strict",),
    ),
    "qwen": Case(
        _CHAT,
        {"model": "m", "messages": _chat_history(""), "max_tokens": 32000, "tools": [function("bash")], **_SDK_STREAM},
        _STAINLESS,
    ),
    "opencode": Case(
        _CHAT,
        {
            "model": "m",
            "max_tokens": 32000,
            "messages": _chat_history("", reasoning_content="Hm."),
            "tools": [function("bash")],
            "tool_choice": "auto",
            **_SDK_STREAM,
        },
        {"x-session-id": "child", "x-parent-session-id": "mother"},
    ),
    "mini": Case(_CHAT, {"model": "m", "messages": _chat_history(), "tools": [function("bash")]}, _STAINLESS),
    "aider": Case(
        _CHAT,
        {
            "model": "m",
            "messages": [{"role": "system", "content": "Edit."}, {"role": "user", "content": "Do."}],
            "temperature": 0,
            "stream": True,
        },
        _STAINLESS,
    ),
    "lm_eval": Case(
        _CHAT,
        {
            "messages": [{"role": "user", "content": "2+2?"}],
            "model": "m",
            "max_tokens": 64,
            "temperature": 0.0,
            "stop": ["\n\n"],
            "seed": 1234,
        },
    ),
    "claude": Case(
        "/v1/messages",
        _claude(),
        {"anthropic-version": "2023-06-01", "x-api-key": "k", **_STAINLESS},
        {"beta": "true"},
        (
            "messages[*].content[*].cache_control",
            "metadata",
            "system[*].cache_control",
            "thinking.display",
            "tools[?name=='Later']",
        ),
    ),
    "pi_anthropic": Case(
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 16384,
            "stream": True,
            "system": [{"type": "text", "text": "Help.", **_CACHE}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Go"}]}],
            "tools": [{"name": "bash", "input_schema": SHELL_SCHEMA, "eager_input_streaming": True, **_CACHE}],
        },
        {"anthropic-version": "2023-06-01"},
        dropped=("system[*].cache_control", "tools[*].cache_control", "tools[*].eager_input_streaming"),
    ),
    "codex": Case(
        "/v1/responses",
        _codex(),
        {
            "thread-id": "child",
            "session-id": "s",
            "x-codex-parent-thread-id": "mother",
            "x-openai-subagent": "collab_spawn",
            "x-codex-turn-metadata": '{"request_kind":"turn"}',
        },
        dropped=(
            "prompt_cache_key",
            "tools[*].strict",
            "tools[?type=='namespace'].description",
            "tools[?type=='web_search']",
        ),
    ),
    "pi_responses": Case(
        "/v1/responses",
        {
            "model": "m",
            "input": [
                {"role": "system", "content": "Help."},
                {"role": "user", "content": [{"type": "input_text", "text": "Go"}]},
                {"type": "function_call", "id": "item_c1_0", "call_id": "call_c1_0", "name": "b", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "call_c1_0", "output": "(none)"},
            ],
            "stream": True,
            "prompt_cache_key": "k",
            "store": False,
            "max_output_tokens": 16384,
            "tools": [{"type": "function", "name": "b", "parameters": SHELL_SCHEMA, "strict": False}],
        },
        dropped=("prompt_cache_key", "tools[*].strict"),
    ),
    "gemini": Case(
        _GOOGLE,
        _gemini(),
        {"x-goog-api-key": "k"},
        {"alt": "sse"},
        ("contents[*].parts[*].thoughtSignature",),
    ),
    "pi_google": Case(
        _GOOGLE,
        {
            "contents": [
                {"role": "user", "parts": [{"text": "Go"}]},
                {"role": "model", "parts": [{"functionCall": {"name": "b", "args": {"command": "ls"}}}]},
                {"role": "user", "parts": [{"functionResponse": {"name": "b", "response": {"output": "(none)"}}}]},
            ],
            "systemInstruction": {"role": "user", "parts": [{"text": "Help."}]},
            "tools": [{"functionDeclarations": [{"name": "b", "parametersJsonSchema": SHELL_SCHEMA}]}],
            "generationConfig": {"maxOutputTokens": 16384},
        },
        query={"alt": "sse"},
    ),
}


def parse(case: Case, body: bytes | None = None) -> tuple[Dialect, ChatRequest]:
    """The request as its dialect reads it."""
    dialect, found = route("POST", case.path, case.query, case.headers)
    return dialect, dialect.parse(found, case.headers, orjson.dumps(case.body) if body is None else body)


def simple(name: str, **extra: Any) -> tuple[Dialect, ChatRequest]:
    """A minimal request of a dialect, for answers."""
    bodies: dict[str, Case] = {
        "openai_chat": Case(_CHAT, {"model": "m", "messages": [{"role": "user", "content": "Go"}], **extra}),
        "anthropic": Case(
            "/v1/messages", {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "Go"}], **extra}
        ),
        "openai_responses": Case("/v1/responses", {"model": "m", "input": "Go", **extra}),
        "google": Case(
            _GOOGLE,
            {
                "contents": [{"parts": [{"text": "Go"}]}],
                "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
                **extra,
            },
            query={"alt": "sse"},
        ),
    }
    return parse(bodies[name])


NAMES = ("openai_chat", "anthropic", "openai_responses", "google")
MINTED = Minted("c1", 1700000000)
USAGE = Usage(prompt_tokens=11, completion_tokens=7, cached_tokens=0, reasoning_tokens=2)


def reply(*parts: Part, finish: Finish = "stop", minted: Minted = MINTED, **extra: Any) -> Reply:
    """A reply whose tool calls carry the ids that the proxy mints."""
    numbered: list[Part] = []
    calls = 0
    for part in parts:
        if isinstance(part, ToolCall):
            numbered.append(ToolCall(minted.tool_id(calls), part.name, part.arguments, part.namespace, part.custom))
            calls += 1
        else:
            numbered.append(part)
    if calls and finish == "stop":
        finish = "tool_calls"
    return Reply(tuple(numbered), finish, extra.pop("usage", USAGE), minted, **extra)


def call(name: str, arguments: str = COMMAND, **extra: Any) -> ToolCall:
    return ToolCall("", name, arguments, **extra)


def stream(dialect: Dialect, request: ChatRequest, events: Sequence[AnswerEvent], answer: Reply) -> list[Frame]:
    """All frames of a one-choice answer."""
    encoder = dialect.encoder(request, [answer.minted])
    frames = encoder.start(Usage(prompt_tokens=answer.usage.prompt_tokens))
    for event in events:
        frames += encoder.feed(event)
    return frames + encoder.finish(answer) + encoder.end(answer.usage)


def sse(frames: Sequence[Frame]) -> list[tuple[str, Any]]:
    """(event name, data) of each server-sent event."""
    out: list[tuple[str, Any]] = []
    text = b"".join(frame.data for frame in frames).decode().replace("\r\n", "\n")
    for block in text.split("\n\n"):
        name, data = "", ""
        for line in block.split("\n"):
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data = line[6:]
        if data:
            out.append((name, data if data == "[DONE]" else orjson.loads(data)))
    return out


def plain(part: Part) -> tuple[str, ...]:
    """A part without what no client echoes."""
    if isinstance(part, Text):
        return ("text", part.text)
    if isinstance(part, Thinking):
        return ("thinking", part.text)
    assert isinstance(part, ToolCall)
    return ("call", part.id, part.namespace, part.name, part.arguments, str(part.custom))
