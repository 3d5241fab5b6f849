"""What every dialect must keep: streams equal whole answers, echoes come back, nothing unheard is unrecorded."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import orjson
import pytest
from dialect_cases import CASES, MINTED, NAMES, USAGE, call, parse, plain, reply, simple, sse, stream
from dialect_clients import COLLECT, ECHO
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_common.errors import EngineBusy, EngineDown, EngineOverflow, EngineRefused, RequestError
from polar_proxy.dialects import BY_NAME, route
from polar_proxy.dialects.base import Minted, Reply, events_of
from polar_proxy.dialects.parts import joined
from polar_render.base import (
    AnswerEvent,
    Finished,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStarted,
)
from polar_render.canonical import same_message
from polar_render.messages import Message, Part, Text, Thinking, ToolCall

_texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
_values = st.recursive(st.none() | st.booleans() | st.integers(-99, 99) | _texts, lambda v: st.lists(v, max_size=2))
_objects = st.dictionaries(_texts, _values, max_size=3)


@st.composite
def _calls(draw: st.DrawFn) -> ToolCall:
    value = draw(_objects)
    spaced = orjson.dumps(value).decode().replace(":", " : ") if draw(st.booleans()) else orjson.dumps(value).decode()
    arguments = draw(st.sampled_from([spaced, "", "{", '{"a": ', "[1]", '"text"', orjson.dumps(value).decode()]))
    return ToolCall("", draw(st.sampled_from(["bash", "edit", "Ünï"])), arguments)


_parts: st.SearchStrategy[list[Part]] = st.lists(
    st.one_of(st.builds(Text, _texts), st.builds(Thinking, _texts), _calls()), max_size=5
)


def split_events(parts: tuple[Part, ...], seed: int) -> list[AnswerEvent]:
    """The events of an answer, its texts cut anywhere."""
    rng, out = random.Random(seed), list[AnswerEvent]()
    for event in events_of(parts):
        if isinstance(event, TextDelta | ThinkingDelta):
            out += [type(event)(piece) for piece in _cut(event.text, rng)]
        elif isinstance(event, ToolCallDelta):
            out += [ToolCallDelta(event.index, piece) for piece in _cut(event.arguments, rng)]
        else:
            out.append(event)
    return [*out, Finished()]


def _cut(text: str, rng: random.Random) -> list[str]:
    pieces = []
    while text:
        size = rng.randint(0, len(text))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def ordered_for(name: str, parts: list[Part]) -> list[Part]:
    """Chat can't say where its texts stand between calls."""
    if name != "openai_chat":
        return parts
    rank = {Thinking: 0, Text: 1, ToolCall: 2}
    return sorted(parts, key=lambda part: rank[type(part)])


def shape(name: str, whole: dict[str, Any]) -> dict[str, Any]:
    if name == "openai_chat":
        choice = whole["choices"][0]
        return {"message": choice["message"], "finish_reason": choice["finish_reason"]}
    if name == "google":
        parts = [part for part in whole["candidates"][0]["content"]["parts"] if part != {"text": ""}]
        whole["candidates"][0]["content"]["parts"] = parts or [{"text": ""}]
    return whole


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=120, deadline=None)
@given(parts=_parts, seed=st.integers(0, 2**32), finish=st.sampled_from(["stop", "length"]))
def test_any_split_of_a_stream_is_the_whole_answer(name: str, parts: list[Part], seed: int, finish: Any) -> None:
    dialect, request = simple(name)
    answer = reply(*ordered_for(name, parts), finish=finish)
    events = sse(stream(dialect, request, split_events(answer.parts, seed), answer))
    whole = orjson.loads(dialect.encode([answer], request))
    got, want = COLLECT[name](events), shape(name, whole)
    if name == "openai_responses" and finish == "length" and got["output"]:
        # Whether the last item was cut can't be told from a whole answer as well as from its events.
        got["output"][-1].pop("status", None)
        want["output"][-1].pop("status", None)
    assert got == want


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=120, deadline=None)
@given(parts=_parts)
def test_an_echoed_answer_is_the_same_message(name: str, parts: list[Part]) -> None:
    dialect, request = simple(name)
    answer = reply(*ordered_for(name, parts))
    whole = orjson.loads(dialect.encode([answer], request))
    body = orjson.dumps(ECHO[name](whole))
    found = route("POST", _path(name), {}, {})[1]
    echoed = [m for m in dialect.parse(found, {}, body).messages if m.role == "assistant"]
    recorded = Message("assistant", tuple(joined(answer.parts)))
    if not recorded.parts and not echoed:
        return
    assert len(echoed) == 1
    assert same_message(recorded, echoed[0], ours=lambda signature: signature.startswith("polar.c1."))
    calls = [p.id for p in echoed[0].tool_calls]
    assert calls == [p.id for p in recorded.tool_calls]


