"""Any request, however broken, is either understood or refused with a RequestError; nothing else ever comes out."""

from __future__ import annotations

import copy
from typing import Any

import orjson
import pytest
from dialect_cases import CASES, Case, parse
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polar_common.errors import RequestError
from polar_proxy.dialects import route
from polar_render.messages import from_json, to_json

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
_words = st.sampled_from(
    ["", "tool", "user", "text", "image", "custom", "function", "thinking", "tool_result", "reasoning", "message",
     "namespace", "json_schema", "allowed_tools", "item_reference", "data:image/png;base64,", "_raw", "assistant"]
)  # fmt: skip
_keys = st.sampled_from(
    ["type", "role", "content", "name", "id", "text", "image_url", "source", "input", "arguments", "tools", "parts",
     "function_call", "tool_choice", "logit_bias", "stop", "n", "output", "summary", "format", "system", "thinking",
     "inline_data", "functionResponse", "response_format", "include", "encrypted_content", "thoughtSignature"]
)  # fmt: skip
_change = st.tuples(
    st.integers(0, 10**6), st.sampled_from(["set", "delete", "add", "wrap", "double"]), _keys, _json | _words
)


def _places(node: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(container, key) of everything within."""
    inner = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in list(inner):
        found.append((node, key))
        if isinstance(value, dict | list):
            _places(value, found)
    return found


def _mutate(body: dict[str, Any], change: tuple[int, str, str, Any]) -> None:
    number, kind, key, value = change
    places = _places(body, [])
    if not places:
        return
    holder, at = places[number % len(places)]
    if kind == "delete":
        del holder[at]
    elif kind == "add" and isinstance(holder[at], dict):
        holder[at][key] = value
    elif kind == "wrap":
        holder[at] = [holder[at]] if number % 2 else {key: holder[at]}
    elif kind == "double" and isinstance(holder, list):
        holder.insert(at, copy.deepcopy(holder[at]))
    else:
        holder[at] = value


def _survives(case: Case, body: bytes) -> None:
    try:
        dialect, request = parse(case, body)
    except RequestError as error:
        dialect, found = route("POST", case.path, case.query, case.headers)
        status, _, answer = dialect.error(error)
        assert status == 400
        assert isinstance(orjson.loads(answer), dict)
        assert found.kind == "generate"
    else:
        for message in request.messages:
            assert from_json(to_json(message)) == message
        assert len(request.raw_hash) == 32


@settings(max_examples=2000, deadline=None)
@given(case=st.sampled_from(list(CASES.values())), changes=st.lists(_change, min_size=1, max_size=4))
def test_a_changed_request_is_understood_or_refused(case: Case, changes: list[tuple[int, str, str, Any]]) -> None:
    body = copy.deepcopy(case.body)
    for change in changes:
        _mutate(body, change)
    _survives(case, orjson.dumps(body))


@settings(max_examples=300, deadline=None)
@given(case=st.sampled_from(list(CASES.values())), body=st.binary(max_size=60) | _json.map(orjson.dumps))
@example(case=CASES["mini"], body=b"")
@example(case=CASES["mini"], body=b"\xff\xfe")
@example(case=CASES["mini"], body=b'{"model": "\\ud800"}')
def test_any_bytes_are_refused_cleanly(case: Case, body: bytes) -> None:
    _survives(case, body)


@settings(max_examples=200, deadline=None)
@given(
    method=st.sampled_from(["GET", "POST", "HEAD", "DELETE", "PUT"]),
    path=st.text("/v1beta:messagodlrspcnhu.%{}é", max_size=40).map(lambda text: "/" + text),
    headers=st.dictionaries(st.sampled_from(["anthropic-version", "x-goog-api-key", "x-api-key"]), st.text(max_size=3)),
)
def test_any_request_line_finds_somebody_to_answer(method: str, path: str, headers: dict[str, str]) -> None:
    dialect, found = route(method, path, {}, headers)
    assert found.dialect == dialect.name
    assert dialect.error(RequestError("no such endpoint", status=404))[0] == 404


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("depth", [90, 101, 250, 500, 1100, 20000])
def test_deep_nesting_is_refused_with_its_place(case: Case, depth: int) -> None:
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    body = orjson.dumps({**case.body, "extra": "HERE"}).replace(b'"HERE"', deep)
    if depth < 100:
        assert any(path.startswith("extra") for path in parse(case, body)[1].dropped)
        return
    with pytest.raises(RequestError) as refused:
        parse(case, body)
    assert refused.value.status == 400
    if depth < 1000:
        assert refused.value.path.startswith("extra.a.a")
