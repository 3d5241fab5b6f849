"""Chat Completions: what requests may say, and the exact bytes of answers."""

from __future__ import annotations

from typing import Any

import pytest
from dialect_cases import CASES, MINTED, USAGE, Case, call, function, parse, reply, simple, stream

from polar_common.errors import EngineDown, RequestError
from polar_proxy.dialects.base import ChatRequest, Usage, events_of
from polar_proxy.dialects.openai_chat.request import HONOURED, NOT_FORWARDED
from polar_render.base import TextDelta, ToolCallStarted
from polar_render.messages import Image, Message, Text, Thinking, ToolCall, ToolSpec

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "Go"}]


def read(messages: Any = USER, headers: dict[str, str] | None = None, **extra: Any) -> ChatRequest:
    return parse(Case(PATH, {"model": "m", "messages": messages, **extra}, headers or {}))[1]


def refused(messages: Any = USER, **extra: Any) -> str:
    with pytest.raises(RequestError) as caught:
        read(messages, **extra)
    assert caught.value.status == 400
    return caught.value.path


def test_messages_keep_order_and_place() -> None:
    request = read(
        [
            {"role": "developer", "content": "A"},
            {"role": "user", "content": [{"type": "text", "text": "B"}, {"type": "text", "text": "C"}], "name": "ann"},
            {"role": "assistant", "content": "D"},
            {"role": "system", "content": "E"},
            {"role": "user", "content": "F"},
        ]
    )
    assert [m.role for m in request.messages] == ["developer", "user", "assistant", "system", "user"]
    assert request.messages[1] == Message("user", (Text("B"), Text("C")), name="ann")
    assert not request.prefill


def test_an_assistant_turn_keeps_thoughts_text_and_calls() -> None:
    turn = {
        "role": "assistant",
        "content": "Both.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{ "x":1 }'}},
            {"id": "b", "function": {"name": "g", "arguments": ""}},
            {"id": "c", "type": "custom", "custom": {"name": "h", "input": "raw"}},
        ],
    }
    assert read([*USER, turn]).messages[1].parts == (
        Thinking("Hm."),
        Text("Both."),
        ToolCall("a", "f", '{ "x":1 }'),
        ToolCall("b", "g", ""),
        ToolCall("c", "h", "raw", custom=True),
    )


def test_parsed_arguments_are_taken() -> None:
    turn = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {"x": [1]}}}]}
    assert read([*USER, turn]).messages[1].tool_calls[0].arguments == '{"x":[1]}'


def test_the_retired_call_form_is_history() -> None:
    turns = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "ok"},
    ]
    request = read([*USER, *turns])
    assert request.messages[1].parts == (ToolCall("", "f", "{}"),)
    assert request.messages[2] == Message("tool", (Text("ok"),), name="f")
    assert refused(functions=[{"name": "f"}]) == "functions"


@pytest.mark.parametrize("role", ["user", "tool"])
def test_images_are_images_everywhere(role: str) -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": "low"}},
        {"type": "image_url", "image_url": "https://example.org/x.png"},
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml,plain"}},
    ]
    request = read([{"role": role, "content": parts, **({"tool_call_id": "a"} if role == "tool" else {})}])
    assert request.messages[0].parts == (
        Image(mime="image/png", data="aGk=", detail="low"),
        Image(url="https://example.org/x.png"),
        Image(mime="image/svg+xml", data="cGxhaW4="),
    )


def test_tools() -> None:
    custom = {"name": "patch", "description": "p", "format": {"type": "grammar", "grammar": {"syntax": "lark"}}}
    request = read(tools=[function("bash"), {"type": "custom", "custom": custom}, {"function": {"name": "bare"}}])
    assert request.tools[1] == ToolSpec("patch", "p", custom=True, grammar={"syntax": "lark"})
    assert request.tools[2] == ToolSpec("bare")
    assert request.dropped == ()


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "f"}}, {"name": "f"}),
        ({"type": "custom", "custom": {"name": "f"}}, {"name": "f"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
            {"mode": "required", "allowed": ["f"]},
        ),
    ],
)
def test_tool_choice(choice: Any, wanted: Any) -> None:
    assert read(tool_choice=choice).tool_choice == wanted


def test_sampling() -> None:
    sampling = read(
        max_tokens=5,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        stop=["a", "b"],
        seed=-1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"5": -100},
        n=2,
        logprobs=True,
    ).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.seed) == (5, 0.0, -1, -1)
    assert (sampling.stop, sampling.logit_bias, sampling.n, sampling.logprobs) == (("a", "b"), {"5": -100.0}, 2, True)


def test_two_limits_and_alternatives_are_noted() -> None:
    request = read(max_tokens=9, max_completion_tokens=5, logprobs=True, top_logprobs=3)
    assert request.sampling.max_tokens == 5
    assert request.dropped == ("max_tokens", "top_logprobs")


def test_formats_and_template_arguments() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert read(response_format=form).response_format == form
    assert read(response_format={"type": "json_object"}).response_format == {"type": "json_object"}
    assert read(response_format={"type": "text"}).response_format is None
    request = read(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}, store=False)
    assert request.thinking == {"effort": "low"}
    assert request.template_args == {"enable_thinking": False}
    assert not request.store


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [({}, True), ({"continue_final_message": False}, False), ({"add_generation_prompt": True}, False)],
)
def test_prefill(extra: Any, wanted: bool) -> None:
    assert read([*USER, {"role": "assistant", "content": "{"}], **extra).prefill is wanted


