"""Templates of the kinds that published models ship, each with its habits, through the bridge.

Each is written here in a few lines to have the habit and nothing else. What the proof allows must continue exactly;
what it forbids must be refused with a reason.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import QWEN_ADDED, make_tokenizer
from polar_common.errors import RenderError
from polar_render import ModelProfile, load_renderer
from polar_render.base import Head, Renderer
from polar_render.messages import Message, Text, Thinking, ToolCall, ToolSpec

# Trims every content, prints tool output as JSON under a role of its own, knows one call a turn and drops its text.
HEADERS = """{{ bos_token }}
{%- if tools %}{{ '<|start|>system<|mid|>' + (tools | tojson) + '<|eot|>' }}{% endif %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('single calls only') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '<|start|>assistant<|mid|><tool_call>' }}
{{- {'name': f.name, 'arguments': f.arguments} | tojson + '</tool_call><|eot|>' }}
{%- elif m.role == 'tool' %}{{ '<|start|>ipython<|mid|>' + (m.content | tojson) + '<|eot|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|mid|>' + (m.content | trim) + '<|eot|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|mid|>' }}{% endif %}"""

# Insists on user and assistant in turn, puts the system text into the first user turn, has no generation prompt.
ALTERNATES = """{% set ns = namespace(sys='') %}{% for m in messages %}
{%- if m.role == 'system' %}{% if loop.index0 %}{{ raise_exception('system first') }}{% endif %}
{%- set ns.sys = m.content + '; ' %}
{%- elif m.role == 'user' %}{{ '[INST]' + ns.sys + m.content + '[/INST]' }}{% set ns.sys = '' %}
{%- elif m.role == 'assistant' %}{{ m.content + '</s>' }}
{%- else %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}
{%- endfor %}"""

# Opens thinking in the generation prompt, strips thinking before the last user turn, shows an empty block otherwise.
THINKER = """{% set ns = namespace(last=0, at=-1) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endfor %}
{%- if tools %}{{ '<|start|>system<|mid|>' + (tools | tojson) + '<|eot|>' }}{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.at = ns.at + 1 %}{% endif %}
{{- '<|start|>' + m.role + '<|mid|>' }}
{%- if m.role == 'assistant' and ns.at == ns.last %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}{% set f = c.function %}
<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments if f.arguments is string else f.arguments | tojson }}}
</tool_call>{% endfor %}
{{- '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant<|mid|><think>
{% endif %}"""

# Carries state from turn to turn: a result is opened differently behind a result; systems and calls aren't shown.
STATEFUL = """{% set ns = namespace(tool=false) %}{% for m in messages %}
{%- if m.role == 'user' %}{{ '<|start|>' + m.content + '<|mid|>' }}{% set ns.tool = false %}
{%- elif m.role == 'tool' %}{{ ('<|more|>' if ns.tool else '<|first|>') + m.content + '<|mid|>' }}
{%- set ns.tool = true %}
{%- elif m.role == 'assistant' %}{{ m.content + '<|eot|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|say|>' }}{% endif %}"""

ADDED = [*QWEN_ADDED, "<|start|>", "<|mid|>", "[INST]", "[/INST]", "<|more|>", "<|first|>", "<|say|>"]
TOOL = ToolSpec("write", "writes a file", {"type": "object", "properties": {"path": {"type": "string"}}})
HEAD = Head(tools=(TOOL,))
ASK, SAID = Message("user", (Text(" please \n"),)), Message("assistant", (Text("sure"),))
CALL = Message("assistant", (ToolCall("c1", "write", '{"path": "a"}'),))
TALKED = Message("assistant", (Text("now"), ToolCall("c1", "write", '{"path": "a"}')))
TWICE = Message("assistant", (*CALL.parts, ToolCall("c2", "write", '{"path": "b"}')))
DONE = Message("tool", (Text('wrote "a"\n'),), call_id="c1")
ALSO = Message("tool", (Text("and b"),), call_id="c2")
LATE = Message("system", (Text("hurry"),))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tokenizer(tmp_path_factory.mktemp("family"), ADDED, ["<|endoftext|>", "<s>", "</s>", "<|eot|>"])
    (path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    (path / "config.json").write_text('{"eos_token_id": [2, 3]}')
    return path


@pytest.fixture
def family(directory: Path, tmp_path: Path):  # type: ignore[no-untyped-def]
    def make(template: str, **fields: object) -> Renderer:
        file = tmp_path / "t.jinja"
        file.write_text(template)
        return load_renderer(ModelProfile("m", directory, template=str(file), **fields))  # type: ignore[arg-type]

    return make


def failed(renderer: Renderer) -> set[str]:
    return {c.feature for c in renderer.prove().checks if not c.ok}


def assert_exact(renderer: Renderer, history: list[Message], answer: Message, new: list[Message], head: Head) -> None:
    tail = renderer.tail(history, answer, new, head)
    full = renderer.render([*history, answer, *new], head)
    assert tail is not None and full[-len(tail) :] == tail
    assert full[-len(tail) - 1] in renderer.close_ids


def test_trimmed_contents_and_json_results(family) -> None:  # type: ignore[no-untyped-def]
    renderer = family(HEADERS)
    assert renderer.prove().exact and renderer.prove().history == "short"
    assert {"2 x tool", "parallel calls", "parallel calls shown", "text beside calls"} <= failed(renderer)
    for answer, new in ((SAID, [ASK]), (CALL, [DONE]), (CALL, [DONE, ASK]), (SAID, [LATE, ASK])):
        assert_exact(renderer, [LATE, ASK], answer, new, HEAD)
    assert renderer.tail([ASK], TWICE, [DONE, ALSO], HEAD) is None
    with pytest.raises(RenderError, match=r"messages\[1\]: text beside calls"):
        renderer.render([ASK, TALKED, DONE], HEAD)


def test_a_text_dropped_beside_a_call_doesnt_spoil_its_continuation(family) -> None:  # type: ignore[no-untyped-def]
    renderer = family(HEADERS)
    tail = renderer.tail([ASK], TALKED, [DONE], HEAD)
    assert tail is None or tail == renderer.tail([ASK], CALL, [DONE], HEAD)


def test_strict_alternation_without_generation_prompt_is_refused(family) -> None:  # type: ignore[no-untyped-def]
    renderer = family(ALTERNATES)
    assert not renderer.prove().exact
    assert {"generation prompt", "tool", "tools", "mid system"} <= failed(renderer)
    with pytest.raises(RenderError, match=r"messages\[1\]: mid system"):
        renderer.render([ASK, LATE], Head())
    with pytest.raises(RenderError, match="tools"):
        renderer.render([ASK], HEAD)


def test_thinking_opened_by_the_prompt(family) -> None:  # type: ignore[no-untyped-def]
    renderer = family(THINKER)
    assert renderer.prove().exact
    thought = Message("assistant", (Thinking("hm"), *CALL.parts))
    for answer, new in ((SAID, [ASK]), (thought, [DONE]), (thought, [DONE, ASK]), (TWICE, [DONE, ALSO])):
        assert_exact(renderer, [ASK], answer, new, HEAD)
    prompt, whole = renderer.render([ASK], HEAD), renderer.render([ASK, thought, DONE], HEAD)
    tail = renderer.tail([ASK], thought, [DONE], HEAD)
    assert tail is not None and whole[: len(prompt)] == prompt
    assert renderer.parse(whole[len(prompt) : -len(tail)], HEAD).parts[0] == Thinking("hm")
    with pytest.raises(RenderError, match="prefill"):
        renderer.render([ASK, SAID], HEAD, prefill=True)


def test_thinking_opened_by_the_prompt_is_stripped_only_when_following(family) -> None:  # type: ignore[no-untyped-def]
    renderer = family(THINKER, thinking="follow")
    thought = Message("assistant", (Thinking("s"), *SAID.parts))
    called = Message("assistant", (Thinking("s"), *CALL.parts))
    assert renderer.tail([ASK], thought, [ASK], HEAD) is None
    assert renderer.tail([ASK], called, [DONE], HEAD) is not None
    assert renderer.tail([ASK, called, DONE], SAID, [ASK], HEAD) is None, "the earlier turn's thinking goes too"


def test_state_between_turns_and_dropped_systems(family) -> None:  # type: ignore[no-untyped-def]
    renderer = family(STATEFUL)
    assert {"system", "tools", "tool calls", "mid system"} <= failed(renderer)
    assert "user" not in failed(renderer)
    assert_exact(renderer, [ASK, SAID, ASK], SAID, [ASK], Head())
    with pytest.raises(RenderError, match=r"messages\[0\]: system"):
        renderer.render([LATE, ASK], Head())
