"""Continuing a conversation piece by piece gives the ids of rendering it at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar_common.errors import RenderError
from polar_render import ModelProfile, load_renderer
from polar_render.base import Head, Renderer
from polar_render.canonical import same_message
from polar_render.messages import Image, Message, Text, Thinking, ToolCall, ToolSpec, text_of

WRITE = ToolSpec("write", "writes a file", {"type": "object", "properties": {"path": {"type": "string"}}})
PATCH = ToolSpec("apply_patch", "changes files", custom=True, grammar={"syntax": "lark", "definition": "start: line+"})
SPAWN = ToolSpec("spawn", "starts an agent", {"type": "object", "properties": {}}, namespace="agents")
HEADS = [Head(), Head(tools=(WRITE, PATCH, SPAWN))]
RENDERERS = ["chatml", "qwen_bridge", "qwen3"]

words = st.text(st.sampled_from("ab é日🙂\n \t{}\"'<>/_:.,"), max_size=24)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | words, lambda inner: st.lists(inner, max_size=3), max_leaves=4
)


@st.composite
def calls(draw: st.DrawFn, number: int) -> tuple[ToolCall, ...]:
    made = []
    for index in range(draw(st.integers(0, 2))):
        arguments = draw(st.dictionaries(words, values, max_size=3))
        made.append(ToolCall(f"c{number}_{index}", "write", json.dumps(arguments, ensure_ascii=False)))
    return tuple(made)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Alternating turns: what a harness sends, and the answers between."""
    messages = [Message("system", (Text(draw(words)),))] if draw(st.booleans()) else []
    messages.append(Message("user", (Text(draw(words)),)))
    for number in range(draw(st.integers(1, 4))):
        made = draw(calls(number))
        thinking = (Thinking(draw(words.filter(str.strip)).strip()),) if draw(st.booleans()) else ()
        messages.append(Message("assistant", (*thinking, Text(draw(words)), *made)))
        messages += [Message("tool", (Text(draw(words)),), call_id=c.id, name="write") for c in made]
        if not made or draw(st.booleans()):
            messages.append(Message("user", (Text(draw(words)),)))
        if draw(st.integers(0, 4)) == 0:
            messages.append(Message("system", (Text(draw(words)),)))
    return messages


def turns(messages: list[Message]) -> list[tuple[list[Message], Message, list[Message]]]:
    """(history, answer, new) for every answer of a conversation."""
    cuts = [i for i, m in enumerate(messages) if m.role == "assistant"]
    ends = [*cuts[1:], len(messages)]
    return [(messages[:i], messages[i], messages[i + 1 : end]) for i, end in zip(cuts, ends, strict=True)]


@pytest.mark.parametrize("name", ["chatml", "qwen_bridge"])
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=conversations(), head=st.sampled_from(HEADS))
def test_growing_by_tails_equals_rendering_in_full(
    request: pytest.FixtureRequest, name: str, messages: list[Message], head: Head
) -> None:
    renderer: Renderer = request.getfixturevalue(name)
    context = renderer.render(turns(messages)[0][0], head)
    for history, answer, new in turns(messages):
        tail = renderer.tail(history, answer, new, head)
        assert tail is not None
        full = renderer.render([*history, answer, *new], head)
        assert full[-len(tail) :] == tail
        assert full[-len(tail) - 1] in renderer.stop_ids
        # Blanks at the start of an answer join the prompt's line break in one token: no sample spells that.
        joined = not answer.thinking and text_of(answer)[:1].isspace()
        assert joined or full[: len(context)] == context
        context = full


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=conversations(), head=st.sampled_from(HEADS))
def test_the_packaged_qwen3_format_continues_as_it_renders(
    qwen3: Renderer, messages: list[Message], head: Head
) -> None:
    for history, answer, new in turns(messages):
        tail = qwen3.tail(history, answer, new, head)
        assert tail is not None
        full = qwen3.render([*history, answer, *new], head)
        assert full[-len(tail) :] == tail
        assert full[-len(tail) - 1] in qwen3.stop_ids


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=conversations())
def test_a_rendered_answer_is_read_back_as_what_it_was(chatml: Renderer, messages: list[Message]) -> None:
    head = HEADS[1]
    for history, answer, new in turns(messages):
        prompt = chatml.render(history, head)
        whole = chatml.render([*history, answer, *new], head)
        tail = chatml.tail(history, answer, new, head)
        assert tail is not None
        sampled = whole[len(prompt) : -len(tail)]
        parsed = chatml.parse(sampled, head)
        read = Message("assistant", parsed.parts)
        assert parsed.closed and not parsed.malformed
        assert [c.arguments for c in read.tool_calls] == [c.arguments for c in answer.tool_calls]
        if answer.tool_calls or answer.thinking or any(p.text.strip("\n ") != p.text for p in answer.parts[:1]):  # type: ignore[union-attr]
            continue  # blanks beside tags belong to the format
        assert same_message(answer, read)


