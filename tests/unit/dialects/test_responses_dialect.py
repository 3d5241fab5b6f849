"""OpenAI Responses: what requests may say, and the exact sequence of answers."""

from __future__ import annotations

from typing import Any

import pytest
from dialect_cases import CASES, MINTED, USAGE, Case, call, parse, reply, simple, sse, stream

from polar_common.errors import EngineBusy, EngineDown, EngineOverflow, RequestError
from polar_proxy.dialects.base import ChatRequest, events_of
from polar_proxy.dialects.openai_responses.request import HONOURED, NOT_FORWARDED
from polar_render.base import TextDelta, ToolCallDelta, ToolCallDone, ToolCallStarted
from polar_render.messages import Image, Message, Text, Thinking, ToolCall, ToolSpec

PATH = "/v1/responses"
USER = {"role": "user", "content": "Go"}


def read(items: Any = "Go", headers: dict[str, str] | None = None, **extra: Any) -> ChatRequest:
    return parse(Case(PATH, {"model": "m", "input": items, **extra}, headers or {}))[1]


def refused(items: Any = "Go", **extra: Any) -> str:
    with pytest.raises(RequestError) as caught:
        read(items, **extra)
    assert caught.value.status == 400
    return caught.value.path


def _call(number: int, completion: str = "c1", **extra: Any) -> dict[str, Any]:
    made = {"call_id": f"call_{completion}_{number}", "name": "f", "arguments": "{}"}
    return {"type": "function_call", **made, **extra}


def _output(number: int, completion: str = "c1", output: Any = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"call_{completion}_{number}", "output": output}


def test_items_make_turns() -> None:
    _, request = parse(CASES["codex"])
    assert request.messages == (
        Message("developer", (Text("Rules."), Text("More rules.")), item_id="msg_a"),
        Message("user", (Text("Go"),), item_id="msg_b"),
        Message(
            "assistant",
            (
                Thinking("Hm.", "polar.c1.0"),
                ToolCall("call_c1_0", "exec_command", CASES["codex"].body["input"][3]["arguments"]),
            ),
            item_id="item_c1_0",
        ),
        Message("tool", (Text("done"),), call_id="call_c1_0", item_id="fco_1"),
    )
    assert [(t.namespace, t.name, t.custom) for t in request.tools] == [
        ("", "exec_command", False),
        ("", "apply_patch", True),
        ("agents", "spawn_agent", False),
    ]
    assert request.tools[1].grammar == {"syntax": "lark", "definition": "start: /x/"}
    assert (request.hints.agent, request.hints.parent_agent) == ("child", "mother")
    assert request.hints.request_kind == "collab_spawn"
    assert (request.store, request.parallel_tool_calls, request.prefill) == (False, True, False)


def test_instructions_come_first() -> None:
    request = read(instructions="Rules.")
    assert request.messages == (Message("system", (Text("Rules."),)), Message("user", (Text("Go"),)))


def test_calls_of_one_answer_are_one_turn_however_they_are_filed() -> None:
    together = read([USER, _call(0), _call(1), _output(0), _output(1)])
    assert [m.role for m in together.messages] == ["user", "assistant", "tool", "tool"]
    apart = read([USER, _call(0), _output(0), _call(1), _output(1)])
    assert apart.messages == together.messages


def test_two_answers_in_a_row_stay_two_turns() -> None:
    request = read([USER, _call(0, "c1"), _call(0, "c2"), _output(0, "c1"), _output(0, "c2")])
    assert [m.role for m in request.messages] == ["user", "assistant", "assistant", "tool", "tool"]
    strange = [_call(0, call_id="x"), _output(0, "c9"), _call(1, call_id="y")]
    assert [m.role for m in read([USER, *strange]).messages] == ["user", "assistant", "tool", "assistant"]


def test_an_assistant_message_may_follow_its_reasoning() -> None:
    items = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
        },
        _call(0, "zz"),
    ]
    request = read(items)
    assert [m.role for m in request.messages] == ["user", "assistant"]
    assert request.messages[1].parts[:2] == (Thinking("Hm."), Text("Yes."))
    assert request.dropped == ()


