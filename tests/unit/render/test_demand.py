"""Demanded calls: the grammar lets through just what the reader reads, and the reader changes nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from polar_render.demand import calls_form, demanded_calls
from polar_render.messages import Json, Text, Thinking, ToolCall, ToolSpec

WRITE = ToolSpec("write", parameters={"type": "object", "properties": {"path": {"type": "string"}}})
PATCH = ToolSpec("patch", custom=True)
SPAWN = ToolSpec("spawn", namespace="agents", parameters={"type": "object", "$defs": {"x": {"type": "string"}}})
TOOLS = (WRITE, PATCH, SPAWN)


def said(*calls: tuple[str, str]) -> str:
    return "[" + ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in calls) + "]"


_words = st.text(max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | _words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_words, inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(_words, values, max_size=3), min_size=1, max_size=3), st.sampled_from([None, 1, 3]))
def test_arguments_keep_their_bytes(arguments: list[dict[str, Any]], indent: int | None) -> None:
    written = [json.dumps(a, indent=indent) for a in arguments]
    found = demanded_calls((Text(said(*(("write", a) for a in written))),), TOOLS)
    assert found == tuple(ToolCall("", "write", a) for a in written)


def test_names_are_those_of_the_tools() -> None:
    found = demanded_calls(
        (Text(said(("agents.spawn", "{}"), ("patch", '{"input": "*** x"}'), ("other", "{}"))),), TOOLS
    )
    assert found == (
        ToolCall("", "spawn", "{}", "agents"), ToolCall("", "patch", "*** x", custom=True), ToolCall("", "other", "{}"),
    )  # fmt: skip


def test_thoughts_stay_and_a_list_inside_an_open_thought_is_found() -> None:
    call = ToolCall("", "write", "{}")
    listed = said(("write", "{}"))
    assert demanded_calls((Thinking("hm"), Text(listed)), TOOLS) == (Thinking("hm"), call)
    assert demanded_calls((Thinking(listed),), TOOLS) == (call,)


@pytest.mark.parametrize(
    "text",
    ["", "no", "[]", said(("write", "{}"))[:-1], said(("write", '{"path": "a'))[:-2], "x" + said(("write", "{}"))],
)
def test_what_isnt_a_whole_list_is_left_alone(text: str) -> None:
    assert demanded_calls((Text(text),), TOOLS) == (Text(text),)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["write", "patch", "agents.spawn", "other"]), max_size=3), st.integers(1, 3))
def test_the_grammar_lets_through_what_is_read_as_calls_of_these_tools(names: list[str], most: int) -> None:
    arguments = {"write": '{"path": "a"}', "patch": '{"input": "x"}'}
    text = said(*((name, arguments.get(name, "{}")) for name in names))
    form: Any = calls_form(TOOLS, most=most)
    valid = Draft202012Validator(form["json_schema"]["schema"]).is_valid(json.loads(text))
    assert valid == (0 < len(names) <= most and "other" not in names)
    if valid:
        found = demanded_calls((Text(text),), TOOLS)
        assert [f"{c.namespace}.{c.name}".lstrip(".") for c in found if isinstance(c, ToolCall)] == names


@pytest.mark.parametrize("arguments", ['{"path": 5}', '"a"', "[]"])
def test_the_grammar_holds_arguments_to_the_tool_s_schema(arguments: str) -> None:
    form: Any = calls_form((WRITE,))
    validator = Draft202012Validator(form["json_schema"]["schema"])
    assert not validator.is_valid(json.loads(said(("write", arguments))))


def test_the_grammar_names_every_tool_and_lifts_definitions() -> None:
    form: Any = calls_form(TOOLS, most=1)
    schema = form["json_schema"]["schema"]
    names = [c["properties"]["name"]["enum"] for c in schema["items"]["anyOf"]]
    assert names == [["write"], ["patch"], ["agents.spawn"]] and (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert schema["$defs"] == {"x": {"type": "string"}}
    inner: dict[str, Json] = schema["items"]["anyOf"][2]["properties"]["arguments"]
    assert "$defs" not in inner and "$defs" in (SPAWN.parameters or {})
