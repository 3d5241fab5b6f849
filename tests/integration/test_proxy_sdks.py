"""The official SDKs on a whole proxy: every endpoint, streamed and not; what they read is what the engine sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from google import genai
from google.genai import types
from proxy_engine import Say
from proxy_kit import SECRET, Kit

from polar_common.events import CompletionCaptured
from polar_common.keys import sign

pytestmark = pytest.mark.nats

THOUGHT, TEXT = "Let me see.", 'Looking at "it".'
ARGUMENTS = ('{"command":  "ls"}', '{"command": "pwd"}')
_CALLS = "".join(f'\n<tool_call>\n{{"name": "bash", "arguments": {a}}}\n</tool_call>' for a in ARGUMENTS)
SAID = f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}{_CALLS}"
SCHEMA: Any = {"type": "object", "properties": {"command": {"type": "string"}}}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]
MESSAGES: Any = [{"role": "user", "content": "Go"}]


@dataclass
class Read:
    """What an SDK made of an answer. `calls`: parsed arguments. `tokens`: prompt, all that was sampled."""

    thinking: str
    text: str
    calls: list[Any]
    finish: str
    tokens: tuple[int, int]


def _chat(base: str, key: str, stream: bool) -> Read:
    with openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0) as client:
        if stream:
            options: Any = {"include_usage": True}
            with client.chat.completions.stream(
                model="m", messages=MESSAGES, tools=CHAT_TOOLS, stream_options=options
            ) as events:
                thinking = "".join(
                    e.chunk.choices[0].delta.model_dump().get("reasoning_content") or ""
                    for e in events
                    if e.type == "chunk" and e.chunk.choices
                )
                answer: Any = events.get_final_completion()
        else:
            answer = client.chat.completions.create(model="m", messages=MESSAGES, tools=CHAT_TOOLS)
            thinking = answer.choices[0].message.reasoning_content
    message, usage = answer.choices[0].message, answer.usage
    raw = [c.function.arguments for c in message.tool_calls]
    assert tuple(raw) == ARGUMENTS
    tokens = (usage.prompt_tokens, usage.completion_tokens)
    return Read(thinking, message.content, [json.loads(a) for a in raw], answer.choices[0].finish_reason, tokens)


def _responses(base: str, key: str, stream: bool) -> Read:
    tools: Any = [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}]
    with openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0) as client:
        if stream:
            with client.responses.stream(model="m", input="Go", tools=tools) as events:
                for _ in events:
                    pass
                answer: Any = events.get_final_response()
        else:
            answer = client.responses.create(model="m", input="Go", tools=tools)
    thoughts = [i for i in answer.output if i.type == "reasoning"]
    calls = [i for i in answer.output if i.type == "function_call"]
    assert tuple(c.arguments for c in calls) == ARGUMENTS
    said = "".join(p.text for t in thoughts for p in (t.content or t.summary))
    tokens = (answer.usage.input_tokens, answer.usage.output_tokens)
    return Read(said, answer.output_text, [json.loads(c.arguments) for c in calls], answer.status, tokens)


def _anthropic(base: str, key: str, stream: bool) -> Read:
    told: Any = {
        "model": "m", "max_tokens": 500, "messages": MESSAGES, "tools": [{"name": "bash", "input_schema": SCHEMA}]
    }  # fmt: skip
    with anthropic.Anthropic(base_url=base, api_key=key, max_retries=0) as client:
        if stream:
            with client.messages.stream(**told) as events:
                for _ in events:
                    pass
                answer: Any = events.get_final_message()
        else:
            answer = client.messages.create(**told)
    by = {kind: [b for b in answer.content if b.type == kind] for kind in ("thinking", "text", "tool_use")}
    usage = answer.usage
    tokens = (usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens)
    return Read(
        by["thinking"][0].thinking, by["text"][0].text, [b.input for b in by["tool_use"]], answer.stop_reason, tokens
    )


def _google(base: str, key: str, stream: bool) -> Read:
    client = genai.Client(api_key=key, http_options=types.HttpOptions(base_url=base))
    declared = types.FunctionDeclaration(name="bash", parameters_json_schema=SCHEMA)
    config = types.GenerateContentConfig(
        thinking_config=types.ThinkingConfig(include_thoughts=True),
        tools=[types.Tool(function_declarations=[declared])],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )
    if stream:
        chunks: list[Any] = list(client.models.generate_content_stream(model="m", contents="Go", config=config))
    else:
        chunks = [client.models.generate_content(model="m", contents="Go", config=config)]
    client.close()
    parts = [p for c in chunks for p in c.candidates[0].content.parts or []]
    usage, finish = chunks[-1].usage_metadata, chunks[-1].candidates[0].finish_reason
    return Read(
        "".join(p.text for p in parts if p.thought),
        "".join(p.text for p in parts if p.text and not p.thought),
        [p.function_call.args for p in parts if p.function_call],
        finish.name,
        (usage.prompt_token_count, usage.candidates_token_count + (usage.thoughts_token_count or 0)),
    )


CLIENTS: dict[str, tuple[Callable[[str, str, bool], Read], str]] = {
    "openai_chat": (_chat, "tool_calls"),
    "openai_responses": (_responses, "completed"),
    "anthropic": (_anthropic, "tool_use"),
    "google": (_google, "STOP"),
}


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_sdk_reads_is_what_was_sampled(proxy: Kit, name: str, stream: bool) -> None:
    read, finish = CLIENTS[name]
    proxy.engine.say(Say(SAID, seed=7, chunk=1))
    told = await asyncio.to_thread(read, proxy.base(), sign(proxy.key, SECRET.encode()), stream)
    (item,) = await proxy.agrees()
    wanted = [json.loads(a) for a in ARGUMENTS]
    assert told == Read(THOUGHT, TEXT, wanted, finish, (len(item.prompt), len(item.sampled)))
    assert item.event.dialect == name and item.event.stream is stream and item.event.untrainable == ""


async def test_listings_and_counts_are_read_by_their_sdks_and_recorded_nowhere(proxy: Kit) -> None:
    base, key = proxy.base(), sign(proxy.key, SECRET.encode())

    def ask() -> tuple[list[list[str]], list[int]]:
        with (
            openai.OpenAI(base_url=f"{base}/v1", api_key=key) as one,
            anthropic.Anthropic(base_url=base, api_key=key) as two,
        ):
            three = genai.Client(api_key=key, http_options=types.HttpOptions(base_url=base))
            listed = [[m.id for m in one.models.list()], [m.id for m in two.models.list()]]
            listed.append([str(m.name) for m in three.models.list()])
            counts = [two.messages.count_tokens(model="m", messages=MESSAGES).input_tokens]
            counts.append(three.models.count_tokens(model="m", contents="Go").total_tokens or 0)
            three.close()
        return listed, counts

    listed, counts = await asyncio.to_thread(ask)
    assert all(any(name.endswith("policy") for name in names) for names in listed), listed
    await proxy.told([{"role": "user", "content": "Go"}])
    (event,) = await proxy.of(CompletionCaptured)
    assert isinstance(event, CompletionCaptured)
    assert counts == [event.prompt.length] * 2