def test_a_bare_reasoning_item_is_noted() -> None:
    request = read([USER, {"type": "reasoning", "id": "rs_1", "summary": []}, USER])
    assert [m.role for m in request.messages] == ["user", "user"]
    assert request.dropped == ("input[?type=='reasoning']",)


def test_freeform_calls_and_images_in_outputs() -> None:
    items = [
        USER,
        {"type": "custom_tool_call", "call_id": "a", "name": "exec", "namespace": "functions", "input": "raw()"},
        {
            "type": "custom_tool_call_output",
            "call_id": "a",
            "output": [
                {"type": "input_text", "text": "see"},
                {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "high"},
            ],
        },
        _output(0, output={"content": "x", "success": True}),
    ]
    request = read(items)
    assert request.messages[1].parts == (ToolCall("a", "exec", "raw()", "functions", custom=True),)
    assert request.messages[2].parts == (Text("see"), Image(mime="image/png", data="aGk=", detail="high"))
    assert request.messages[3].parts == (Text('{"content":"x","success":true}'),)


def test_tools_may_come_as_items() -> None:
    exec_tool = {"type": "custom", "name": "exec", "description": "runs code"}
    extra = {"type": "additional_tools", "role": "developer", "tools": [{"type": "namespace", "name": "functions",
             "tools": [exec_tool]}]}  # fmt: skip
    request = read([extra, USER])
    assert request.tools == (ToolSpec("exec", "runs code", namespace="functions", custom=True),)
    assert [m.role for m in request.messages] == ["user"]


def test_hosted_history_and_tools_are_noted() -> None:
    request = read([USER, {"type": "web_search_call", "id": "ws_1"}], tools=[{"type": "file_search"}])
    assert request.dropped == ("input[?type=='web_search_call']", "tools[?type=='file_search']")


def test_the_previous_response_is_a_hint() -> None:
    request = read(previous_response_id="resp_c7")
    assert request.hints.previous_response == "resp_c7"
    assert request.raw_hash != read().raw_hash
    assert read([], previous_response_id="resp_c7").messages == ()


def test_formats_thinking_and_sampling() -> None:
    schema = {"type": "object"}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"}
    request = read(text=text, reasoning={"effort": "high", "summary": "auto"}, max_output_tokens=7, temperature=1)
    assert request.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    assert request.thinking == {"effort": "high"}
    assert (request.sampling.max_tokens, request.sampling.temperature) == (7, 1.0)
    assert request.dropped == ("text.verbosity",)
    assert read(text={"format": {"type": "text"}}).response_format is None


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ("required", "required"),
        ({"type": "function", "name": "f"}, {"name": "f"}),
        ({"type": "custom", "name": "f", "namespace": "n"}, {"name": "f", "namespace": "n"}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            {"mode": "auto", "allowed": ["f"]},
        ),
    ],
)
def test_tool_choice(choice: Any, wanted: Any) -> None:
    assert read(tool_choice=choice).tool_choice == wanted


def test_tables_don_t_overlap() -> None:
    assert not HONOURED & NOT_FORWARDED.keys()
    request = read(metadata={"a": "b"}, truncation="auto", include=["reasoning.encrypted_content", "file_search"])
    assert request.dropped == ("include[?@=='file_search']", "metadata", "truncation")


@pytest.mark.parametrize(
    ("items", "path"),
    [
        (5, "input"),
        (None, "input"),
        ([], "input"),
        ([5], "input[0]"),
        ([{"type": "teleport"}], "input[0].type"),
        ([{"content": "x"}], "input[0].role"),
        ([{"role": "critic", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": 5}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_file"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}], "input[0].content[0].image_url"),
        ([{"type": "function_call", "name": "f"}], "input[0].call_id"),
        ([{"type": "function_call", "call_id": "a"}], "input[0].name"),
        ([{"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}], "input[0].arguments"),
        ([{"type": "function_call_output", "call_id": "a"}], "input[0].output"),
        ([{"type": "item_reference", "id": "rs_1"}], "input[0]"),
        ([{"type": "reasoning", "summary": [5]}], "input[0].summary[0]"),
        ([{"type": "additional_tools", "tools": [{"type": "function"}]}], "input[0].tools[0].name"),
    ],
)
def test_bad_items_are_named(items: Any, path: str) -> None:
    assert refused(items) == path


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"reasoning": "hard"}, "reasoning"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"include": [5]}, "include[0]"),
    ],
)
def test_bad_fields_are_named(extra: Any, path: str) -> None:
    assert refused(**extra) == path


