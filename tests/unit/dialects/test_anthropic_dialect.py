"""Anthropic Messages: what requests may say, and the exact sequence of answers."""

from __future__ import annotations

from typing import Any

import pytest
from dialect_cases import CASES, MINTED, SHELL_SCHEMA, Case, call, parse, reply, simple, sse, stream

from polar_common.errors import EngineBusy, RequestError
from polar_proxy.dialects import route
from polar_proxy.dialects.anthropic.request import HONOURED, NOT_FORWARDED
from polar_proxy.dialects.base import ChatRequest, Usage, events_of
from polar_render.messages import Image, Message, Text, Thinking, ToolCall

PATH = "/v1/messages"
USER = [{"role": "user", "content": "Go"}]
BILLING = "x-anthropic-billing-header: cc_version=1.2; cc_entrypoint=sdk-cli; cch=36ee5;"


def read(messages: Any = USER, headers: dict[str, str] | None = None, **extra: Any) -> ChatRequest:
    return parse(Case(PATH, {"model": "m", "max_tokens": 9, "messages": messages, **extra}, headers or {}))[1]


def refused(messages: Any = USER, **extra: Any) -> str:
    with pytest.raises(RequestError) as caught:
        read(messages, **extra)
    assert caught.value.status == 400
    return caught.value.path


def test_system_blocks_stay_blocks_and_mid_system_stays_in_place() -> None:
    _, request = parse(CASES["claude"])
    assert [m.role for m in request.messages] == ["system", "user", "system", "assistant", "tool"]
    assert request.messages[0] == Message("system", (Text("You are an agent."),))
    assert request.messages[2] == Message("system", (Text("In the middle."),))
    assert request.messages[3].parts == (
        Thinking("Let me see.", "polar.c1.0"),
        Text("Looking."),
        ToolCall("call_c1_0", "Bash", '{"command":"ls"}'),
    )
    assert request.thinking == {"enabled": True, "budget": 31999}
    assert request.hints.context_edits == ()
    assert [tool.name for tool in request.tools] == ["Bash"]


@pytest.mark.parametrize(
    ("system", "parts", "billing"),
    [
        ([{"type": "text", "text": BILLING}, {"type": "text", "text": "S"}], (Text("S"),), (BILLING,)),
        ([{"type": "text", "text": BILLING + "\nS"}], (Text("S"),), (BILLING,)),
        (BILLING + "\nS", (Text("S"),), (BILLING,)),
        ("See x-anthropic-billing-header: it is text", (Text("See x-anthropic-billing-header: it is text"),), ()),
        ([{"type": "text", "text": "A"}, {"type": "text", "text": "B"}], (Text("A"), Text("B")), ()),
    ],
)
def test_the_billing_line_is_recorded_and_never_shown(system: Any, parts: Any, billing: Any) -> None:
    request = read(system=system)
    assert request.messages[0] == Message("system", parts)
    assert request.billing == billing


def test_billing_alone_leaves_no_system_message_and_no_trace_in_the_identity() -> None:
    first = read(system=[{"type": "text", "text": BILLING}])
    second = read(system=[{"type": "text", "text": BILLING.replace("36ee5", "0aaa9")}])
    assert [m.role for m in first.messages] == ["user"]
    assert first.raw_hash == second.raw_hash == read().raw_hash


def test_a_sub_agent_shows_in_header_or_billing() -> None:
    assert read(headers={"x-claude-code-agent-id": "a7"}).hints.agent == "a7"
    assert read(system=BILLING + " cc_is_subagent=true;").hints.agent == "subagent"
    assert read().hints.agent == ""


def test_each_tool_result_is_a_message_in_its_place() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    url = {"type": "image", "source": {"type": "url", "url": "https://example.org/x.png"}}
    content = [
        {"type": "tool_result", "tool_use_id": "a", "content": [image, {"type": "text", "text": "see"}]},
        {"type": "tool_result", "tool_use_id": "b", "content": "no", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": "next"},
        url,
    ]
    assert read([{"role": "user", "content": content}]).messages == (
        Message("tool", (Image(mime="image/png", data="aGk="), Text("see")), call_id="a"),
        Message("tool", (Text("no"),), call_id="b", is_error=True),
        Message("tool", (), call_id="c"),
        Message("user", (Text("next"), Image(url="https://example.org/x.png"))),
    )


def test_thinking_is_kept_with_its_signature() -> None:
    blocks = [
        {"type": "thinking", "thinking": "", "signature": "sig"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "text", "text": "A"},
    ]
    request = read([*USER, {"role": "assistant", "content": blocks}, *USER])
    assert request.messages[1].parts == (Thinking("", "sig"), Thinking("", "xyz", redacted=True), Text("A"))


def test_documents_and_search_results_are_text() -> None:
    blocks = [
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "body"}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "inner"}]}},
        {"type": "search_result", "title": "R", "source": "u", "content": [{"type": "text", "text": "found"}]},
    ]
    assert read([{"role": "user", "content": blocks}]).messages[0].parts == (
        Text("T\nbody"),
        Text("inner"),
        Text("R\nu\nfound"),
    )
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}
    assert refused([{"role": "user", "content": [pdf]}]) == "messages[0].content[0].source.type"


def test_a_deferred_tool_appears_once_it_was_searched() -> None:
    tools = [{"name": "Later", "input_schema": {"type": "object"}, "defer_loading": True}]
    hidden = read(tools=tools)
    assert hidden.tools == ()
    assert hidden.dropped == ("tools[?name=='Later']",)
    found = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_reference", "tool_name": "Later"}]}
    shown = read([{"role": "user", "content": [found]}], tools=tools)
    assert [tool.name for tool in shown.tools] == ["Later"]
    assert shown.messages[0].parts == (Text('{"type":"tool_reference","tool_name":"Later"}'),)


