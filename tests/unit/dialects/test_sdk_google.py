"""The official Google client as an oracle: what it reads is what was said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from dialect_cases import SHELL_SCHEMA
from dialect_server import DialectServer
from google import genai
from google.genai import errors, types

from polar_common.errors import EngineBusy, EngineDown, EngineOverflow, PolarError, RequestError
from polar_render.messages import Text, Thinking, ToolCall

CALLS = (ToolCall("", "bash", '{"command":  "ls"}'), ToolCall("", "bash", '{"command": "pwd"}'))
SAID = (Thinking("Let me see."), Text('Looking at "it".'), *CALLS)
THINK = types.GenerateContentConfig(thinking_config=types.ThinkingConfig(include_thoughts=True))


@pytest.fixture
def client(server: DialectServer) -> Iterator[genai.Client]:
    client = genai.Client(api_key="k", http_options=types.HttpOptions(base_url=server.url))
    yield client
    client.close()


def _check(parts: list[Any]) -> None:
    assert "".join(p.text for p in parts if p.thought) == "Let me see."
    assert "".join(p.text for p in parts if p.text and not p.thought) == 'Looking at "it".'
    calls = [p.function_call for p in parts if p.function_call]
    assert [(c.id, c.name, c.args) for c in calls] == [
        ("call_c0_0", "bash", {"command": "ls"}),
        ("call_c0_1", "bash", {"command": "pwd"}),
    ]
    assert [p.thought_signature for p in parts if p.function_call] == [b"polar.c0.0", None]


def test_whole(client: genai.Client, server: DialectServer) -> None:
    server.script.parts = SAID
    answer = client.models.generate_content(model="m", contents="Go", config=THINK)
    assert answer.candidates and answer.candidates[0].content
    _check(answer.candidates[0].content.parts or [])
    assert answer.candidates[0].finish_reason == types.FinishReason.STOP
    usage = answer.usage_metadata
    assert usage is not None
    counts = (usage.prompt_token_count, usage.candidates_token_count, usage.thoughts_token_count)
    assert counts == (11, 5, 2)
    assert usage.total_token_count == 18


def test_stream(client: genai.Client, server: DialectServer) -> None:
    server.script.parts = SAID
    parts: list[Any] = []
    finishes = []
    for chunk in client.models.generate_content_stream(model="m", contents="Go", config=THINK):
        assert chunk.candidates and chunk.candidates[0].content
        parts += chunk.candidates[0].content.parts or []
        finishes.append(chunk.candidates[0].finish_reason)
        last = chunk
    _check(parts)
    assert finishes[-1] == types.FinishReason.STOP
    assert set(finishes[:-1]) == {None}
    assert last.usage_metadata is not None
    assert last.usage_metadata.total_token_count == 18


def test_thoughts_only_where_asked(client: genai.Client, server: DialectServer) -> None:
    server.script.parts = [Thinking("Hm."), Text("Yes.")]
    answer = client.models.generate_content(model="m", contents="Go")
    assert answer.text == "Yes."
    assert answer.candidates and answer.candidates[0].content
    parts = answer.candidates[0].content.parts or []
    assert not any(part.thought for part in parts)
    assert parts[-1].thought_signature == b"polar.c0.0"


def test_candidates(client: genai.Client, server: DialectServer) -> None:
    server.script.parts = [Text("Hello")]
    config = types.GenerateContentConfig(candidate_count=2)
    whole = client.models.generate_content(model="m", contents="Go", config=config)
    assert [c.content.parts[0].text for c in whole.candidates or [] if c.content and c.content.parts] == ["Hello"] * 2
    texts = {0: "", 1: ""}
    for chunk in client.models.generate_content_stream(model="m", contents="Go", config=config):
        for candidate in chunk.candidates or []:
            assert candidate.content is not None
            texts[candidate.index or 0] += "".join(p.text or "" for p in candidate.content.parts or [])
    assert texts == {0: "Hello", 1: "Hello"}


def test_echo_continues_with_permuted_results(client: genai.Client, server: DialectServer) -> None:
    server.script.parts = SAID
    first = client.models.generate_content(model="m", contents="Go", config=THINK)
    assert first.candidates and first.candidates[0].content
    results = [
        types.Part(
            function_response=types.FunctionResponse(id=f"call_c0_{i}", name="bash", response={"output": f"r{i}"})
        )
        for i in (1, 0)
    ]
    contents: Any = [
        types.Content(role="user", parts=[types.Part(text="Go")]),
        first.candidates[0].content,
        types.Content(role="user", parts=results),
    ]
    declared = types.FunctionDeclaration(name="bash", parameters_json_schema=SHELL_SCHEMA)
    config = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[declared])])
    client.models.generate_content(model="m", contents=contents, config=config)
    request = server.script.requests[-1]
    _, assistant, *tools = request.messages
    assert assistant.thinking == (Thinking("Let me see.", "polar.c0.0"),)
    assert [(tool.call_id, tool.parts[0]) for tool in tools] == [
        ("call_c0_1", Text("r1")),
        ("call_c0_0", Text("r0")),
    ]
    assert request.tools[0].parameters == SHELL_SCHEMA


def test_native_schemas_become_json_schema(client: genai.Client, server: DialectServer) -> None:
    schema = types.Schema(type=types.Type.OBJECT, properties={"x": types.Schema(type=types.Type.STRING)})
    declared = types.FunctionDeclaration(name="f", parameters=schema)
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[declared])],
        response_mime_type="application/json",
        response_schema=schema,
        stop_sequences=["END"],
        top_k=40,
    )
    client.models.generate_content(model="m", contents="Go", config=config)
    request = server.script.requests[-1]
    wanted = {"type": "object", "properties": {"x": {"type": "string"}}}
    assert request.tools[0].parameters == wanted
    assert request.response_format == {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}
    assert (request.sampling.stop, request.sampling.top_k) == (("END",), 40)
    assert request.dropped == ()


def test_count_and_models(client: genai.Client, server: DialectServer) -> None:
    assert client.models.count_tokens(model="m", contents="Go").total_tokens == 1234
    assert [line.split()[-1] for line in server.script.lines] == ["count_tokens"]
    assert [model.name for model in client.models.list()] == ["models/m", "models/org/n"]
    assert client.models.get(model="m").input_token_limit == 4096


@pytest.mark.parametrize(
    ("error", "raised", "status"),
    [
        (RequestError("bad key", status=401), errors.ClientError, "UNAUTHENTICATED"),
        (RequestError("wrong", path="contents[0].role"), errors.ClientError, "INVALID_ARGUMENT"),
        (RequestError("none", status=404), errors.ClientError, "NOT_FOUND"),
        (RequestError("sealed", status=409), errors.ClientError, "ABORTED"),
        (EngineBusy("full", 429, 1.0), errors.ClientError, "RESOURCE_EXHAUSTED"),
        (EngineOverflow("too long", 400), errors.ClientError, "INVALID_ARGUMENT"),
        (EngineDown("gone", 503), errors.ServerError, "UNAVAILABLE"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(
    client: genai.Client, server: DialectServer, stream: bool, error: PolarError, raised: Any, status: str
) -> None:
    server.script.error = error
    models = client.models
    ask: Any = models.generate_content_stream if stream else models.generate_content
    with pytest.raises(raised) as caught:
        list(ask(model="m", contents="Go"))
    assert caught.value.status == status


def test_a_broken_stream_raises(client: genai.Client, server: DialectServer) -> None:
    server.script.parts, server.script.breaks = [Text("Hello there")], EngineDown("cut off")
    with pytest.raises(errors.ServerError, match="cut off"):
        list(client.models.generate_content_stream(model="m", contents="Go"))


@pytest.mark.parametrize("path", ["/v1beta/models/a:b:streamGenerateContent", "/v1/models/m:streamGenerateContent"])
def test_without_alt_sse_the_stream_is_one_array(server: DialectServer, path: str) -> None:
    server.script.parts = [Text("Hello"), *CALLS]
    answer = httpx.post(server.url + path, json={"contents": [{"parts": [{"text": "Go"}]}]})
    assert answer.headers["content-type"] == "application/json"
    chunks = answer.json()
    assert "".join(p.get("text", "") for c in chunks for p in c["candidates"][0]["content"]["parts"]) == "Hello"
    assert ["finishReason" in c["candidates"][0] for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert server.script.requests[0].model == path.split("models/")[1].rpartition(":")[0]
    server.script.breaks = EngineDown("cut off")
    broken = httpx.post(server.url + path, json={"contents": [{"parts": [{"text": "Go"}]}]}).json()
    assert broken[-1]["error"]["status"] == "UNAVAILABLE"
