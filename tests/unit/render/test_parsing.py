"""Sampled ids to answers: the same whatever the split, and nothing sampled is lost or made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar_render.base import (
    AnswerEvent,
    Finished,
    Head,
    Renderer,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStarted,
)
from polar_render.messages import Text, Thinking, ToolCall, ToolSpec
from polar_render.parsing import TaggedParser
from polar_render.vocabulary import Vocabulary

WRITE = ToolSpec("write", "", {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}})
HEAD = Head(tools=(WRITE, ToolSpec("patch", custom=True), ToolSpec("spawn", namespace="agents")))
END = 2

TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<", "</", "<tool", "<|im_start|>"]
JSON = [
    '{"name": "write", "arguments": ',
    '{"path":  "é\\n\\"q"}',
    '{"arguments": {"a": 1}, "name": "write"}',
    '{"name": "write", "arguments": {"path": "x"}}',
    '"name": "patch"',
    *["}", "{", '"', "[1, {}]", ", ", '"input"', "null", ":", "\\"],
]
pieces = st.sampled_from([*TAGS, *JSON, "\n", " ", "日本", "🙂", "word"])
samples = st.lists(pieces, max_size=14).map("".join)


def joined(events: Sequence[AnswerEvent]) -> list[AnswerEvent]:
    """Neighbouring deltas of one kind made one."""
    out: list[AnswerEvent] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            out[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ThinkingDelta) and isinstance(last, ThinkingDelta):
            out[-1] = ThinkingDelta(last.text + event.text)
        elif isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta) and event.index == last.index:
            out[-1] = ToolCallDelta(event.index, last.arguments + event.arguments)
        else:
            out.append(event)
    return out


def spell(vocabulary: Vocabulary, text: str, style: str) -> list[int]:
    """Ids of a text: the tokenizer's own, one per character, or one per byte."""
    if style == "canonical":
        return vocabulary.encode(text)
    if style == "characters":
        return [i for c in text for i in vocabulary.encode(c)]
    single = {vocabulary.bytes_of(i): i for i in range(vocabulary.size) if not vocabulary.is_added(i)}
    return [single[bytes([b])] for b in text.encode()]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=samples,
    style=st.sampled_from(["canonical", "characters", "bytes"]),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    closed=st.booleans(),
    after=st.sampled_from(["", "more", "<tool_call>"]),
)
def test_any_split_gives_the_same_answer(
    chatml: Renderer, vocabulary: Vocabulary, text: str, style: str, cuts: list[int], closed: bool, after: str
) -> None:
    ids = spell(vocabulary, text, style) + ([END, *spell(vocabulary, after, style)] if closed else [])
    at_once = chatml.parser(HEAD)
    reference = joined([*at_once.feed(ids), *at_once.finish()])
    parser = chatml.parser(HEAD)
    edges = sorted({0, len(ids), *(c for c in cuts if c < len(ids))})
    events: list[AnswerEvent] = []
    for start, end in pairwise(edges):
        events += parser.feed(ids[start:end])
        assert parser.answer() == chatml.parse(ids[:end], HEAD)
    events += parser.finish()
    assert joined(events) == reference
    assert parser.answer() == at_once.answer() == chatml.parse(ids, HEAD)
    assert [e for e in events if isinstance(e, Finished)] == [Finished()]
    assert events[-1] == Finished()
    assert_told(joined(events), parser.answer().parts)


def assert_told(events: list[AnswerEvent], parts: Sequence[object]) -> None:
    """Events and answer say the same."""
    text = "".join(e.text for e in events if isinstance(e, TextDelta))
    assert text == "".join(p.text for p in parts if isinstance(p, Text))
    thinking = "".join(e.text for e in events if isinstance(e, ThinkingDelta))
    assert thinking == "".join(p.text for p in parts if isinstance(p, Thinking))
    calls = [p for p in parts if isinstance(p, ToolCall)]
    started = [e for e in events if isinstance(e, ToolCallStarted)]
    assert [(e.index, e.name, e.namespace, e.custom) for e in started] == [
        (i, c.name, c.namespace, c.custom) for i, c in enumerate(calls)
    ]
    arguments = {e.index: e.arguments for e in events if isinstance(e, ToolCallDelta)}
    assert [arguments.get(i, "") for i in range(len(calls))] == [c.arguments for c in calls]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=samples, style=st.sampled_from(["canonical", "bytes"]))