def test_golden_stream() -> None:
    dialect, request = simple("openai_responses")
    answer = reply(Thinking("t"), Text("x"), call("f", '{"a": 1}', namespace="n"), call("p", "raw", custom=True))
    frames = stream(dialect, request, events_of(answer.parts), answer)
    events = sse(frames)
    assert [name.removeprefix("response.") for name, _ in events] == [
        "created", "in_progress",
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    items = [data["item"] for name, data in events if name == "response.output_item.done"]
    part = {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}
    assert items == [
        {
            "id": "item_c1_0",
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "t"}],
            "encrypted_content": "polar.c1.0",
        },
        {"id": "item_c1_1", "type": "message", "status": "completed", "role": "assistant", "content": [part]},
        {
            "id": "item_c1_2",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_c1_0",
            "name": "f",
            "namespace": "n",
            "arguments": '{"a": 1}',
        },
        {
            "id": "item_c1_3",
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "call_c1_1",
            "name": "p",
            "input": "raw",
        },
    ]
    held = [name for frame in frames if frame.actionable for name, _ in sse([frame])]
    assert held == ["response.output_item.done"] * 4 + ["response.completed"]
    final = events[-1][1]["response"]
    assert final["usage"]["total_tokens"] == 18
    assert final["status"] == "completed"


def test_a_cut_answer_is_incomplete() -> None:
    dialect, request = simple("openai_responses")
    answer = reply(Text("x"), call("f", '{"a": '), finish="length")
    events = [TextDelta("x"), ToolCallStarted(0, "f"), ToolCallDelta(0, '{"a": ')]
    final = sse(stream(dialect, request, events, answer))[-1]
    assert final[0] == "response.incomplete"
    response = final[1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert b'"status":"incomplete"' in dialect.encode([answer], request)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineOverflow("x"), "context_length_exceeded"),
        (EngineBusy("x"), "rate_limit_exceeded"),
        (EngineBusy("x", 503), "server_error"),
        (EngineDown("x"), "server_error"),
        (RequestError("x"), "invalid_prompt"),
    ],
)
def test_failures_have_codes(error: Any, code: str) -> None:
    dialect, request = simple("openai_responses")
    answer = reply(Text("half"))
    encoder = dialect.encoder(request, [answer.minted])
    frames = encoder.start(answer.usage) + encoder.feed(TextDelta("half")) + encoder.fail(error)
    name, data = sse(frames)[-1]
    assert name == "response.failed"
    assert data["response"]["status"] == "failed"
    assert data["response"]["error"]["code"] == code
    assert data["response"]["output"] == []
    assert ("try again in 1s" in data["response"]["error"]["message"]) == (code == "rate_limit_exceeded")
    assert encoder.keepalive().startswith(b":")


def test_a_stream_that_fails_after_a_finished_item_hands_out_nothing() -> None:
    """`output_item.done` was held back, so the failed response doesn't hold the item either."""
    dialect, request = simple("openai_responses")
    encoder = dialect.encoder(request, [MINTED])
    frames = encoder.start(USAGE) + encoder.feed(ToolCallStarted(0, "f")) + encoder.feed(ToolCallDelta(0, "{}"))
    frames += encoder.feed(ToolCallDone(0, 2)) + encoder.feed(TextDelta("and"))
    shown = [f for f in frames if not f.actionable] + encoder.fail(EngineDown("gone"))
    numbers = [data["sequence_number"] for _, data in sse(shown)]
    assert numbers == sorted(set(numbers))
    assert sse(shown)[-1][1]["response"]["output"] == []


@pytest.mark.parametrize(("originator", "there"), [("codex_exec", True), ("codex_cli_rs", True), ("pi", False)])
def test_codex_is_told_apart_for_its_way_with_errors(originator: str, there: bool) -> None:
    assert read(headers={"originator": originator}).hints.errors_in_stream is there