def test_hosted_tools_are_noted_and_client_tools_without_schema_refused() -> None:
    request = read(tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert (request.tools, request.dropped) == ((), ("tools[?type=='web_search_20250305']",))
    assert refused(tools=[{"type": "bash_20250124", "name": "bash"}]) == "tools[0].type"


@pytest.mark.parametrize(
    ("choice", "wanted", "parallel"),
    [
        (None, "auto", None),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", None),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "f"}, {"name": "f"}, None),
    ],
)
def test_tool_choice(choice: Any, wanted: Any, parallel: Any) -> None:
    request = read(tool_choice=choice)
    assert (request.tool_choice, request.parallel_tool_calls) == (wanted, parallel)


def test_context_edits_that_remove_something_are_hints() -> None:
    edits = [
        {"type": "clear_thinking_20251015", "keep": "all"},
        {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}},
    ]
    request = read(context_management={"edits": edits})
    assert request.hints.context_edits == ('{"type":"clear_tool_uses_20250919","keep":{"type":"tool_uses","value":3}}',)


def test_formats_effort_and_sampling() -> None:
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    config = {"effort": "high", "format": {"type": "json_schema", "schema": schema}}
    request = read(output_config=config, thinking={"type": "adaptive"}, top_k=40, stop_sequences=["x"])
    assert request.response_format == wanted
    assert request.thinking == {"enabled": True, "effort": "high"}
    assert (request.sampling.top_k, request.sampling.stop, request.sampling.max_tokens) == (40, ("x",), 9)
    assert read(output_format={"type": "json_schema", "schema": schema}).response_format == wanted
    assert read(thinking={"type": "disabled"}).thinking == {"enabled": False}


def test_prefill() -> None:
    assert read([*USER, {"role": "assistant", "content": "{"}]).prefill
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    assert not read([*USER, {"role": "assistant", "content": [use]}]).prefill


def test_a_count_needs_no_limit() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    dialect, found = route("POST", "/v1/messages/count_tokens", {"beta": "true"}, {})
    assert dialect.parse(found, {}, body).messages
    dialect, found = route("POST", PATH, {}, {})
    with pytest.raises(RequestError, match="max_tokens"):
        dialect.parse(found, {}, body)


def test_tables_don_t_overlap() -> None:
    assert not HONOURED & NOT_FORWARDED.keys()


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        (5, "messages"),
        ([], "messages"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "hologram"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "tool_use"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0].source"),
        (
            [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}],
            "messages[0].content[0].source.type",
        ),
        ([{"role": "user", "content": [{"type": "tool_result"}]}], "messages[0].content[0].tool_use_id"),
        (
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "x"}]}]}],
            "messages[0].content[0].content[0].type",
        ),
        ([{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}], "messages[0].content[0].name"),
        ([{"role": "assistant", "content": [{"type": "thinking"}]}], "messages[0].content[0].thinking"),
    ],
)
def test_bad_messages_are_named(messages: Any, path: str) -> None:
    assert refused(messages) == path


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image", "source": {"type": "url", "url": "https://example.org/u"}}]}, "system[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"context_management": {"edits": [{}]}}, "context_management.edits[0].type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
def test_bad_fields_are_named(extra: Any, path: str) -> None:
    assert refused(**extra) == path


def test_golden_stream() -> None:
    dialect, request = simple("anthropic")
    answer = reply(Thinking("t"), Text("x"), call("bash", '{"a": 1}'), usage=Usage(5, 3, 2))
    frames = stream(dialect, request, events_of(answer.parts), answer)
    start = {
        "id": "msg_c1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        },
    }
    usage = {"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 3}

    def delta(index: int, kind: str, **fields: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}

    def block(index: int, **fields: Any) -> dict[str, Any]:
        return {"type": "content_block_start", "index": index, "content_block": fields}

    wanted = [
        {"type": "message_start", "message": start},
        {"type": "ping"},
        block(0, type="thinking", thinking="", signature=""),
        delta(0, "thinking_delta", thinking="t"),
        delta(0, "signature_delta", signature="polar.c1.0"),
        {"type": "content_block_stop", "index": 0},
        block(1, type="text", text=""),
        delta(1, "text_delta", text="x"),
        {"type": "content_block_stop", "index": 1},
        block(2, type="tool_use", id="call_c1_0", name="bash", input={}),
        delta(2, "input_json_delta", partial_json='{"a": 1}'),
        {"type": "content_block_stop", "index": 2},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": usage,
        },
        {"type": "message_stop"},
    ]
    assert [data for _, data in sse(frames)] == wanted
    assert [name for name, _ in sse(frames)] == [event["type"] for event in wanted]
    assert [data["type"] for frame in frames if frame.actionable for _, data in sse([frame])] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_overload_has_its_own_kind() -> None:
    dialect, request = simple("anthropic")
    assert b'"overloaded_error"' in dialect.error(EngineBusy("x", 529))[2]
    assert b'"rate_limit_error"' in dialect.error(EngineBusy("x"))[2]
    encoder = dialect.encoder(request, [MINTED])
    assert encoder.keepalive() == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert b"event: error\n" in encoder.fail(EngineBusy("x"))[0].data


def test_schemas_are_passed_on_as_they_came() -> None:
    request = read(tools=[{"name": "f", "input_schema": SHELL_SCHEMA}])
    assert request.tools[0].parameters == SHELL_SCHEMA
