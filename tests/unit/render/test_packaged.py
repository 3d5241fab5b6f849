"""Hand-coded formats of the `renderers` package behind our contract, on tokenizers made to suit each."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import QWEN_ADDED, make_tokenizer
from polar_common.errors import RenderError
from polar_render import ModelProfile, load_renderer
from polar_render.base import Head, Renderer, TextDelta, ToolCallDelta, ToolCallDone, ToolCallStarted
from polar_render.messages import Message, Text, Thinking, ToolCall, ToolSpec


def _tokens(text: str) -> list[str]:
    return text.split()


TOKENS = {
    "qwen3.5": [*QWEN_ADDED, *_tokens("<|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>")],
    "llama-3": _tokens("<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|end_of_text|> <|eom_id|>"),
    "kimi-k2": _tokens(
        "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|> "
        "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> [BOS] [EOS]"
    ),
    "minimax-m2": _tokens("]~!b[ ]~b] [e~[ <minimax:tool_call> </minimax:tool_call> <think> </think>"),
    "glm-4.5": _tokens(
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <tool_call> </tool_call> "
        "<arg_key> </arg_key> <arg_value> </arg_value> <tool_response> </tool_response> /nothink"
    ),
}
TOOL = ToolSpec(
    "write", "writes a file", {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
)
HEAD = Head(tools=(TOOL,))
CALL = ToolCall("functions.write:0", "write", '{"path": "a.txt"}')
ASK = Message("user", (Text("please"),))
SAID = Message("assistant", (Text("sure"),))
CALLED = Message("assistant", (CALL,))
DONE = Message("tool", (Text("written"),), call_id=CALL.id, name="write")


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    made: dict[str, Renderer] = {}
    for name, tokens in TOKENS.items():
        directory: Path = make_tokenizer(tmp_path_factory.mktemp("packaged"), tokens)
        made[name] = load_renderer(ModelProfile("m", directory, renderer=name))
    return made


@pytest.mark.parametrize("name", ["qwen3.5", "llama-3", "kimi-k2", "minimax-m2"])
def test_these_are_proven_and_continue_as_they_render(packaged: dict[str, Renderer], name: str) -> None:
    renderer = packaged[name]
    assert renderer.prove().exact
    assert set(renderer.close_ids) <= set(renderer.stop_ids)
    for answer, new in ((SAID, [ASK]), (CALLED, [DONE]), (CALLED, [DONE, ASK])):
        full = renderer.render([ASK, answer, *new], HEAD)
        tail = renderer.tail([ASK], answer, new, HEAD)
        assert tail is not None and full[-len(tail) :] == tail
        assert full[-len(tail) - 1] in renderer.close_ids


@pytest.mark.parametrize("name", ["qwen3.5", "llama-3", "kimi-k2", "minimax-m2"])
def test_calls_are_read_back_in_each_format(packaged: dict[str, Renderer], name: str) -> None:
    renderer = packaged[name]
    prompt = renderer.render([ASK], HEAD)
    opened = renderer.decode(prompt).rstrip().endswith("<think>")
    called = Message("assistant", (Thinking("hm"), CALL)) if opened else CALLED
    whole, tail = renderer.render([ASK, called, DONE], HEAD), renderer.tail([ASK], called, [DONE], HEAD)
    assert tail is not None and whole[: len(prompt)] == prompt
    sampled = whole[len(prompt) : -len(tail)]
    parser = renderer.parser(HEAD)
    events = [e for token in sampled for e in parser.feed([token])] + parser.finish()
    answer = renderer.parse(sampled, HEAD)
    assert parser.answer() == answer and answer.closed and not answer.malformed
    calls = [p for p in answer.parts if isinstance(p, ToolCall)]
    assert [p.text for p in answer.parts if isinstance(p, Thinking)] == (["hm"] if opened else [])
    assert [(c.name, c.arguments.replace(" ", "")) for c in calls] == [("write", '{"path":"a.txt"}')]
    assert ToolCallStarted(0, "write") in events
    assert "".join(e.arguments for e in events if isinstance(e, ToolCallDelta)) == calls[0].arguments
    assert [e for e in events if isinstance(e, ToolCallDone)]


def test_a_native_call_id_comes_with_the_answer(packaged: dict[str, Renderer]) -> None:
    renderer = packaged["kimi-k2"]
    whole, tail = renderer.render([ASK, CALLED, DONE], HEAD), renderer.tail([ASK], CALLED, [DONE], HEAD)
    assert tail is not None
    answer = renderer.parse(whole[len(renderer.render([ASK], HEAD)) : -len(tail)], HEAD)
    assert [p.id for p in answer.parts if isinstance(p, ToolCall)] == [CALL.id]


def test_a_format_that_prints_ids_refuses_an_id_without_the_name(packaged: dict[str, Renderer]) -> None:
    strange = Message("assistant", (ToolCall("call_x1", "write", "{}"),))
    result = Message("tool", (Text("ok"),), call_id="call_x1")
    with pytest.raises(RenderError, match=r"messages\[1\]"):
        packaged["kimi-k2"].render([ASK, strange, result], Head())
    assert packaged["kimi-k2"].tail([ASK], strange, [result], Head()) is None
    assert packaged["qwen3.5"].tail([ASK], strange, [result], Head()) is not None


def test_plain_text_is_read_by_the_packages_own_parser(packaged: dict[str, Renderer]) -> None:
    renderer = packaged["llama-3"]
    ids = renderer.render([ASK, SAID, ASK], Head())
    tail = renderer.tail([ASK], SAID, [ASK], Head())
    assert tail is not None
    sampled = ids[len(renderer.render([ASK], Head())) : -len(tail)]
    parser = renderer.parser(Head())
    assert parser.feed(sampled[:-1]) == []
    assert TextDelta("sure") in parser.feed(sampled[-1:])
    assert parser.answer().parts == (Text("sure"),)


def test_a_format_that_never_thinks_takes_a_harnesss_wish_to_think(packaged: dict[str, Renderer]) -> None:
    for enabled in (True, False):
        head = Head(template_args={"enable_thinking": enabled})
        assert packaged["llama-3"].render([ASK], head) == packaged["llama-3"].render([ASK], Head())


def test_a_format_without_an_end_of_its_own_is_not_exact(packaged: dict[str, Renderer]) -> None:
    renderer = packaged["glm-4.5"]
    assert not renderer.prove().exact and renderer.close_ids == ()
    assert renderer.tail([ASK], SAID, [ASK], Head()) is None
    assert renderer.render([ASK], Head())


def test_single_call_formats_refuse_two_and_late_system_messages_are_refused(packaged: dict[str, Renderer]) -> None:
    two = Message("assistant", (CALL, ToolCall("functions.write:1", "write", "{}")))
    with pytest.raises(RenderError, match=r"messages\[1\]: parallel"):
        packaged["llama-3"].render([ASK, two], HEAD)
    with pytest.raises(RenderError, match=r"messages\[1\]: text beside calls"):
        packaged["llama-3"].render([ASK, Message("assistant", (Text("so"), CALL)), DONE], HEAD)
    with pytest.raises(RenderError, match=r"messages\[1\]: mid system"):
        packaged["qwen3.5"].render([ASK, Message("system", (Text("late"),)), ASK], Head())
