"""The small pieces that all dialects share: fields, hints, faults, arguments, order, ids."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_common.errors import ConfigError, EngineDown, EngineError, RenderError, RequestError, Unavailable
from polar_proxy.dialects import fields as f
from polar_proxy.dialects.arguments import as_object, from_object, object_text
from polar_proxy.dialects.base import Minted, completion_of, events_of
from polar_proxy.dialects.faults import fault, token_counts
from polar_proxy.dialects.hints import hints_from
from polar_proxy.dialects.sequence import Closed, Opened, Piece, Sequence
from polar_render.base import TextDelta, ThinkingDelta, ToolCallDelta, ToolCallDone, ToolCallStarted
from polar_render.messages import Text, Thinking, ToolCall


def _path(call: Any) -> str:
    with pytest.raises(RequestError) as caught:
        call()
    assert caught.value.status == 400
    return caught.value.path


def test_wrong_types_name_their_place() -> None:
    body: f.Obj = {"s": 5, "t": True, "l": [1, "a"], "o": [{}, 3], "n": "x", "i": 1.5, "d": []}
    assert _path(lambda: f.text(body, "s", "m[0]")) == "m[0].s"
    assert _path(lambda: f.text(body, "missing")) == "missing"
    assert _path(lambda: f.text_or_none(body, "t")) == "t"
    assert _path(lambda: f.flag(body, "s")) == "s"
    assert _path(lambda: f.number(body, "t")) == "t"
    assert _path(lambda: f.number({"n": 3}, "n", high=2)) == "n"
    assert _path(lambda: f.integer_or_none(body, "i")) == "i"
    assert _path(lambda: f.integer_or_none(body, "t")) == "t"
    assert _path(lambda: f.integer({}, "max")) == "max"
    assert _path(lambda: f.integer({"max": 0}, "max", low=1)) == "max"
    assert _path(lambda: f.strings(body, "l", "p")) == "p.l[0]"
    assert _path(lambda: f.strings({"l": ["a"] * 65}, "l")) == "l"
    assert _path(lambda: f.objects(body, "o", "p")) == "p.o[1]"
    assert _path(lambda: f.items(body, "s")) == "s"
    assert _path(lambda: f.table(body, "d")) == "d"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (rb"cut amid an emoji: \ud83d", "cut amid an emoji: \ufffd"),
        (rb"\uDE00 and the other half", "\ufffd and the other half"),
        (rb"\ud83d\ude00 whole, \ud83d\ud83d\ude00", "\U0001f600 whole, \ufffd\U0001f600"),
        (rb"\\ud83d is spelled out, \\\ud83d isn't", "\\ud83d is spelled out, \\\ufffd isn't"),
    ],
)
def test_half_a_surrogate_pair_is_read_as_a_replacement_character(written: bytes, read: str) -> None:
    """Programs in JavaScript cut texts amid emojis, and write what is left."""
    assert f.load(b'{"a": "' + written + b'", "b\\udc00": 1}') == {"a": read, "b\ufffd": 1}


def test_arguments_with_half_a_surrogate_pair_are_an_object() -> None:
    assert as_object('{"a": "\\ud83d"}') == {"a": "\ufffd"}


def test_null_is_missing() -> None:
    body: f.Obj = {"x": None}
    assert f.text_or_none(body, "x") is None
    assert f.flag(body, "x") is None
    assert f.number(body, "x") is None
    assert f.integer_or_none(body, "x") is None
    assert f.items(body, "x") == []
    assert f.strings(body, "x") == ()
    assert f.table(body, "x") is None


def test_whole_floats_are_integers() -> None:
    assert f.integer_or_none({"k": 40.0}, "k") == 40
    assert f.strings({"stop": "END"}, "stop") == ("END",)


def test_unheard_keys_are_noted_once_and_empty_ones_never() -> None:
    seen = f.Seen()
    for _ in range(3):
        seen.extra({"a": 1, "b": 2, "c": None, "d": [], "e": ""}, f.keys("a"), "m[*]")
    seen.extra({"z": False}, frozenset())
    assert seen.paths() == ("m[*].b", "z")


def test_fingerprints_tell_values_apart() -> None:
    assert f.fingerprint("m", (Text("a"),)) == f.fingerprint("m", (Text("a"),))
    assert f.fingerprint("m", (Text("a"),)) != f.fingerprint("m", (Thinking("a"),))


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({"x-stainless-retry-count": "2"}, {"retry": 2}),
        ({"x-stainless-retry-count": "-1"}, {"retry": 0}),
        ({"x-stainless-retry-count": "²"}, {"retry": 0}),
        ({"x-claude-code-agent-id": "a1"}, {"agent": "a1"}),
        ({"x-session-id": "c", "x-parent-session-id": "p"}, {"agent": "c", "parent_agent": "p"}),
        (
            {"thread-id": "t", "x-codex-parent-thread-id": "p", "x-openai-subagent": "collab_spawn"},
            {"agent": "t", "parent_agent": "p", "request_kind": "collab_spawn"},
        ),
        ({"x-codex-turn-metadata": '{"request_kind":"compaction"}'}, {"request_kind": "compaction"}),
        ({"x-codex-turn-metadata": '{"request_kind":"turn","parent_thread_id":"p"}'}, {"parent_agent": "p"}),
        ({"x-codex-turn-metadata": "not json"}, {"request_kind": ""}),
        ({"x-codex-turn-metadata": "[1]"}, {"request_kind": ""}),
        (
            {"x-codex-turn-metadata": '{"request_kind":5,"parent_thread_id":[]}'},
            {"request_kind": "", "parent_agent": ""},
        ),
        ({"conversation_id": "c", "session_id": "s"}, {"agent": "s"}),
        ({}, {"agent": "", "retry": 0}),
    ],
)
def test_hints(headers: dict[str, str], wanted: dict[str, Any]) -> None:
    hints = hints_from(headers)
    assert {key: getattr(hints, key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("x", status=418), 418),
        (RequestError("x", status=0), 400),
        (RenderError("no tools here"), 400),
        (EngineError("odd"), 500),
        (EngineDown("x", status=404), 502),
        (Unavailable("log"), 503),
        (ConfigError("x"), 500),
    ],
)
def test_faults(error: Any, status: int) -> None:
    assert fault(error).status == status
    assert fault(error).retryable == (status >= 500)


@pytest.mark.parametrize(
    ("message", "counts"),
    [
        (
            "maximum context length is 8192 tokens. However, you requested 9000 tokens (8500 in the messages)",
            (9000, 8192),
        ),
        ("the request has 9000 tokens, the model takes 8192", (9000, 8192)),
        ("prompt of 9000 tokens", None),
        ("too long", None),
        ("gpt-4.1: 10 of 10", None),
    ],
)
def test_token_counts(message: str, counts: tuple[int, int] | None) -> None:
    assert token_counts(message) == counts


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("", {}),
        ("  ", {}),
        ("{}", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": ', {"_raw": '{"a": '}),
        ("[1]", {"_raw": "[1]"}),
        ('"x"', {"_raw": '"x"'}),
        ("null", {"_raw": "null"}),
    ],
)
def test_arguments_as_objects(arguments: str, value: Any) -> None:
    assert as_object(arguments) == value
    text = object_text(arguments)
    assert (f.load(text.encode()) if text else {}) == value
    if "_raw" in value:
        assert from_object(value) == arguments


@given(st.text())
def test_any_arguments_survive_an_object(arguments: str) -> None:
    back = from_object(as_object(arguments))
    assert back == arguments or as_object(back) == as_object(arguments)


@pytest.mark.parametrize("value", [{"_raw": 5}, {"_raw": "x", "b": 1}, {"_raw": '{"a":1}'}])
def test_a_tools_own_raw_field_is_left_alone(value: Any) -> None:
    assert as_object(from_object(value)) == value


def test_ids_lead_back_to_their_completion() -> None:
    minted = Minted("run_1-x_9", 0)
    made = [minted.tool_id(12), minted.item_id(0), minted.signature(3)]
    made += [f"{prefix}{minted.message_id()}" for prefix in ("chatcmpl-", "msg_", "resp_")]
    assert {completion_of(one) for one in made} == {"run_1-x_9"}
    for foreign in ("", "toolu_1", "call_", "call_abc", "call_ab_c", "fc_1", "c2ln", "rs_1"):
        assert completion_of(foreign) == ""


def test_a_recorded_answer_becomes_events() -> None:
    parts = (Thinking("t"), Text("x"), ToolCall("id", "a", "{}"), ToolCall("id", "b", "", "ns", True))
    assert events_of(parts) == [
        ThinkingDelta("t"),
        TextDelta("x"),
        ToolCallStarted(0, "a"),
        ToolCallDelta(0, "{}"),
        ToolCallDone(0, 0),
        ToolCallStarted(1, "b", "ns", True),
        ToolCallDelta(1, ""),
        ToolCallDone(1, 0),
    ]


def test_items_are_put_in_order() -> None:
    order = Sequence()
    events = [
        TextDelta("a"),
        ToolCallStarted(0, "x"),
        ToolCallStarted(1, "y"),
        ToolCallDelta(1, "2"),
        ToolCallDelta(0, "1"),
        TextDelta("b"),
        ToolCallDone(0, 1),
        ToolCallDone(1, 2),
        TextDelta("c"),
        TextDelta(""),
        ThinkingDelta("d"),
    ]
    steps = [step for event in events for step in order.feed(event)] + list(order.finish())
    assert steps == [
        Opened("text"),
        Piece("text", "a"),
        Closed("text"),
        Opened("tool", ToolCallStarted(0, "x")),
        Piece("tool", "1"),
        Closed("tool"),
        Opened("tool", ToolCallStarted(1, "y")),
        Piece("tool", "2"),
        Closed("tool"),
        Opened("text"),
        Piece("text", "b"),
        Piece("text", "c"),
        Closed("text"),
        Opened("thinking"),
        Piece("thinking", "d"),
        Closed("thinking", cut=True),
    ]


def test_calls_that_never_end_are_closed_one_after_the_other() -> None:
    order = Sequence()
    events = [ToolCallStarted(0, "x"), ToolCallStarted(1, "y"), ToolCallDelta(1, "2"), TextDelta("t")]
    steps = [step for event in events for step in order.feed(event)] + list(order.finish())
    assert [type(step).__name__ for step in steps] == [
        "Opened", "Closed", "Opened", "Piece", "Closed", "Opened", "Piece", "Closed",
    ]  # fmt: skip