def _path(name: str) -> str:
    return {
        "openai_chat": "/v1/chat/completions",
        "anthropic": "/v1/messages",
        "openai_responses": "/v1/responses",
        "google": "/v1beta/models/m:generateContent",
    }[name]


@pytest.mark.parametrize("name", NAMES)
def test_argument_bytes_survive_where_the_protocol_has_a_string(name: str) -> None:
    dialect, request = simple(name)
    odd = '{"location" :  "San Francisco",\n "unit": "celsius"}'
    answer = reply(call("weather", odd))
    whole = orjson.loads(dialect.encode([answer], request))
    echoed = dialect.parse(route("POST", _path(name), {}, {})[1], {}, orjson.dumps(ECHO[name](whole)))
    sent = echoed.messages[1].tool_calls[0].arguments
    assert orjson.loads(sent) == orjson.loads(odd)
    assert (sent == odd) == (name in ("openai_chat", "openai_responses"))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_answer_gives_the_same_bytes(name: str) -> None:
    dialect, request = simple(name)
    answer = reply(Thinking("hm"), Text("ok"), call("bash"))
    events = events_of(answer.parts)
    assert dialect.encode([answer], request) == dialect.encode([answer], request)
    assert stream(dialect, request, events, answer) == stream(dialect, request, events, answer)


@pytest.mark.parametrize("name", NAMES)
def test_ids_name_their_completion(name: str) -> None:
    dialect, request = simple(name)
    minted = Minted("run1-7_x", 5)
    answer = reply(Thinking("hm"), Text("ok"), call("bash"), minted=minted)
    whole = dialect.encode([answer], request)
    assert whole.count(b"run1-7_x") >= 2
    assert dialect.encode([answer], request) != dialect.encode([replace(answer, minted=MINTED)], request)


@pytest.mark.parametrize("name", NAMES)
def test_two_calls_at_once_stay_apart(name: str) -> None:
    dialect, request = simple(name)
    answer = reply(Text("Both."), call("a", '{"n": 1}'), call("b", '{"n": 2}'), Text("!"))
    interleaved: list[AnswerEvent] = [
        TextDelta("Both."),
        ToolCallStarted(0, "a"),
        ToolCallStarted(1, "b"),
        ToolCallDelta(0, '{"n"'),
        ToolCallDelta(1, '{"n"'),
        ToolCallDelta(0, ": 1}"),
        ToolCallDelta(1, ": 2}"),
        ToolCallDone(0, 5),
        ToolCallDone(1, 9),
        TextDelta("!"),
    ]
    got = COLLECT[name](sse(stream(dialect, request, interleaved, answer)))
    assert got == shape(name, orjson.loads(dialect.encode([answer], request)))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_on_which_a_client_may_act_is_free(name: str) -> None:
    dialect, request = simple(name)
    answer = reply(Thinking("hm"), Text("ok"), call("bash"))
    frames = stream(dialect, request, events_of(answer.parts), answer)
    for frame in frames:
        if frame.actionable:
            continue
        for name_, data in sse([frame]):
            assert name_ not in ("response.output_item.done", "response.completed", "message_delta", "message_stop")
            assert '"functionCall"' not in orjson.dumps(data).decode()
            if isinstance(data, dict) and "choices" in data:
                assert data["choices"][0]["finish_reason"] is None
            if name_ == "content_block_stop":
                assert data["index"] < 2
            assert data != "[DONE]"
    assert frames[-1].actionable
    assert any(b"ok" in frame.data and not frame.actionable for frame in frames)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_of_nothing_is_well_formed(name: str) -> None:
    dialect, request = simple(name)
    answer = reply()
    got = COLLECT[name](sse(stream(dialect, request, [], answer)))
    assert got == shape(name, orjson.loads(dialect.encode([answer], request)))


@pytest.mark.parametrize(("label", "case"), CASES.items(), ids=list(CASES))
def test_a_harness_request_is_heard_whole(label: str, case: Any) -> None:
    _, request = parse(case)
    assert request.dropped == case.dropped
    roles = [message.role for message in request.messages]
    if label not in ("aider", "lm_eval", "pi_anthropic"):
        assert roles[-2:] == ["assistant", "tool"]
        assert request.messages[-1].call_id == request.messages[-2].tool_calls[0].id
        assert request.tools
    assert request.raw_hash