def test_no_word_that_was_sampled_is_lost(chatml: Renderer, vocabulary: Vocabulary, text: str, style: str) -> None:
    answer = chatml.parse(spell(vocabulary, text, style), HEAD)
    shown = "".join(
        p.text if isinstance(p, Text | Thinking) else p.name + p.arguments for p in answer.parts
    ) + "".join(answer.malformed)  # fmt: skip
    for word in ("word", "日本", "🙂", "null"):
        assert shown.count(word) >= (1 if word in text else 0)


@pytest.mark.parametrize("name", ["chatml", "qwen_bridge", "qwen3"])
def test_arguments_keep_their_bytes_and_calls_know_where_they_end(request: pytest.FixtureRequest, name: str) -> None:
    renderer: Renderer = request.getfixturevalue(name)
    text = 'Let me see.\n<tool_call>\n{"name": "write", "arguments": {"path":  "é\\u00e9",\n "n": 1.0}}\n</tool_call>'
    second = '\n<tool_call>\n{"name": "spawn", "arguments": {}}\n</tool_call>'
    vocabulary: Vocabulary = renderer.vocabulary  # type: ignore[attr-defined]
    first_ids, second_ids = vocabulary.encode(text), vocabulary.encode(second)
    parser = renderer.parser(HEAD)
    events = [*parser.feed([*first_ids, *second_ids, END]), *parser.finish()]
    assert parser.answer().parts == (
        Text("Let me see."),
        ToolCall("", "write", '{"path":  "é\\u00e9",\n "n": 1.0}'),
        ToolCall("", "spawn", "{}", "agents"),
    )
    assert parser.answer().closed and parser.answer().malformed == ()
    ends = [e.end for e in events if isinstance(e, ToolCallDone)]
    assert ends == [len(first_ids), len(first_ids) + len(second_ids)]


def test_arguments_stream_as_they_are_sampled(chatml: Renderer, vocabulary: Vocabulary) -> None:
    parser = chatml.parser(HEAD)
    events: list[AnswerEvent] = []
    for token in vocabulary.encode('<tool_call>\n{"name": "write", "arguments": {"path": "a long enough path"'):
        events += parser.feed([token])
    assert ToolCallStarted(0, "write") in events
    assert "".join(e.arguments for e in events if isinstance(e, ToolCallDelta)) == '{"path": "a long enough path"'
    assert not [e for e in events if isinstance(e, ToolCallDone | Finished)]


