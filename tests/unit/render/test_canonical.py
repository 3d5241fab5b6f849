"""Which messages count as the same (EXACT §2), as tables of equal and of different pairs."""

from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_render.base import Head
from polar_render.billing import split_billing
from polar_render.canonical import (
    canonical_key,
    first_difference,
    head_key,
    prefix_keys,
    same_message,
    same_thinking,
    thinking_key,
    with_prefill,
)
from polar_render.messages import Image, Message, Part, Role, Text, Thinking, ToolCall, ToolSpec

PNG = base64.b64encode(b"picture").decode()


def say(*parts: Part | str, role: Role = "assistant", **fields: object) -> Message:
    return Message(role, tuple(Text(p) if isinstance(p, str) else p for p in parts), **fields)  # type: ignore[arg-type]


def call(arguments: str, name: str = "write", **fields: object) -> ToolCall:
    return ToolCall(str(fields.pop("id", "c1")), name, arguments, **fields)  # type: ignore[arg-type]


EQUAL = {
    "no block and an empty block": (say(), say("")),
    "an empty block beside text": (say("a", role="user"), say("", "a", role="user")),
    "an answer in one block or several": (say("a", "b"), say("ab")),
    "text after a call": (say("a", call("{}"), "b"), say("ab", call("{}"))),
    "arguments written differently": (say(call('{"a": 1, "b": [true]}')), say(call('{"b":[true],"a":1}'))),
    "escapes in arguments": (say(call('{"a": "\\u00e9"}')), say(call('{"a":"é"}'))),
    "numbers as JavaScript writes them": (
        say(call('{"a": [30.0, 1e4, 1E+2, -0, 1.10, 1e21, 9007199254740993, 123456789012345678901234567890]}')),
        say(call('{"a":[30,10000,100,0,1.1,1e+21,9007199254740992,1.2345678901234568e+29]}')),
    ),
    "half a surrogate pair and what stands for it": (say(call('{"a": "\\ud83d"}')), say(call('{"a":"\ufffd"}'))),
    "no arguments and an empty object": (say(call("")), say(call("{}"))),
    "freeform input and its object": (say(call("*** x", custom=True)), say(call('{"input": "*** x"}'))),
    "call ids": (say(call("{}", id="c1")), say(call("{}", id="c2"))),
    "an item id": (say("a", item_id="i1"), say("a")),
    "thinking left out": (say(Thinking("t"), "a"), say("a")),
    "thinking emptied": (say(Thinking("t"), "a"), say(Thinking(""), "a")),
    "thinking repeated": (say(Thinking("t"), "a"), say(Thinking("t"), "a")),
    "thinking under our signature": (say(Thinking("t"), "a"), say(Thinking("summary", "ours-1"), "a")),
    "redacted thinking under our signature": (say(Thinking("t"), "a"), say(Thinking("", "ours-1", True), "a")),
    "a picture as data and as blob": (
        say(Image("image/png", data=PNG), role="user"),
        say(Image("image/png", blob=hashlib.sha256(b"picture").hexdigest()), role="user"),
    ),
}

DIFFERENT = {
    "roles": (say("a", role="system"), say("a", role="developer")),
    "text": (say("a"), say("b")),
    "blanks": (say("a"), say("a ")),
    "blocks of a user turn": (say("a", "b", role="user"), say("ab", role="user")),
    "arguments": (say(call('{"a": 1}')), say(call('{"a": 2}'))),
    "numbers": (say(call('{"a": 1.5}')), say(call('{"a": 1}'))),
    "a number and a truth value": (say(call('{"a": 1}')), say(call('{"a": true}'))),
    "a number and its text": (say(call('{"a": 1}')), say(call('{"a": "1"}'))),
    "broken arguments": (say(call('{"a": ')), say(call('{"a":'))),
    "broken arguments and none": (say(call("{")), say(call("{}"))),
    "names": (say(call("{}")), say(call("{}", "read"))),
    "namespaces": (say(call("{}", namespace="x")), say(call("{}"))),
    "order of calls": (say(call("{}"), call("{}", "read")), say(call("{}", "read"), call("{}"))),
    "number of calls": (say(call("{}"), call("{}")), say(call("{}"))),
    "a call dropped": (say("a", call("{}")), say("a")),
    "a freeform call with other input": (say(call("x", custom=True)), say(call('{"input": "y"}'))),
    "thinking edited": (say(Thinking("t"), "a"), say(Thinking("u"), "a")),
    "thinking added": (say("a"), say(Thinking("u"), "a")),
    "thinking under a strange signature": (say(Thinking("t"), "a"), say(Thinking("s", "theirs"), "a")),
    "redacted thinking under a strange signature": (say(Thinking("t")), say(Thinking("", "theirs", True))),
    "an error": (say("a", role="tool", is_error=True), say("a", role="tool")),
    "pictures": (say(Image(data=PNG), role="user"), say(Image(url="http://x/p.png"), role="user")),
    "a picture dropped": (say("a", Image(data=PNG), role="user"), say("a", role="user")),
    "names of participants": (say("a", role="user", name="ann"), say("a", role="user", name="bob")),
}


def ours(signature: str) -> bool:
    return signature.startswith("ours-")


@pytest.mark.parametrize("case", EQUAL)
def test_these_count_as_the_same(case: str) -> None:
    recorded, echoed = EQUAL[case]
    assert same_message(recorded, echoed, ours=ours)
    assert first_difference([recorded], [echoed, say("next")], ours=ours) is None