def test_the_line_break_after_the_end_of_turn_belongs_to_the_tail(chatml: Renderer) -> None:
    history, said, new = (
        [Message("user", (Text("hi"),))],
        Message("assistant", (Text("yes"),)),
        [Message("user", (Text("go on"),))],
    )
    tail = chatml.tail(history, said, new, Head())
    assert tail is not None
    assert chatml.decode(tail) == "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_a_context_keeps_prompt_sample_and_generation_prompt_of_every_turn(chatml: Renderer) -> None:
    history = [Message("user", (Text("hi"),))]
    context = chatml.render(history, Head())
    for turn in ("one", "two", "three"):
        sample = [*chatml.render(history, Head())[:0], *_ids(chatml, turn), *chatml.close_ids]
        answer, new = Message("assistant", chatml.parse(sample, Head()).parts), [Message("user", (Text("more"),))]
        tail = chatml.tail(history, answer, new, Head())
        assert tail is not None
        longer = [*context, *sample, *tail]
        history = [*history, answer, *new]
        assert longer == chatml.render(history, Head())
        assert chatml.decode(longer).endswith("<|im_start|>assistant\n")
        context = longer


def _ids(renderer: Renderer, text: str) -> list[int]:
    """Ids of a text, by way of a prefilled turn."""
    ask = [Message("user", (Text("x"),))]
    prompt = renderer.render(ask, Head())
    return renderer.render([*ask, Message("assistant", (Text(text),))], Head(), prefill=True)[len(prompt) :]


def test_an_uncanonical_split_stays_as_it_was_sampled(chatml: Renderer) -> None:
    canonical = _ids(chatml, "The quick brown fox")
    spelled = [i for letter in "The quick brown fox" for i in _ids(chatml, letter)]
    assert spelled != canonical and chatml.decode(spelled) == chatml.decode(canonical)
    history, new = [Message("user", (Text("hi"),))], [Message("user", (Text("again"),))]
    answers = [
        Message("assistant", chatml.parse([*ids, *chatml.close_ids], Head()).parts) for ids in (spelled, canonical)
    ]
    assert answers[0] == answers[1]
    tails = [chatml.tail(history, a, new, Head()) for a in answers]
    assert tails[0] == tails[1], "the tail depends on the conversation, not on how it was spelled"


def test_spaced_arguments_are_rendered_byte_for_byte(chatml: Renderer, qwen3: Renderer) -> None:
    spaced = '{"location": "San Francisco",  "unit":"celsius"}'
    call = Message("assistant", (ToolCall("c1", "write", spaced),))
    messages = [Message("user", (Text("hi"),)), call, Message("tool", (Text("ok"),), call_id="c1")]
    for renderer in (chatml, qwen3):
        assert spaced in renderer.decode(renderer.render(messages, HEADS[1]))


