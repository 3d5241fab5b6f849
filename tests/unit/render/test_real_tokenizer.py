"""The small real model's own tokenizer: what it proves with its own template, and with ours."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from polar_common.errors import RenderError
from polar_render import CHATML_TOOLS, load_renderer, profile_for
from polar_render.base import Head
from polar_render.messages import Message, Text, ToolCall, ToolSpec
from polar_render.shape import Shape, to_chat

pytestmark = pytest.mark.model

TOOL = ToolSpec("write", "writes a file", {"type": "object", "properties": {"path": {"type": "string"}}})
ASK = Message("user", (Text("please"),))


@pytest.fixture(scope="module")
def directory() -> Path:
    from polar_engine.models import ensure_model

    return ensure_model("smollm2-135m").path


def test_it_is_proven_with_our_template(directory: Path) -> None:
    profile = profile_for(directory)
    assert (profile.template, profile.context_window) == (CHATML_TOOLS, 8192)
    renderer = load_renderer(profile)
    assert [c for c in renderer.prove().checks if not c.ok] == []
    assert renderer.stop_ids == renderer.close_ids == (2,)
    assert renderer.prove().exact and renderer.prove().history == "short"


def test_its_own_template_drops_tools_and_is_refused_them(directory: Path) -> None:
    renderer = load_renderer(replace(profile_for(directory), template="own"))
    failed = {c.feature for c in renderer.prove().checks if not c.ok}
    assert {"tools", "tool calls"} <= failed and "user" not in failed
    with pytest.raises(RenderError, match="tools"):
        renderer.render([ASK], Head(tools=(TOOL,)))


def test_a_tool_conversation_grows_by_tails(directory: Path) -> None:
    renderer, head = load_renderer(profile_for(directory)), Head(tools=(TOOL,))
    history = [Message("system", (Text("Be brief."),)), ASK]
    answer = Message("assistant", (Text("Now."), ToolCall("c1", "write", '{"path":  "ä.txt"}')))
    new = [Message("tool", (Text("written: 日本 🙂"),), call_id="c1")]
    prompt, full = renderer.render(history, head), renderer.render([*history, answer, *new], head)
    tail = renderer.tail(history, answer, new, head)
    assert tail is not None
    sampled = full[len(prompt) : -len(tail)]
    assert [*prompt, *sampled, *tail] == full
    assert renderer.parse(sampled, head).parts == (Text("Now."), ToolCall("", "write", '{"path":  "ä.txt"}'))
    assert "".join(renderer.decode_tokens(full)) == renderer.decode(full)


@pytest.mark.parametrize("template", ["own", CHATML_TOOLS])
def test_it_agrees_with_transformers(directory: Path, template: str) -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(directory)
    renderer = load_renderer(replace(profile_for(directory), template=template))
    source = (
        None if template == "own" else (resources.files("polar_render") / "templates/chatml_tools.jinja").read_text()
    )
    conversation = [Message("system", (Text("Be brief."),)), ASK, Message("assistant", (Text("ok <|im_end|>"),)), ASK]
    head, tools = Head(), None
    if template != "own":
        head = Head(tools=(TOOL,))
        tools = [
            {
                "type": "function",
                "function": {"name": "write", "description": "writes a file", "parameters": TOOL.parameters},
            }
        ]
        conversation.append(Message("assistant", (ToolCall("c1", "write", '{"path":  "ä"}'),)))
        conversation.append(Message("tool", (Text("done"),), call_id="c1"))
    chat = to_chat(conversation, Shape(raw_arguments=True))
    expected = oracle.apply_chat_template(chat, tools=tools, chat_template=source, add_generation_prompt=True)
    assert renderer.render(conversation, head) == list(expected["input_ids"])
