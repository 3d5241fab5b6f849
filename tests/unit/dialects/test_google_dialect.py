"""Google generateContent: what requests may say, and the exact chunks of answers."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest
from dialect_cases import CASES, MINTED, Case, call, parse, reply, simple, sse, stream

from polar_common.errors import EngineDown, RequestError
from polar_proxy.dialects import route
from polar_proxy.dialects.base import ChatRequest, Usage, events_of
from polar_proxy.dialects.google.request import HONOURED, NOT_FORWARDED
from polar_proxy.dialects.google.schema import json_schema
from polar_render.messages import Image, Message, Text, Thinking, ToolCall, ToolSpec

PATH = "/v1beta/models/m:streamGenerateContent"
USER = [{"role": "user", "parts": [{"text": "Go"}]}]
SIGNATURE = base64.b64encode(b"polar.c1.0").decode()


def read(contents: Any = USER, **extra: Any) -> ChatRequest:
    return parse(Case(PATH, {"contents": contents, **extra}, query={"alt": "sse"}))[1]


def refused(contents: Any = USER, **extra: Any) -> str:
    with pytest.raises(RequestError) as caught:
        read(contents, **extra)
    assert caught.value.status == 400
    return caught.value.path


def _result(name: str, response: Any, **extra: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response, **extra}}


def test_contents_make_turns() -> None:
    _, request = parse(CASES["gemini"])
    assert request.messages == (
        Message("system", (Text("Help."),)),
        Message("user", (Text("Context."), Text("Go"))),
        Message("assistant", (ToolCall("call_c1_0", "run", '{"command":"ls"}'),)),
        Message("tool", (Text("a.txt"),), call_id="call_c1_0", name="run"),
    )
    assert request.thinking == {"show": True, "enabled": True, "budget": 8192}
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 0.95, 64)
    assert (request.model, request.stream, request.sse) == ("m", True, True)


def test_calls_without_ids_are_paired_by_name_and_order() -> None:
    calls = [{"functionCall": {"name": name, "args": {}}} for name in ("a", "b", "a")]
    results = [_result("b", {"output": "B"}), _result("a", {"output": "A1"}), _result("a", {"output": "A2"})]
    request = read([*USER, {"role": "model", "parts": calls}, {"role": "user", "parts": results}])
    assert [c.id for c in request.messages[1].tool_calls] == ["pos_1_0", "pos_1_1", "pos_1_2"]
    assert [m.call_id for m in request.messages[2:]] == ["pos_1_1", "pos_1_0", "pos_1_2"]


def test_permuted_results_are_paired_by_id() -> None:
    calls = [{"functionCall": {"id": f"x{i}", "name": "a", "args": {}}} for i in range(6)]
    order = [3, 0, 5, 1, 4, 2]
    results = [_result("a", {"output": str(i)}, id=f"x{i}") for i in order]
    request = read([*USER, {"role": "model", "parts": calls}, {"role": "user", "parts": results}])
    assert [m.call_id for m in request.messages[2:]] == [f"x{i}" for i in order]


@pytest.mark.parametrize(
    ("response", "text", "failed"),
    [
        ({"output": "x"}, "x", False),
        ({"result": "x"}, "x", False),
        ({"error": "x"}, "x", True),
        ({"output": {"a": 1}}, '{"output":{"a":1}}', False),
        ({"a": 1, "b": 2}, '{"a":1,"b":2}', False),
    ],
)
def test_results(response: Any, text: str, failed: bool) -> None:
    request = read([{"role": "function", "parts": [_result("f", response)]}])
    assert request.messages[0] == Message("tool", (Text(text),), name="f", is_error=failed)


def test_images_beside_and_within_results() -> None:
    inline = {"inline_data": {"mime_type": "image/png", "data": "aGk="}}
    file = {"fileData": {"fileUri": "https://example.org/x.png"}}
    parts = [_result("f", {}, parts=[inline]), inline, file]
    request = read([{"role": "user", "parts": parts}])
    assert request.messages == (
        Message("tool", (Image(mime="image/png", data="aGk="),), name="f"),
        Message("user", (Image(mime="image/png", data="aGk="), Image(url="https://example.org/x.png"))),
    )


def test_both_spellings_are_read() -> None:
    body = {
        "contents": [{"parts": [{"function_call": {"name": "f", "args": {"snake_case": 1}}}], "role": "model"}],
        "system_instruction": {"parts": [{"text": "S"}]},
        "tools": [{"function_declarations": [{"name": "f", "parameters_json_schema": {"type": "object"}}]}],
        "generation_config": {"max_output_tokens": 5, "thinking_config": {"thinking_level": "HIGH"}},
        "tool_config": {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["f"]}},
    }
    request = parse(Case(PATH, body))[1]
    assert request.messages[0] == Message("system", (Text("S"),))
    assert request.messages[1].tool_calls[0].arguments == '{"snake_case":1}'
    assert request.tools == (ToolSpec("f", parameters={"type": "object"}),)
    assert request.sampling.max_tokens == 5
    assert request.tool_choice == {"name": "f"}
    assert request.thinking == {"effort": "high"}
    assert request.dropped == ()


def test_thoughts_and_our_signatures() -> None:
    parts = [
        {"text": "Hm.", "thought": True},
        {"text": "Yes."},
        {"functionCall": {"name": "f", "args": {}}, "thoughtSignature": SIGNATURE},
    ]
    assert read([*USER, {"role": "model", "parts": parts}]).messages[1].parts[:2] == (
        Thinking("Hm.", "polar.c1.0"),
        Text("Yes."),
    )
    stripped = read([*USER, {"role": "model", "parts": parts[2:]}])
    assert stripped.messages[1].parts[0] == Thinking("", "polar.c1.0")
    assert stripped.dropped == ()
    last = read([*USER, {"role": "model", "parts": [{"text": "Yes."}, {"text": "", "thoughtSignature": SIGNATURE}]}])
    assert last.messages[1].parts == (Text("Yes."), Thinking("", "polar.c1.0"))


@pytest.mark.parametrize(
    "foreign", ["skip_thought_signature_validator", "c2ln", "!!", base64.b64encode(b"\xff").decode()]
)
def test_foreign_signatures_are_noted(foreign: str) -> None:
    part = {"functionCall": {"name": "f", "args": {}}, "thoughtSignature": foreign}
    request = read([*USER, {"role": "model", "parts": [part]}])
    assert request.messages[1].thinking == ()
    assert request.dropped == ("contents[*].parts[*].thoughtSignature",)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, "auto"),
        ({"mode": "VALIDATED"}, "auto"),
        ({"mode": "ANY"}, "required"),
        ({"mode": "none", "allowedFunctionNames": ["f"]}, "none"),
        ({"mode": "ANY", "allowedFunctionNames": ["f", "g"]}, {"mode": "required", "allowed": ["f", "g"]}),
    ],
)
def test_tool_choice(config: Any, wanted: Any) -> None:
    assert read(toolConfig={"functionCallingConfig": config}).tool_choice == wanted


def test_formats() -> None:
    assert read(generationConfig={"responseMimeType": "application/json"}).response_format == {"type": "json_object"}
    schema = {"type": "object"}
    request = read(generationConfig={"responseMimeType": "application/json", "responseJsonSchema": schema})
    assert request.response_format == {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_schema_types_are_lowered_where_they_are_types() -> None:
    native = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "enum": ["STRING"], "description": "OBJECT"},
            "list": {"type": "ARRAY", "items": {"anyOf": [{"type": "INTEGER"}, {"type": "NULL"}]}},
        },
    }
    assert json_schema(native) == {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["STRING"], "description": "OBJECT"},
            "list": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        },
    }


def test_hosted_tools_and_unheard_settings_are_noted() -> None:
    request = read(
        tools=[{"googleSearch": {}}, {"codeExecution": {}}],
        safetySettings=[{"category": "x"}],
        generationConfig={"speechConfig": {"a": 1}},
    )
    assert request.dropped == (
        "generationConfig.speechConfig",
        "safetySettings",
        "tools[*].codeExecution",
        "tools[*].googleSearch",
    )
    assert not HONOURED & NOT_FORWARDED.keys()


def test_a_count_may_wrap_the_request() -> None:
    dialect, found = route("POST", "/v1beta/models/m:countTokens", {}, {})
    whole = {"generateContentRequest": {"model": "models/m", "contents": USER}}
    assert dialect.parse(found, {}, orjson.dumps(whole)).messages == (Message("user", (Text("Go"),)),)


@pytest.mark.parametrize(
    ("contents", "path"),
    [
        (5, "contents"),
        ([], "contents"),
        ([5], "contents[0]"),
        ([{"role": "wizard"}], "contents[0].role"),
        ([{"parts": [5]}], "contents[0].parts[0]"),
        ([{"parts": [{}]}], "contents[0].parts[0]"),
        ([{"parts": [{"text": 5}]}], "contents[0].parts[0].text"),
        ([{"parts": [{"executableCode": {}}]}], "contents[0].parts[0].executableCode"),
        (
            [{"parts": [{"inlineData": {"mimeType": "audio/wav", "data": "x"}}]}],
            "contents[0].parts[0].inlineData.mimeType",
        ),
        ([{"parts": [{"inlineData": {}}]}], "contents[0].parts[0].inlineData.data"),
        ([{"role": "model", "parts": [{"functionCall": {}}]}], "contents[0].parts[0].functionCall.name"),
        ([{"parts": [{"functionResponse": {}}]}], "contents[0].parts[0].functionResponse.name"),
    ],
)
def test_bad_contents_are_named(contents: Any, path: str) -> None:
    assert refused(contents) == path


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"cachedContent": "cachedContents/x"}, "cachedContent"),
        ({"systemInstruction": 5}, "systemInstruction"),
        ({"systemInstruction": {"parts": [{}]}}, "systemInstruction.parts[0].text"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "X"}}}, "toolConfig.functionCallingConfig.mode"),
        ({"generationConfig": {"temperature": "x"}}, "generationConfig.temperature"),
        ({"generationConfig": {"responseModalities": ["IMAGE"]}}, "generationConfig.responseModalities[0]"),
        ({"generationConfig": {"responseMimeType": "image/png"}}, "generationConfig.responseMimeType"),
    ],
)
def test_bad_fields_are_named(extra: Any, path: str) -> None:
    assert refused(**extra) == path


def test_golden_stream() -> None:
    dialect, request = simple("google")
    answer = reply(Thinking("t"), Text("x"), call("f", '{"a": 1}'), Text("y"), usage=Usage(5, 4, 2, 1))
    frames = stream(dialect, request, events_of(answer.parts), answer)

    def chunk(part: Any, **extra: Any) -> dict[str, Any]:
        candidate = {"content": {"role": "model", "parts": [part]}, "index": 0, **extra}
        return {"candidates": [candidate], "modelVersion": "m", "responseId": "c1"}

    function = {"functionCall": {"id": "call_c1_0", "name": "f", "args": {"a": 1}}, "thoughtSignature": SIGNATURE}
    usage = {
        "promptTokenCount": 5,
        "candidatesTokenCount": 3,
        "totalTokenCount": 9,
        "thoughtsTokenCount": 1,
        "cachedContentTokenCount": 2,
    }
    assert [data for _, data in sse(frames)] == [
        chunk({"text": "t", "thought": True}),
        chunk({"text": "x"}),
        chunk(function),
        chunk({"text": "y"}),
        {**chunk({"text": ""}, finishReason="STOP"), "usageMetadata": usage},
    ]
    assert [frame.actionable for frame in frames] == [False, False, True, False, True]


def test_a_call_that_was_cut_is_said_before_the_end() -> None:
    dialect, request = simple("google")
    answer = reply(call("f", '{"a": '), finish="length")
    *_, cut, last = sse(stream(dialect, request, events_of(answer.parts)[:-1], answer))
    assert cut[1]["candidates"][0]["content"]["parts"][0]["functionCall"]["args"] == {"_raw": '{"a": '}
    assert last[1]["candidates"][0]["finishReason"] == "MAX_TOKENS"


def test_errors_name_the_field_and_streams_need_no_keepalive() -> None:
    dialect, request = simple("google")
    body = orjson.loads(dialect.error(RequestError("is wrong", path="contents[0].role"))[2])
    assert body["error"]["status"] == "INVALID_ARGUMENT"
    assert body["error"]["details"][0]["fieldViolations"][0]["field"] == "contents[0].role"
    encoder = dialect.encoder(request, [MINTED])
    assert encoder.keepalive() == b""
    # Not a `data:` line: clients would take it for an answer without candidates, and the half answer for a whole one.
    assert encoder.fail(EngineDown("gone"))[0].data.startswith(b'{"error":{"code":502')