@pytest.mark.parametrize(("label", "case"), CASES.items(), ids=list(CASES))
def test_a_repeat_is_the_same_request(label: str, case: Any) -> None:
    _, first = parse(case)
    body = {key: value for key, value in case.body.items() if key not in ("stream", "stream_options", "metadata")}
    again = orjson.loads(orjson.dumps(body).replace(b',"cache_control":{"type":"ephemeral"}', b""))
    _, second = parse(case, orjson.dumps(again))
    assert first.raw_hash == second.raw_hash
    other = orjson.dumps(case.body).replace(b"Go", b"Stop").replace(b"Write", b"Read").replace(b"Do.", b"Be.")
    assert parse(case, other.replace(b"2+2", b"3+3"))[1].raw_hash != first.raw_hash


def _headers_of(name: str, error: Exception) -> tuple[int, dict[str, str], dict[str, Any]]:
    status, headers, body = BY_NAME[name].error(error)  # type: ignore[arg-type]
    return status, headers, orjson.loads(body)


@pytest.mark.parametrize("name", NAMES)
def test_errors_keep_status_and_waiting_time(name: str) -> None:
    status, headers, body = _headers_of(name, EngineBusy("full", 429, retry_after=2.2))
    assert (status, headers["retry-after"]) == (429, "3")
    assert "full" in orjson.dumps(body).decode()
    assert _headers_of(name, EngineBusy("draining"))[1]["retry-after"] == "1"
    assert _headers_of(name, EngineDown("gone", 503))[0] == 503
    assert _headers_of(name, EngineDown("cut"))[0] == 502
    assert _headers_of(name, EngineRefused("no", 422))[0] == 422
    assert _headers_of(name, EngineRefused("odd", 200))[0] == 400
    for wanted in (401, 404, 409, 413):
        status, headers, _ = _headers_of(name, RequestError("no", status=wanted))
        assert status == wanted
        assert headers["x-should-retry"] == "false"
    assert "x-should-retry" not in _headers_of(name, EngineDown("cut"))[1]


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("openai_chat", "context_length_exceeded"),
        ("openai_responses", "context_length_exceeded"),
        ("anthropic", "prompt is too long: 9000 tokens > 8192 maximum"),
        ("google", "input token count (9000) exceeds the maximum number of tokens allowed (8192)"),
    ],
)
def test_an_overflow_is_the_providers_own(name: str, phrase: str) -> None:
    error = EngineOverflow("the context holds 8192 tokens, the request has 9000", 400)
    status, headers, body = _headers_of(name, error)
    assert status == 400
    assert phrase in orjson.dumps(body).decode()
    assert headers["x-should-retry"] == "false"


@pytest.mark.parametrize("name", NAMES)
def test_a_failing_stream_says_so(name: str) -> None:
    dialect, request = simple(name)
    encoder = dialect.encoder(request, [MINTED])
    frames = encoder.start(USAGE) + encoder.feed(TextDelta("half")) + encoder.fail(EngineDown("engine cut off"))
    assert frames[-1].actionable
    # Google's errors stand by themselves, without a `data:`.
    event, data = ("", orjson.loads(frames[-1].data)) if name == "google" else sse(frames)[-1]
    told = orjson.dumps(data).decode()
    assert "engine cut off" in told
    # Agents that see the message alone (pi) decide by these words to try again.
    assert "server error: engine cut off" in told or '"code":"server_error"' in told
    assert event == {"anthropic": "error", "openai_responses": "response.failed"}.get(name, "")


@pytest.mark.parametrize("name", NAMES)
def test_counts_and_models(name: str) -> None:
    dialect = BY_NAME[name]
    assert 1234 in orjson.loads(dialect.count(1234)).values()
    listing = orjson.loads(dialect.models(["org/m", "n"], 4096, replace(_generate(name), kind="list_models")))
    assert "org/m" in orjson.dumps(listing).decode()
    one = dialect.models(["org/m"], 4096, replace(_generate(name), kind="get_model", model="org/m"))
    assert b"org/m" in one
    with pytest.raises(RequestError) as missing:
        dialect.models(["org/m"], 4096, replace(_generate(name), kind="get_model", model="other"))
    assert missing.value.status == 404


def _generate(name: str) -> Any:
    return replace(route("POST", _path(name), {}, {})[1], model="")


def test_every_dialect_ignores_a_finish_that_it_knows() -> None:
    for name in NAMES:
        dialect, request = simple(name)
        assert dialect.encoder(request, [MINTED]).feed(Finished()) == []


def test_parts_keep_their_kind() -> None:
    answer: Reply = reply(Text("a"), Text(""), Text("b"), Thinking(""), Thinking("x"), Thinking("y"), call("t"))
    assert [plain(p)[:2] for p in joined(answer.parts)] == [
        ("text", "ab"),
        ("thinking", "xy"),
        ("call", "call_c1_0"),
    ]
