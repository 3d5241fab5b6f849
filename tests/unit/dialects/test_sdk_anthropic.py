"""The official Anthropic client as an oracle: what it reads is what was said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from dialect_cases import SHELL_SCHEMA
from dialect_server import DialectServer

from polar_common.errors import EngineBusy, EngineDown, EngineOverflow, PolarError, RequestError
from polar_render.messages import Text, Thinking, ToolCall

CALLS = (ToolCall("", "bash", '{"command":  "ls"}'), ToolCall("", "bash", '{"command": "pwd"}'))
SAID = (Thinking("Let me see."), Text('Looking at "it".'), *CALLS)
MESSAGES: Any = [{"role": "user", "content": "Go"}]
TOOLS: Any = [{"name": "bash", "input_schema": SHELL_SCHEMA}]


@pytest.fixture
def client(server: DialectServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client:
        yield client


def _check(message: Any) -> None:
    thought, text, *calls = message.content
    assert (thought.type, thought.thinking, thought.signature) == ("thinking", "Let me see.", "polar.c0.0")
    assert (text.type, text.text) == ("text", 'Looking at "it".')
    assert [(c.type, c.id, c.input) for c in calls] == [
        ("tool_use", "call_c0_0", {"command": "ls"}),
        ("tool_use", "call_c0_1", {"command": "pwd"}),
    ]
    assert message.stop_reason == "tool_use"
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (7, 4, 7)
    assert message.id == "msg_c0"


def test_whole(client: anthropic.Anthropic, server: DialectServer) -> None:
    server.script.parts = SAID
    _check(client.messages.create(model="m", max_tokens=99, messages=MESSAGES, tools=TOOLS))


def test_stream(client: anthropic.Anthropic, server: DialectServer) -> None:
    server.script.parts = SAID
    with client.messages.stream(model="m", max_tokens=99, messages=MESSAGES, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        _check(stream.get_final_message())
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert {"thinking", "text", "input_json", "signature"} <= set(kinds)


def test_start_tells_the_true_prompt(client: anthropic.Anthropic, server: DialectServer) -> None:
    server.script.parts = [Text("Hi")]
    events: Any = client.messages.create(model="m", max_tokens=9, messages=MESSAGES, stream=True)
    start = next(iter(events))
    assert start.message.usage.input_tokens + start.message.usage.cache_read_input_tokens == 11


@pytest.mark.parametrize("arguments", ['{"command": "ls', "ls -la", '["ls"]'])
def test_arguments_that_are_no_object_reach_the_client_whole(
    client: anthropic.Anthropic, server: DialectServer, arguments: str
) -> None:
    server.script.parts = [ToolCall("", "bash", arguments)]
    whole = client.messages.create(model="m", max_tokens=99, messages=MESSAGES, tools=TOOLS)
    with client.messages.stream(model="m", max_tokens=99, messages=MESSAGES, tools=TOOLS) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        block = message.content[0]
        assert block.type == "tool_use"
        assert block.input == {"_raw": arguments}
    echo: Any = [*MESSAGES, {"role": "assistant", "content": [b.model_dump() for b in streamed.content]}]
    client.messages.create(model="m", max_tokens=99, messages=echo, tools=TOOLS)
    assert server.script.requests[-1].messages[-1].tool_calls[0].arguments == arguments


def test_no_arguments_are_an_empty_object(client: anthropic.Anthropic, server: DialectServer) -> None:
    server.script.parts = [ToolCall("", "now", "")]
    with client.messages.stream(model="m", max_tokens=99, messages=MESSAGES) as stream:
        block = stream.get_final_message().content[0]
    assert block.type == "tool_use"
    assert block.input == {}


def test_stop_sequence_and_length(client: anthropic.Anthropic, server: DialectServer) -> None:
    server.script.parts, server.script.finish = [Text("One")], "stop_string"
    server.script.stop_sequence = "\n\n"
    message = client.messages.create(model="m", max_tokens=99, messages=MESSAGES, stop_sequences=["\n\n"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "\n\n")
    assert server.script.requests[0].sampling.stop == ("\n\n",)
    server.script.finish = "length"
    with client.messages.stream(model="m", max_tokens=99, messages=MESSAGES) as stream:
        assert stream.get_final_message().stop_reason == "max_tokens"


def test_echo_continues(client: anthropic.Anthropic, server: DialectServer) -> None:
    server.script.parts = SAID
    first = client.messages.create(model="m", max_tokens=99, messages=MESSAGES, tools=TOOLS)
    results = [
        {
            "type": "tool_result",
            "tool_use_id": f"call_c0_{i}",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
            ],
            "is_error": i == 1,
        }
        for i in range(2)
    ]
    history: Any = [
        *MESSAGES,
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": results},
    ]
    client.messages.create(model="m", max_tokens=99, messages=history, tools=TOOLS)
    _, assistant, *tools = server.script.requests[-1].messages
    assert assistant.thinking[0].signature == "polar.c0.0"
    assert [tool.is_error for tool in tools] == [False, True]
    assert [type(part).__name__ for part in tools[0].parts] == ["Text", "Image"]


def test_count_and_models(client: anthropic.Anthropic, server: DialectServer) -> None:
    assert client.messages.count_tokens(model="m", messages=MESSAGES).input_tokens == 1234
    assert server.script.lines == ["POST /v1/messages/count_tokens anthropic count_tokens"]
    assert [model.id for model in client.models.list()] == ["m", "org/n"]
    assert client.models.retrieve("m").id == "m"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RequestError("bad key", status=401), anthropic.AuthenticationError),
        (RequestError("sealed", status=409), anthropic.ConflictError),
        (RequestError("wrong", path="messages[1].role"), anthropic.BadRequestError),
        (RequestError("none", status=404), anthropic.NotFoundError),
        (RequestError("big", status=413), anthropic.RequestTooLargeError),
        (EngineBusy("full", 429, 1.0), anthropic.RateLimitError),
        (EngineBusy("over", 529), anthropic.OverloadedError),
        (EngineOverflow("too long", 400), anthropic.BadRequestError),
        (EngineDown("gone", 503), anthropic.ServiceUnavailableError),
        (EngineDown("gone", 500), anthropic.InternalServerError),
    ],
)
def test_errors(client: anthropic.Anthropic, server: DialectServer, error: PolarError, raised: Any) -> None:
    server.script.error = error
    with pytest.raises(raised) as caught:
        client.messages.create(model="m", max_tokens=9, messages=MESSAGES)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert str(error).split(": ")[-1] in body["error"]["message"]


def test_a_broken_stream_raises(client: anthropic.Anthropic, server: DialectServer) -> None:
    server.script.parts, server.script.breaks = [Text("Hello there")], EngineDown("cut off")
    with (
        pytest.raises(anthropic.APIStatusError, match="cut off"),
        client.messages.stream(model="m", max_tokens=9, messages=MESSAGES) as stream,
    ):
        stream.get_final_message()