def test_a_template_that_walks_arguments_gets_an_object(chatml_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "items.jinja"
    file.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
        "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = load_renderer(ModelProfile("xml", chatml_dir, template=str(file)))
    call = Message("assistant", (ToolCall("c1", "write", '{"path": "a b", "n": 3}'),))
    messages = [Message("user", (Text("hi"),)), call, Message("tool", (Text("ok"),), call_id="c1")]
    text = renderer.decode(renderer.render(messages, Head()))
    assert "<parameter=path>\na b\n</parameter>" in text and "<parameter=n>\n3\n</parameter>" in text
    broken = Message("assistant", (ToolCall("c1", "write", '{"path": '),))
    with pytest.raises(RenderError):
        renderer.render([messages[0], broken, messages[2]], Head())


def test_invalid_arguments_are_rendered_raw(chatml: Renderer) -> None:
    call = Message("assistant", (ToolCall("c1", "write", '{"path": "unclosed'),))
    text = chatml.decode(chatml.render([Message("user", (Text("hi"),)), call], Head()))
    assert '"arguments": {"path": "unclosed}' in text


def test_the_thinking_of_a_turn_stays_in_a_kept_context(qwen3: Renderer) -> None:
    history, new = [Message("user", (Text("hi"),))], [Message("user", (Text("and now?"),))]
    sampled = _ids(qwen3, "<think>\na\n</think>\n\nx") + list(qwen3.close_ids)
    answer = Message("assistant", qwen3.parse(sampled, Head()).parts)
    assert answer.parts == (Thinking("a"), Text("x"))
    tail = qwen3.tail(history, answer, new, Head())
    assert tail is not None
    kept = qwen3.decode([*qwen3.render(history, Head()), *sampled, *tail])
    assert "<think>\na\n</think>" in kept and kept.endswith("<|im_start|>assistant\n")
    assert "<think>" not in qwen3.decode(qwen3.render([*history, answer, *new], Head())), (
        "the model's own rule strips it"
    )


def test_following_the_model_starts_a_new_chain_where_thinking_is_stripped(qwen_dir: Path) -> None:
    follow = load_renderer(ModelProfile("tiny", qwen_dir, renderer="qwen3", thinking="follow"))
    history, call = [Message("user", (Text("hi"),))], ToolCall("c1", "write", "{}")
    thought = Message("assistant", (Thinking("a"), call))
    assert follow.tail(history, thought, [Message("tool", (Text("ok"),), call_id="c1")], Head()) is not None
    assert follow.tail(history, thought, [Message("user", (Text("stop"),))], Head()) is None


def test_thinking_switched_off_keeps_the_empty_block_in_the_context(qwen3: Renderer) -> None:
    head = Head(template_args={"enable_thinking": False})
    history, new = [Message("user", (Text("hi"),))], [Message("user", (Text("more"),))]
    prompt = qwen3.render(history, head)
    assert qwen3.decode(prompt).endswith("<think>\n\n</think>\n\n")
    tail = qwen3.tail(history, Message("assistant", (Text("x"),)), new, head)
    assert tail is not None
    assert qwen3.decode([*prompt, *_ids(qwen3, "x"), *qwen3.close_ids, *tail]).count("<think>\n\n</think>\n\n") == 2
    with pytest.raises(RenderError, match="arguments"):
        qwen3.render(history, Head(template_args={"no_such_switch": 1}))


@pytest.mark.parametrize("name", RENDERERS)
def test_a_prefilled_turn_goes_on_where_the_request_stopped(request: pytest.FixtureRequest, name: str) -> None:
    renderer: Renderer = request.getfixturevalue(name)
    ask, begun = Message("user", (Text("count"),)), Message("assistant", (Text("one, tw"),))
    prompt = renderer.decode(renderer.render([ask, begun], Head(), prefill=True))
    assert prompt.endswith("<|im_start|>assistant\none, tw")
    tail = renderer.tail([ask], Message("assistant", (Text("no"),)), [ask, begun], Head(), prefill=True)
    assert tail is not None and renderer.decode(tail).endswith("<|im_start|>assistant\none, tw")
    with pytest.raises(RenderError, match=r"messages\[0\]"):
        renderer.render([ask], Head(), prefill=True)
    called = Message("assistant", (ToolCall("c", "write", "{}"),))
    with pytest.raises(RenderError, match=r"messages\[1\]"):
        renderer.render([ask, called], Head(), prefill=True)


@pytest.mark.parametrize("name", RENDERERS)
def test_images_are_refused_by_name(request: pytest.FixtureRequest, name: str) -> None:
    renderer: Renderer = request.getfixturevalue(name)
    picture = Message("user", (Text("look"), Image(mime="image/png", data="aGk=")))
    with pytest.raises(RenderError, match=r"messages\[1\].*image"):
        renderer.render([Message("system", (Text("s"),)), picture], Head())
    assert renderer.tail([picture], Message("assistant", (Text("ok"),)), [picture], Head()) is None


@pytest.mark.parametrize("name", RENDERERS)
def test_a_mid_conversation_system_message_stays_in_its_place(request: pytest.FixtureRequest, name: str) -> None:
    renderer: Renderer = request.getfixturevalue(name)
    ask, late = Message("user", (Text("first"),)), Message("system", (Text("later"),))
    text = renderer.decode(renderer.render([ask, late, Message("user", (Text("second"),))], Head()))
    assert text.index("first") < text.index("later") < text.index("second")


def test_a_tools_error_is_shown(chatml: Renderer) -> None:
    call = Message("assistant", (ToolCall("c1", "write", "{}"),))
    ask = Message("user", (Text("hi"),))
    failed = Message("tool", (Text("no such file"),), call_id="c1", is_error=True)
    assert "Error: no such file" in chatml.decode(chatml.render([ask, call, failed], Head()))
    spoken = Message("tool", (Text("Error: gone"),), call_id="c1", is_error=True)
    assert "Error: Error" not in chatml.decode(chatml.render([ask, call, spoken], Head()))


def test_freeform_tools_and_namespaces_reach_the_model_and_come_back(chatml: Renderer) -> None:
    head = HEADS[1]
    ask = Message("user", (Text("hi"),))
    prompt = chatml.decode(chatml.render([ask], head))
    assert "apply_patch" in prompt and "start: line+" in prompt and "agents.spawn" in prompt
    calls = (ToolCall("", "apply_patch", "*** Begin\n+é\n", custom=True), ToolCall("", "spawn", "{}", "agents"))
    answer = Message("assistant", calls)
    base, whole = chatml.render([ask], head), chatml.render([ask, answer, ask], head)
    tail = chatml.tail([ask], answer, [ask], head)
    assert tail is not None
    assert chatml.parse(whole[len(base) : -len(tail)], head).parts == calls