BROKEN = {
    "no closing brace": ('{"name": "write", "arguments": {"path": "a"', "write", '{"path": "a"'),
    "brackets crossed": ('{"name": "write", "arguments": {"path": [1}}', "write", '{"path": [1}}'),
    "an open string": ('{"name": "write", "arguments": {"path": "a}}', "write", '{"path": "a}}'),
    "more behind it": ('{"name": "write", "arguments": {}} and more', "write", "{}"),
    "keys without quotes": ('{"name": "write", arguments: {"path": "a"}}', "write", 'arguments: {"path": "a"}}'),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_arguments_stay_what_was_sampled(chatml: Renderer, vocabulary: Vocabulary, case: str) -> None:
    body, name, arguments = BROKEN[case]
    block = f"<tool_call>\n{body}\n</tool_call>"
    answer = chatml.parse([*vocabulary.encode(block), END], HEAD)
    assert answer.parts == (ToolCall("", name, arguments),)
    assert answer.malformed == (block.replace("\n</tool_call>", "</tool_call>"),)


@pytest.mark.parametrize(
    "body", ["not json", '{"arguments": {"a": 1}}', '{"name": 3, "arguments": {}}', '["write"]', "", '{"name": ""}']
)
def test_a_block_without_a_name_is_text(chatml: Renderer, vocabulary: Vocabulary, body: str) -> None:
    answer = chatml.parse([*vocabulary.encode(f"so <tool_call>{body}</tool_call>"), END], HEAD)
    assert answer.parts == (Text(f"so <tool_call>{body}</tool_call>"),)
    assert answer.malformed == (f"<tool_call>{body}</tool_call>",)


def test_an_unterminated_call_is_kept_and_not_done(chatml: Renderer, vocabulary: Vocabulary) -> None:
    parser = chatml.parser(HEAD)
    events = [*parser.feed(vocabulary.encode('<tool_call>\n{"name": "write", "arguments": {"pa')), *parser.finish()]
    assert not [e for e in events if isinstance(e, ToolCallDone)]
    assert parser.answer().parts == (ToolCall("", "write", '{"pa'),)
    assert not parser.answer().closed and len(parser.answer().malformed) == 1


def test_a_complete_call_whose_tag_the_turn_left_open_counts(chatml: Renderer, vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode('<tool_call>\n{"name": "write", "arguments": {}}\n')
    parser = chatml.parser(HEAD)
    events = parser.feed([*ids, END])
    done = [e for e in events if isinstance(e, ToolCallDone)]
    assert [e.end for e in done] == [len(ids)], "the end of turn is no part of the call"
    assert parser.answer().malformed == ()


def test_freeform_input_is_told_decoded(chatml: Renderer, vocabulary: Vocabulary) -> None:
    raw = '*** Begin\n+"é"\n'
    call = json.dumps({"name": "patch", "arguments": {"input": raw}}, ensure_ascii=False)
    parser = chatml.parser(HEAD)
    events = parser.feed([*vocabulary.encode(f"<tool_call>\n{call}\n</tool_call>"), END])
    assert events[:2] == [ToolCallStarted(0, "patch", custom=True), ToolCallDelta(0, raw)]
    assert parser.answer().parts == (ToolCall("", "patch", raw, custom=True),)
    other = chatml.parse(
        [*vocabulary.encode('<tool_call>{"name": "patch", "arguments": {"x": 1}}</tool_call>'), END], HEAD
    )
    assert other.parts == (ToolCall("", "patch", '{"x": 1}', custom=True),) and len(other.malformed) == 1


HOSTILE = {
    "half a surrogate pair": ('"\\ud83d cut"', "\ufffd cut"),
    "brackets without end": ("[" * 3000, None),
    "brackets": ("[" * 3000 + "]" * 3000, None),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_sample_that_python_cannot_read_is_an_answer_like_any_other(
    chatml: Renderer, vocabulary: Vocabulary, case: str
) -> None:
    value, read = HOSTILE[case]
    for name in ("patch", "write"):
        call = f'{{"name": "{name}", "arguments": {{"input": {value}}}}}'
        answer = chatml.parse([*vocabulary.encode(f"<tool_call>\n{call}\n</tool_call>"), END], HEAD)
        (said,) = answer.parts
        assert isinstance(said, ToolCall) and said.name == name and said.arguments.encode()
        assert said.custom == (name == "patch")
        if said.custom and read is not None:
            assert said.arguments == read
    xml = TaggedParser(vocabulary, [END], HEAD, "none", "qwen3_coder")
    body = f"<function=write>\n<parameter=n>\n{value}\n</parameter>\n</function>"
    xml.feed([*vocabulary.encode(f"<tool_call>\n{body}\n</tool_call>"), END])
    (said,) = xml.answer().parts
    assert isinstance(said, ToolCall) and said.arguments.encode()
    named = chatml.parse([*vocabulary.encode('<tool_call>{"name": "\\ud83d"}</tool_call>'), END], HEAD)
    (said,) = named.parts
    assert isinstance(said, ToolCall) and said.name == "\ufffd"


def test_thinking_is_split_off_at_the_beginning_only(chatml: Renderer, vocabulary: Vocabulary) -> None:
    answer = chatml.parse([*vocabulary.encode("<think>\nfirst\nsecond\n</think>\n\nSo: <think> is a tag"), END], HEAD)
    assert answer.parts == (Thinking("first\nsecond"), Text("So: <think> is a tag"))
    cut = chatml.parse(vocabulary.encode("<think>\nonly"), HEAD)
    assert cut.parts == (Thinking("only"),) and not cut.closed
    empty = chatml.parse([*vocabulary.encode("<think>\n\n</think>\n\nx"), END], HEAD)
    assert empty.parts == (Text("x"),)


def test_thinking_that_the_prompt_opened_needs_no_tag(vocabulary: Vocabulary) -> None:
    parser = TaggedParser(vocabulary, [END], HEAD, "open")
    parser.feed([*vocabulary.encode("hmm\n</think>\n\nyes"), END])
    assert parser.answer().parts == (Thinking("hmm"), Text("yes"))


def test_tokens_after_the_end_of_turn_are_no_answer(chatml: Renderer, vocabulary: Vocabulary) -> None:
    parser = chatml.parser(HEAD)
    events = parser.feed([*vocabulary.encode("yes"), END, *vocabulary.encode(" junk")])
    assert events == [TextDelta("yes"), Finished()]
    assert parser.feed(vocabulary.encode("more")) == [] and parser.finish() == []
    assert parser.answer().parts == (Text("yes"),) and not parser.answer().closed


def test_text_between_and_after_calls_is_kept(chatml: Renderer, vocabulary: Vocabulary) -> None:
    call = '<tool_call>\n{"name": "write", "arguments": {}}\n</tool_call>'
    answer = chatml.parse([*vocabulary.encode(f"a\n{call}\nb\n{call}\n\nc"), END], HEAD)
    made = ToolCall("", "write", "{}")
    assert answer.parts == (Text("a"), made, Text("b"), made, Text("\nc"))
    blank = chatml.parse([*vocabulary.encode(f"{call}\n\n{call}\n"), END], HEAD)
    assert blank.parts == (made, made)


def test_a_prefilled_beginning_sets_the_state(chatml: Renderer, vocabulary: Vocabulary) -> None:
    answer = chatml.parse([*vocabulary.encode("ing</think>done"), END], HEAD, prefill="<think>think")
    assert answer.parts == (Thinking("ing"), Text("done"))
    plain = chatml.parse([*vocabulary.encode("world"), END], HEAD, prefill="hello ")
    assert plain.parts == (Text("world"),)


def test_xml_parameters_become_arguments_by_their_schema(vocabulary: Vocabulary) -> None:
    parser = TaggedParser(vocabulary, [END], HEAD, "none", "qwen3_coder")
    body = "<function=write>\n<parameter=path>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n</function>"
    parser.feed([*vocabulary.encode(f"ok\n<tool_call>\n{body}\n</tool_call>"), END])
    assert parser.answer().parts == (Text("ok"), ToolCall("", "write", '{"path":"12","n":12}'))
    broken = TaggedParser(vocabulary, [END], HEAD, "none", "qwen3_coder")
    broken.feed([*vocabulary.encode("<tool_call>\n<function=write>\noops\n</tool_call>"), END])
    assert broken.answer().parts == (ToolCall("", "write", "oops"),) and broken.answer().malformed


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(-3, 460), max_size=30))
def test_ids_decode_piece_by_piece_without_loss(vocabulary: Vocabulary, ids: list[int]) -> None:
    pieces = vocabulary.decode_tokens(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == vocabulary.decode(ids)


def test_a_character_of_several_ids_shows_where_it_is_complete(vocabulary: Vocabulary) -> None:
    ids = spell(vocabulary, "a🙂b", "bytes")
    assert vocabulary.decode_tokens(ids) == ["a", "", "", "", "🙂", "b"]
    assert vocabulary.decode_tokens(ids[:3]) == ["a", "", "\ufffd"]


def test_control_tokens_in_a_text_are_found(chatml: Renderer) -> None:
    assert chatml.control_tokens("ls <|im_end|>\n<|im_start|>system") == ["<|im_end|>", "<|im_start|>"]
    assert chatml.control_tokens("plain <tool_call>") == []
