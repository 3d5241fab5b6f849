"""The official OpenAI client as an oracle: what it reads is what was said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from dialect_cases import SHELL_SCHEMA
from dialect_server import DialectServer

from polar_common.errors import EngineBusy, EngineDown, EngineOverflow, PolarError, RequestError
from polar_render.messages import Text, Thinking, ToolCall

ARGUMENTS = ('{"command":  "ls"}', '{"command": "pwd"}')
CALLS = (ToolCall("", "bash", ARGUMENTS[0]), ToolCall("", "bash", ARGUMENTS[1]))
SAID = (Thinking("Let me see."), Text('Looking at "it".'), *CALLS)
TOOLS: Any = [{"type": "function", "function": {"name": "bash", "parameters": SHELL_SCHEMA}}]
MESSAGES: Any = [{"role": "user", "content": "Go"}]


@pytest.fixture
def client(server: DialectServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        yield client


def test_chat_whole(client: openai.OpenAI, server: DialectServer) -> None:
    server.script.parts = SAID
    answer = client.chat.completions.create(model="m", messages=MESSAGES, tools=TOOLS)
    message = answer.choices[0].message
    assert message.content == 'Looking at "it".'
    assert message.reasoning_content == "Let me see."  # type: ignore[attr-defined]
    calls = message.tool_calls or []
    assert [c.id for c in calls] == ["call_c0_0", "call_c0_1"]
    assert tuple(c.function.arguments for c in calls if c.type == "function") == ARGUMENTS
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (11, 7, 18)
    assert answer.id == "chatcmpl-c0"


def test_chat_stream(client: openai.OpenAI, server: DialectServer) -> None:
    server.script.parts = SAID
    with client.chat.completions.stream(
        model="m", messages=MESSAGES, tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "tool_calls.function.arguments.delta"} <= kinds
    message = final.choices[0].message
    assert message.content == 'Looking at "it".'
    assert tuple(c.function.arguments for c in message.tool_calls or []) == ARGUMENTS
    assert [c.id for c in message.tool_calls or []] == ["call_c0_0", "call_c0_1"]
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage is not None
    assert final.usage.total_tokens == 18


def test_chat_usage_only_where_asked(client: openai.OpenAI, server: DialectServer) -> None:
    server.script.parts = [Text("Hello")]
    chunks = list(client.chat.completions.create(model="m", messages=MESSAGES, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello"
    assert [c.choices[0].finish_reason for c in chunks][-1] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_chat_choices_and_logprobs(client: openai.OpenAI, server: DialectServer, stream: bool) -> None:
    server.script.parts = [Text("Hello")]
    server.script.logprobs, server.script.token_texts = (-0.5, float("-inf")), ("Hel", "lo")
    asked: Any = {"model": "m", "messages": MESSAGES, "n": 3, "logprobs": True}
    texts, tokens = {0: "", 1: "", 2: ""}, {0: [], 1: [], 2: []}  # type: ignore[var-annotated]
    if stream:
        for chunk in client.chat.completions.create(stream=True, **asked):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.logprobs:
                    tokens[choice.index] += [(t.token, t.logprob) for t in choice.logprobs.content or []]
    else:
        for whole in client.chat.completions.create(**asked).choices:
            texts[whole.index] = whole.message.content or ""
            assert whole.logprobs is not None
            tokens[whole.index] = [(t.token, t.logprob) for t in whole.logprobs.content or []]
    assert set(texts.values()) == {"Hello"}
    assert all(said == [("Hel", -0.5), ("lo", -9999.0)] for said in tokens.values())


def test_chat_freeform_tool(client: openai.OpenAI, server: DialectServer) -> None:
    server.script.parts = [ToolCall("", "apply_patch", "*** Begin\n+x", custom=True)]
    tools: Any = [{"type": "custom", "custom": {"name": "apply_patch", "format": {"type": "text"}}}]
    answer = client.chat.completions.create(model="m", messages=MESSAGES, tools=tools)
    call = (answer.choices[0].message.tool_calls or [])[0]
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("apply_patch", "*** Begin\n+x")
    assert server.script.requests[0].tools[0].custom


def test_responses_whole(client: openai.OpenAI, server: DialectServer) -> None:
    server.script.parts = SAID
    answer = client.responses.create(model="m", input="Go")
    assert answer.output_text == 'Looking at "it".'
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    calls = [item for item in answer.output if item.type == "function_call"]
    assert tuple(c.arguments for c in calls) == ARGUMENTS
    thought = answer.output[0]
    assert thought.type == "reasoning"
    assert thought.summary[0].text == "Let me see."
    assert thought.encrypted_content == "polar.c0.0"
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 4
    assert answer.status == "completed"


def test_responses_stream(client: openai.OpenAI, server: DialectServer) -> None:
    server.script.parts = SAID
    said = {"response.output_text.delta": "", "response.reasoning_summary_text.delta": ""}
    with client.responses.stream(model="m", input="Go") as stream:
        for event in stream:
            if event.type in said:
                said[event.type] += event.delta
        final = stream.get_final_response()
    assert list(said.values()) == ['Looking at "it".', "Let me see."]
    calls = [item for item in final.output if item.type == "function_call"]
    assert tuple(c.arguments for c in calls) == ARGUMENTS
    assert [c.call_id for c in calls] == ["call_c0_0", "call_c0_1"]
    assert final.output_text == 'Looking at "it".'
    assert final.usage is not None
    assert final.usage.total_tokens == 18


def test_responses_cut_by_length_is_incomplete(client: openai.OpenAI, server: DialectServer) -> None:
    server.script.parts, server.script.finish = [Text("Half a")], "length"
    whole = client.responses.create(model="m", input="Go")
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(model="m", input="Go", stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == "Half a"


def test_responses_freeform_tool_in_a_namespace(client: openai.OpenAI, server: DialectServer) -> None:
    server.script.parts = [ToolCall("", "exec", "text('hi')", "functions", True)]
    for stream in (False, True):
        got: Any = client.responses.create(model="m", input="Go", stream=stream)
        output = list(got)[-1].response.output if stream else got.output
        assert (output[0].type, output[0].name, output[0].input) == ("custom_tool_call", "exec", "text('hi')")
        assert output[0].namespace == "functions"


def test_responses_echo_continues(client: openai.OpenAI, server: DialectServer) -> None:
    server.script.parts = SAID
    first = client.responses.create(model="m", input="Go")
    results: Any = [
        {"type": "function_call_output", "call_id": f"call_c0_{i}", "output": f"result {i}"} for i in range(2)
    ]
    items: Any = [{"role": "user", "content": "Go"}, *[i.model_dump() for i in first.output], *results]
    client.responses.create(model="m", input=items)
    user, assistant, *tools = server.script.requests[-1].messages
    assert user.role == "user"
    assert [type(part) for part in assistant.parts] == [Thinking, Text, ToolCall, ToolCall]
    assert [call.arguments for call in assistant.tool_calls] == list(ARGUMENTS)
    assert [tool.call_id for tool in tools] == ["call_c0_0", "call_c0_1"]


def test_responses_count(client: openai.OpenAI, server: DialectServer) -> None:
    counted = client.responses.input_tokens.count(model="m", input="Go")
    assert counted.input_tokens == 1234
    assert server.script.lines == ["POST /v1/responses/input_tokens openai_responses count_tokens"]


def test_models(client: openai.OpenAI, server: DialectServer) -> None:
    assert [model.id for model in client.models.list()] == ["m", "org/n"]
    assert client.models.retrieve("org/n").id == "org/n"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("error", "raised", "code"),
    [
        (RequestError("bad key", status=401), openai.AuthenticationError, "invalid_api_key"),
        (RequestError("sealed", status=409), openai.ConflictError, "session_sealed"),
        (RequestError("wrong", path="messages[1].role"), openai.BadRequestError, None),
        (RequestError("none", status=404), openai.NotFoundError, "not_found"),
        (EngineBusy("full", 429, 1.0), openai.RateLimitError, "rate_limit_exceeded"),
        (EngineOverflow("too long", 400), openai.BadRequestError, "context_length_exceeded"),
        (EngineDown("gone", 503), openai.InternalServerError, None),
    ],
)
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_errors(
    client: openai.OpenAI, server: DialectServer, api: str, error: PolarError, raised: Any, code: Any
) -> None:
    server.script.error = error
    asked: Any = {"messages": MESSAGES} if api == "chat" else {"input": "Go", "stream": True}
    create: Any = client.chat.completions.create if api == "chat" else client.responses.create
    with pytest.raises(raised) as caught:
        create(model="m", **asked)
    assert caught.value.code == code
    if isinstance(error, RequestError) and error.path:
        assert caught.value.param == error.path


def test_a_broken_chat_stream_raises(client: openai.OpenAI, server: DialectServer) -> None:
    server.script.parts, server.script.breaks = [Text("Hello there")], EngineDown("cut off")
    with pytest.raises(openai.APIError, match="cut off"):
        list(client.chat.completions.create(model="m", messages=MESSAGES, stream=True))


def test_a_broken_responses_stream_fails(client: openai.OpenAI, server: DialectServer) -> None:
    server.script.parts, server.script.breaks = [Text("Hello there")], EngineOverflow("too long")
    last = list(client.responses.create(model="m", input="Go", stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "context_length_exceeded"


def test_malformed_requests_name_the_field(client: openai.OpenAI) -> None:
    bad: Any = [{"role": "user", "content": [{"type": "video"}]}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=bad)
    assert caught.value.param == "messages[0].content[0].type"
    assert json.loads(caught.value.response.text)["error"]["type"] == "invalid_request_error"


def test_retries_are_counted(server: DialectServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=1) as client:
        server.script.error = EngineDown("gone", 500)
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="m", messages=MESSAGES)
    assert len(server.script.lines) == 2