def test_a_turn_that_called_is_no_prefill() -> None:
    turn = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}
    assert not read([*USER, turn]).prefill


def test_unheard_fields_are_listed() -> None:
    request = read(
        [{"role": "user", "content": "Go", "audio": {"id": 1}}], metadata={"a": "b"}, verbosity="low", mine=1
    )
    assert request.dropped == ("messages[*].audio", "metadata", "mine", "verbosity")
    assert {"metadata", "verbosity"} <= NOT_FORWARDED.keys()
    assert not HONOURED & NOT_FORWARDED.keys()


def test_usage_is_streamed_where_asked() -> None:
    assert not read(stream=True).include_usage
    assert read(stream=True, stream_options={"include_usage": True}).include_usage


def test_hints_come_from_headers() -> None:
    _, request = parse(CASES["opencode"])
    assert (request.hints.agent, request.hints.parent_agent) == ("child", "mother")


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        (5, "messages"),
        ([], "messages"),
        (None, "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].image_url"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].image_url.url",
        ),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [{"type": "magic"}]}], "messages[0].tool_calls[0].type"),
        ([{"role": "assistant", "reasoning_content": []}], "messages[0].reasoning_content"),
    ],
)
def test_bad_messages_are_named(messages: Any, path: str) -> None:
    assert refused(messages) == path


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"model": None}, "model"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": 5}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": "x"}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": [1]}, "stop[0]"),
        ({"stream": "yes"}, "stream"),
        ({"logit_bias": {"word": 1}}, "logit_bias.word"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": []}, "stream_options"),
    ],
)
def test_bad_fields_are_named(extra: Any, path: str) -> None:
    assert refused(**extra) == path


def test_golden_stream() -> None:
    dialect, request = simple("openai_chat", stream_options={"include_usage": True})
    answer = reply(Thinking("t"), Text("é"), call("bash", '{"a": 1}'), usage=Usage(3, 2, 1, 1))
    frames = stream(dialect, request, events_of(answer.parts), answer)
    head = b'data: {"id":"chatcmpl-c1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":['

    def chunk(delta: str, finish: str = "null") -> bytes:
        return head + f'{{"index":0,"delta":{delta},"finish_reason":{finish}}}]}}\n\n'.encode()

    start = '{"index":0,"id":"call_c1_0","type":"function","function":{"name":"bash","arguments":""}}'
    usage = (
        b'],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,'
        b'"prompt_tokens_details":{"cached_tokens":1},"completion_tokens_details":{"reasoning_tokens":1}}}\n\n'
    )
    assert [(frame.data, frame.actionable) for frame in frames] == [
        (chunk('{"role":"assistant","content":""}'), False),
        (chunk('{"reasoning_content":"t"}'), False),
        (chunk('{"content":"é"}'), False),
        (chunk('{"tool_calls":[' + start + "]}"), False),
        (chunk('{"tool_calls":[{"index":0,"function":{"arguments":"{\\"a\\": 1}"}}]}'), False),
        (chunk("{}", '"tool_calls"'), True),
        (head + usage, True),
        (b"data: [DONE]\n\n", True),
    ]


@pytest.mark.parametrize(
    ("finish", "wanted"), [("stop", b'"stop"'), ("stop_string", b'"stop"'), ("length", b'"length"')]
)
def test_finish_reasons(finish: Any, wanted: bytes) -> None:
    dialect, request = simple("openai_chat")
    answer = reply(Text("x"), finish=finish)
    assert b'"finish_reason":' + wanted in dialect.encode([answer], request)
    assert b'"finish_reason":' + wanted in stream(dialect, request, [], answer)[-2].data


def test_errors_in_mid_stream_and_keepalive() -> None:
    dialect, request = simple("openai_chat")
    encoder = dialect.encoder(request, [MINTED])
    # Its official clients see nothing but the message, and agents decide by its words whether to try again.
    assert encoder.fail(EngineDown("gone"))[0].data.startswith(b'data: {"error":{"message":"server error: gone"')
    assert encoder.fail(RequestError("no"))[0].data.startswith(b'data: {"error":{"message":"no"')
    assert b'"code":502' in encoder.fail(EngineDown("gone"))[0].data
    assert encoder.keepalive().startswith(b":")
    assert encoder.end(USAGE)[-1].data == b"data: [DONE]\n\n"


@pytest.mark.parametrize(("agent", "held"), [("opencode/1.18.33 ai-sdk/provider-utils", True), ("OpenAI/JS 6", False)])
def test_a_client_that_keeps_broken_calls_sees_whole_ones_alone(agent: str, held: bool) -> None:
    """opencode's history would hold the call that broke, with "aborted" for its result, before the one that didn't."""
    dialect, request = parse(Case(PATH, {"model": "m", "messages": USER, "stream": True}, {"user-agent": agent}))
    encoder = dialect.encoder(request, [MINTED])
    assert not encoder.feed(TextDelta("I will"))[0].actionable
    assert encoder.feed(ToolCallStarted(0, "bash"))[0].actionable is held
