"""The start-up proof finds what a template can't do, and the run time refuses exactly that."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_common.errors import RenderError
from polar_render import ModelProfile, load_renderer
from polar_render.base import Head, Renderer
from polar_render.messages import Message, Text, Thinking, ToolCall, ToolSpec

# A small template with everything, from whose text each defect below is made by one replacement.
SOUND = """
{%- if tools and messages[0].role != 'system' %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- if loop.first and tools and message.role == 'system' %}

Tools: {{ tools | tojson }}
{%- endif %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

CALLS = "{%- for call in message.tool_calls or [] %}"
BEGIN = "{%- for message in messages %}"

NO_CALLS = SOUND.replace(CALLS, "{%- for call in [] %}")
NO_MID_SYSTEM = SOUND.replace(
    BEGIN, "{%- for message in messages if message.role != 'system' or loop.first %}"
).replace(
    "messages if message.role != 'system' or loop.first",
    "messages[:1] + (messages[1:] | rejectattr('role', 'equalto', 'system') | list)",
)
RAISES_MID_SYSTEM = SOUND.replace(
    BEGIN,
    BEGIN
    + "{%- if message.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif %}",
)
RAISES_PARALLEL = SOUND.replace(
    CALLS, "{%- if (message.tool_calls or []) | length > 1 %}{{ raise_exception('one call only') }}{% endif %}" + CALLS
)
STRIPS_THINKING = SOUND.replace(
    "{% if message.reasoning_content %}", "{% if message.reasoning_content and loop.last %}"
)
NO_TOOLS = SOUND.replace("{{ tools | tojson }}", "some")
NOT_LOCAL = SOUND.replace(
    "<|im_start|>{{ message.role }}\n{{ message.content }}",
    "<|im_start|>{{ message.role }}\n[{{ loop.index }}] {{ message.content }}",
)
NO_END = SOUND.replace("{%- endfor %}<|im_end|>\n{% else %}", "{%- endfor %}\n{% else %}")
NO_PROMPT = SOUND.replace("{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "")
OTHER_END = SOUND.replace("{%- endfor %}<|im_end|>\n{% else %}", "{%- endfor %}<|endoftext|>\n{% else %}")
DROPS_EMPTY = SOUND.replace(BEGIN, "{%- for message in messages if message.content or message.tool_calls %}")
NO_DEVELOPER = SOUND.replace(BEGIN, "{%- for message in messages if message.role != 'developer' %}")

TOOL = ToolSpec("write", "writes a file", {"type": "object", "properties": {"path": {"type": "string"}}})
USER = Message("user", (Text("please"),))
SAID = Message("assistant", (Text("sure"),))
CALLED = Message("assistant", (Text("sure"), ToolCall("c1", "write", '{"path": "a"}')))
CALLED_TWICE = Message(
    "assistant", (ToolCall("c1", "write", '{"path": "a"}'), ToolCall("c2", "write", '{"path": "b"}'))
)
DONE, DONE_TOO = Message("tool", (Text("written"),), call_id="c1"), Message("tool", (Text("also"),), call_id="c2")
LATE = Message("system", (Text("be quick"),))
TOOLS = Head(tools=(TOOL,))


def load(directory: Path, tmp_path: Path, template: str, **fields: object) -> Renderer:
    file = tmp_path / "template.jinja"
    file.write_text(template)
    return load_renderer(ModelProfile("probe", directory, template=str(file), **fields))  # type: ignore[arg-type]


def failed(renderer: Renderer) -> dict[str, str]:
    return {c.feature: c.reason for c in renderer.prove().checks if not c.ok}


def test_a_sound_template_passes_everything_with_a_short_history(chatml_dir: Path, tmp_path: Path) -> None:
    renderer = load(chatml_dir, tmp_path, SOUND)
    assert failed(renderer) == {}
    assert renderer.prove().exact and renderer.prove().history == "short"


def test_our_own_template_passes_everything(chatml: Renderer, qwen_bridge: Renderer) -> None:
    for renderer in (chatml, qwen_bridge):
        assert failed(renderer) == {}
        assert renderer.prove().exact and renderer.prove().history == "short"


@pytest.mark.parametrize(
    ("template", "features"),
    [
        (NO_CALLS, {"tool calls", "parallel calls shown", "calls read back"}),
        (NO_MID_SYSTEM, {"mid system", "2 x system"}),
        (RAISES_MID_SYSTEM, {"mid system", "2 x system"}),
        (RAISES_PARALLEL, {"2 x tool", "parallel calls", "parallel calls shown"}),
        (NO_TOOLS, {"tools"}),
        (STRIPS_THINKING, {"thinking shown"}),
        (DROPS_EMPTY, {"empty content"}),
        (NO_PROMPT, {"generation prompt"}),
        (NO_END, {"end of turn"}),
        (OTHER_END, {"stop ids"}),
    ],
    ids=[
        "drops tool calls", "drops a mid system message", "raises at a mid system message", "raises at parallel calls",
        "drops tools", "strips thinking from history", "drops empty messages", "no generation prompt", "no end of turn",
        "an end of turn the model doesn't declare",
    ],
)  # fmt: skip
def test_each_defect_is_found_with_a_reason(
    chatml_dir: Path, tmp_path: Path, template: str, features: set[str]
) -> None:
    found = failed(load(chatml_dir, tmp_path, template))
    assert features <= found.keys()
    assert all(found[f] for f in features)
    basic = {"end of turn", "stop ids", "generation prompt"}
    if not features & basic:
        assert "user" not in found and "tool" not in found, "a single defect must not spoil plain turns"


def test_exact_is_denied_where_turns_have_no_end_or_no_declared_end(chatml_dir: Path, tmp_path: Path) -> None:
    for template in (NO_END, NO_PROMPT, OTHER_END):
        assert not load(chatml_dir, tmp_path, template).prove().exact


def test_an_undeclared_end_of_turn_can_be_configured(chatml_dir: Path, tmp_path: Path) -> None:
    renderer = load(chatml_dir, tmp_path, OTHER_END, stop_tokens=("<|endoftext|>",))
    assert "stop ids" not in failed(renderer)
    assert set(renderer.close_ids) <= set(renderer.stop_ids)


def test_a_template_that_counts_messages_needs_the_whole_history(chatml_dir: Path, tmp_path: Path) -> None:
    renderer = load(chatml_dir, tmp_path, NOT_LOCAL)
    proof = renderer.prove()
    assert proof.exact and proof.history == "full"
    history, new = [USER, SAID, USER], [USER]
    tail = renderer.tail(history, SAID, new, Head())
    full = renderer.render([*history, SAID, *new], Head())
    assert tail is not None and full[-len(tail) :] == tail
    assert "[5] please" in renderer.decode(tail)


def test_failed_features_are_refused_by_name_and_never_dropped(chatml_dir: Path, tmp_path: Path) -> None:
    no_calls = load(chatml_dir, tmp_path, NO_CALLS)
    with pytest.raises(RenderError, match="tools"):
        no_calls.render([USER, CALLED, DONE], TOOLS)
    with pytest.raises(RenderError, match=r"messages\[1\]: tool calls"):
        no_calls.render([USER, CALLED, DONE], Head())
    for template in (NO_MID_SYSTEM, RAISES_MID_SYSTEM):
        renderer = load(chatml_dir, tmp_path, template)
        with pytest.raises(RenderError, match=r"messages\[2\]: mid system"):
            renderer.render([USER, SAID, LATE, USER], Head())
        assert renderer.tail([USER], SAID, [LATE, USER], Head()) is None
        assert renderer.tail([USER], SAID, [USER], Head()) is not None
    no_tools = load(chatml_dir, tmp_path, NO_TOOLS)
    with pytest.raises(RenderError, match="tools"):
        no_tools.render([USER], TOOLS)
    assert no_tools.render([USER], Head())


def test_a_mid_system_message_can_be_configured_to_be_shown_as_a_users(chatml_dir: Path, tmp_path: Path) -> None:
    for template in (NO_MID_SYSTEM, RAISES_MID_SYSTEM):
        renderer = load(chatml_dir, tmp_path, template, late_system="user")
        assert "mid system" not in failed(renderer)
        full = renderer.render([LATE, USER, SAID, LATE, USER], Head())
        tail = renderer.tail([LATE, USER], SAID, [LATE, USER], Head())
        assert tail is not None and full[-len(tail) :] == tail
        assert renderer.decode(full).startswith("<|im_start|>system\nbe quick")
        assert "<|im_start|>user\nbe quick" in renderer.decode(tail)


def test_parallel_calls_are_refused_where_the_template_raises(chatml_dir: Path, tmp_path: Path) -> None:
    renderer = load(chatml_dir, tmp_path, RAISES_PARALLEL)
    assert renderer.tail([USER], CALLED_TWICE, [DONE, DONE_TOO], TOOLS) is None
    assert renderer.tail([USER], CALLED, [DONE], TOOLS) is not None
    with pytest.raises(RenderError):
        renderer.render([USER, CALLED_TWICE, DONE, DONE_TOO], TOOLS)


def test_a_message_that_vanishes_beyond_the_matrix_is_still_noticed(chatml_dir: Path, tmp_path: Path) -> None:
    renderer = load(
        chatml_dir, tmp_path, SOUND.replace(BEGIN, "{%- for message in messages if message.content != 'hide me' %}")
    )
    hidden = Message("user", (Text("hide me"),))
    with pytest.raises(RenderError, match=r"messages\[1\]"):
        renderer.render([USER, hidden], Head())
    assert renderer.tail([USER], SAID, [hidden], Head()) is None


def test_a_developer_message_takes_the_system_role_where_the_template_knows_no_other(
    chatml_dir: Path, tmp_path: Path
) -> None:
    renderer = load(chatml_dir, tmp_path, NO_DEVELOPER)
    text = renderer.decode(renderer.render([Message("developer", (Text("be brief"),)), USER], Head()))
    assert "<|im_start|>system\nbe brief" in text


def test_thinking_follows_the_template_only_when_asked_to(chatml_dir: Path, tmp_path: Path) -> None:
    thought = Message("assistant", (Thinking("hmm"), Text("sure")))
    keep = load(chatml_dir, tmp_path, STRIPS_THINKING)
    assert keep.tail([USER], thought, [USER], Head()) is not None
    follow = load(chatml_dir, tmp_path, STRIPS_THINKING, thinking="follow")
    assert follow.tail([USER], thought, [USER], Head()) is None
    assert follow.tail([USER], SAID, [USER], Head()) is not None
    shows = load(chatml_dir, tmp_path, SOUND, thinking="follow")
    assert shows.tail([USER], thought, [USER], Head()) is not None