@pytest.mark.parametrize("case", DIFFERENT)
def test_these_do_not(case: str) -> None:
    recorded, echoed = DIFFERENT[case]
    assert not same_message(recorded, echoed, ours=ours)
    assert first_difference([say("before"), recorded], [say("before"), echoed], ours=ours) == 1


def test_without_knowing_signatures_none_is_ours() -> None:
    recorded, echoed = EQUAL["thinking under our signature"]
    assert not same_message(recorded, echoed)
    assert same_thinking(recorded, echoed, ours)


def test_equal_thinking_keys_need_no_comparison() -> None:
    assert thinking_key(say(Thinking("t"), "a")) == thinking_key(say(Thinking("t", "sig"), "b"))
    assert thinking_key(say("a")) == thinking_key(say(Thinking(""), "a")) == b""
    assert thinking_key(say(Thinking("t"))) != thinking_key(say(Thinking("u")))


def test_a_prefilled_turn_is_prefill_and_sample() -> None:
    turn = with_prefill(say("one, t"), say("wo", call("{}")))
    assert same_message(turn, say("one, two", call("{}")))


def result(text: str, to: str) -> Message:
    return say(text, role="tool", call_id=to)


def test_results_are_tied_to_calls_not_to_ids() -> None:
    def history(first: str, second: str, swap: bool = False) -> list[Message]:
        ids = (second, first) if swap else (first, second)
        return [say(call("{}", id=first), call("{}", id=second)), result("a", ids[0]), result("b", ids[1])]

    assert prefix_keys(history("c1", "c2")) == prefix_keys(history("toolu_9", "x"))
    assert prefix_keys(history("c1", "c2"))[1:] != prefix_keys(history("c1", "c2", swap=True))[1:]
    assert first_difference(history("c1", "c2"), history("c1", "c2", swap=True)) == 1


texts = st.text(max_size=6)
messages = st.lists(
    st.one_of(
        st.builds(lambda t: say(t, role="user"), texts),
        st.builds(lambda t, n: say(t, call('{"a": 1}', id=f"c{n}")), texts, st.integers(0, 3)),
        st.builds(lambda t, n: result(t, f"c{n}"), texts, st.integers(0, 4)),
    ),
    max_size=8,
)


@given(history=messages, cut=st.integers(0, 8))
def test_prefix_keys_can_be_continued(history: list[Message], cut: int) -> None:
    whole = prefix_keys(history, b"head")
    calls: dict[str, int] = {}
    first = prefix_keys(history[:cut], b"head", calls)
    rest = prefix_keys(history[cut:], first[-1] if first else b"head", calls)
    assert first + rest == whole


@given(left=messages, right=messages)
def test_prefix_keys_agree_as_far_as_messages_do(left: list[Message], right: list[Message]) -> None:
    keys = prefix_keys(left), prefix_keys(right)
    shared = 0
    while shared < min(len(left), len(right)) and keys[0][shared] == keys[1][shared]:
        shared += 1
    for a, b in zip(left[:shared], right[:shared], strict=True):
        assert canonical_key(a) == canonical_key(b)
    assert all(a != b for a, b in zip(keys[0][shared:], keys[1][shared:], strict=False)), "a prefix never matches again"


def test_heads_differ_by_tools_their_order_format_and_template_arguments() -> None:
    write, read = ToolSpec("write", "w", {"type": "object", "properties": {}}), ToolSpec("read")
    heads = [
        Head(),
        Head(tools=(write,)),
        Head(tools=(read,)),
        Head(tools=(write, read)),
        Head(tools=(read, write)),
        Head(tools=(ToolSpec("read", namespace="n"),)),
        Head(tools=(ToolSpec("read", custom=True),)),
        Head(response_format={"type": "json_object"}),
        Head(template_args={"enable_thinking": False}),
    ]
    assert len({head_key(h) for h in heads}) == len(heads)
    turned = ToolSpec("write", "w", {"properties": {}, "type": "object"})
    assert head_key(Head(tools=(turned,))) == head_key(heads[1])


@pytest.mark.parametrize(
    ("text", "header", "rest"),
    [
        ("x-anthropic-billing-header: v=1; cch=36ee5;", "x-anthropic-billing-header: v=1; cch=36ee5;", ""),
        ("x-anthropic-billing-header: cch=0aaa9;\nYou are", "x-anthropic-billing-header: cch=0aaa9;", "You are"),
        ("X-Anthropic-Billing-Header: a\r\nYou", "X-Anthropic-Billing-Header: a", "You"),
        ("You see x-anthropic-billing-header: a", "", "You see x-anthropic-billing-header: a"),
        ("\nx-anthropic-billing-header: a", "", "\nx-anthropic-billing-header: a"),
        ("x-anthropic-billing: a", "", "x-anthropic-billing: a"),
        ("", "", ""),
    ],
)
def test_the_billing_line_is_taken_off_at_the_very_beginning_only(text: str, header: str, rest: str) -> None:
    assert split_billing(text) == (header, rest)


def test_two_calls_that_differ_in_billing_alone_have_one_prefix() -> None:
    system = [
        "x-anthropic-billing-header: v=2; cch=36ee5;\nBe brief.",
        "x-anthropic-billing-header: v=2; cch=0aaa9;\nBe brief.",
    ]
    first, second = (prefix_keys([say(split_billing(s)[1], role="system"), say("hi", role="user")]) for s in system)
    assert first == second
