"""Which call is continued, what the prompt is then, and which kind of new chain begins otherwise (EXACT §2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from plain_renderer import PlainParser, PlainRenderer, ids
from talking import Talk, result, said, user

from polar_common.events import CompletionCaptured
from polar_proxy.context.nodes import SessionIndex
from polar_proxy.context.restore import apply
from polar_proxy.dialects.base import Hints
from polar_render.base import Answer, Head
from polar_render.messages import Message, Text, Thinking, ToolCall

SYSTEM = Message("system", (Text("rules"),))


def test_a_continued_call_is_prompt_sample_and_tail() -> None:
    talk = Talk()
    one = talk.call(SYSTEM, user("q"), answer="a  n s|")
    two = talk.call(SYSTEM, user("q"), said("a  n s"), user("r"))
    assert two.parent is one and talk.last is not None and talk.last.by == "longest"
    assert talk.last.prompt.tolist() == [*ids("s:rules|u:q|a:"), *ids("a  n s|"), *ids("u:r|a:")]
    assert [e.chain_class for _, e in talk.events] == ["root", "continued"]


def test_an_unclosed_answer_is_closed_in_the_context() -> None:
    talk = Talk()
    talk.call(user("q"), answer="cut", finish="length")
    two = talk.call(user("q"), said("cut"), user("r"))
    assert talk.last is not None and talk.last.prompt.tolist() == ids("u:q|a:cut|u:r|a:")
    assert two.additions == ("synthesised_close",)
    three = talk.call(user("q"), said("cut"), user("r"), said("ok"), user("s"))
    assert three.parent is two and three.additions == ("synthesised_close",)


def test_a_model_without_a_close_cannot_go_on_from_a_cut_answer() -> None:
    talk = Talk(PlainRenderer(closes=False))
    talk.call(user("q"), answer="cut", finish="length")
    assert talk.call(user("q"), said("cut"), user("r")).parent is None
    assert talk.events[1][1].chain_class == "bridge_refused"


def test_a_refused_bridge_renders_in_full() -> None:
    talk = Talk(PlainRenderer(bridges=False))
    talk.call(user("q"), answer="a|")
    two = talk.call(user("q"), said("a"), user("r"))
    assert two.parent is None and talk.events[1][1].chain_class == "bridge_refused"
    assert talk.last is not None and talk.last.prompt.tolist() == ids("u:q|a:a|u:r|a:")


@pytest.mark.parametrize(
    "echo",
    [
        said("a", ToolCall("ID", "look", '{"x":1}')),
        Message("assistant", (Text(""), Text("a"), ToolCall("ID", "look", '{ "x" : 1 }'))),
        said(Thinking(""), "a", ToolCall("ID", "look", '{"x": 1}')),
    ],
)
def test_equal_spellings_continue_and_minted_ids_name_the_call(echo: Message) -> None:
    talk = Talk()
    one = talk.call(user("q"), answer='a!look({"x": 1})|')
    call_id = one.answer.tool_calls[0].id
    fixed = Message("assistant", tuple(ToolCall(call_id, p.name, p.arguments) if isinstance(p, ToolCall) else p
                                       for p in echo.parts))  # fmt: skip
    two = talk.call(user("q"), fixed, result(call_id))
    assert two.parent is one and talk.last is not None and talk.last.by == "minted"


def test_equal_answers_of_parallel_samples_are_told_apart_by_their_ids() -> None:
    talk = Talk()
    plans = [talk.plan(talk.request(user("q"))) for _ in range(3)]
    nodes = [talk.capture(p, "!look()|").node for p in plans]
    for node in nodes:
        call = node.answer.tool_calls[0]
        after = talk.call(user("q"), said(call), result(call.id))
        assert after.parent is node and not talk.events[-1][1].parent_ambiguous


def test_equal_answers_without_ids_are_ambiguous_and_a_hint_decides() -> None:
    talk = Talk()
    plans = [talk.plan(talk.request(user("q"), hints=Hints(agent=name))) for name in ("x", "y")]
    first, second = (talk.capture(p, "same|").node for p in plans)
    assert talk.call(user("q"), said("same"), user("r")).parent is second
    assert talk.events[-1][1].parent_ambiguous
    hinted = talk.call(user("q"), said("same"), user("s"), hints=Hints(agent="x"))
    assert hinted.parent is first and talk.events[-1][1].parent_by == "hint"


def test_the_longest_conversation_wins() -> None:
    talk = Talk()
    talk.call(user("q"), answer="a|")
    two = talk.call(user("q"), said("a"), user("r"), answer="b|")
    assert talk.call(user("q"), said("a"), user("r"), said("b"), user("s")).parent is two


def test_at_least_one_message_must_follow() -> None:
    talk = Talk()
    talk.call(user("q"), answer="a|")
    again = talk.call(user("q"))
    assert again.parent is None and again.base is talk.index.nodes[f"{0:032x}"]
    assert talk.events[1][1].prompt.new.n == 0 and talk.events[1][1].prompt.base


def test_another_head_is_another_chain() -> None:
    talk = Talk()
    talk.call(user("q"), tools=("bash",), answer="a|")
    assert talk.call(user("q"), said("a"), user("r")).parent is None
    assert talk.events[1][1].chain_class == "head_changed"
    assert talk.events[1][1].messages.shared == 1


def test_thinking_that_was_kept_back_is_an_addition_and_following_it_a_new_chain() -> None:
    talk = Talk()
    one = talk.call(user("q"), answer="<hm>a|")
    two = talk.call(user("q"), said("a"), user("r"))
    assert two.parent is one and two.additions == ("kept_thinking",)
    follow = Talk(keep=False)
    follow.call(user("q"), answer="<hm>a|")
    assert follow.call(user("q"), said(Thinking("hm"), "a"), user("r")).parent is not None
    assert follow.call(user("q"), said("a"), user("s")).parent is None
    assert follow.events[-1][1].chain_class == "thinking"


@pytest.mark.parametrize(
    ("thought", "continues"),
    [
        (Thinking("hm"), True), (Thinking(""), True), (Thinking("other"), False),
        (Thinking("other", signature=f"polar.{0:032x}.0"), True), (Thinking("hm", signature="foreign"), True),
        (Thinking("", redacted=True), False),
    ],
)  # fmt: skip
def test_thinking_is_absent_empty_equal_or_ours_else_it_was_edited(thought: Thinking, continues: bool) -> None:
    talk = Talk()
    talk.call(user("q"), answer="<hm>a|")
    two = talk.call(user("q"), said(thought, "a"), user("r"))
    assert (two.parent is not None) == continues
    assert talk.events[1][1].chain_class == ("continued" if continues else "thinking")


def test_a_prefilled_turn_is_compared_as_a_whole() -> None:
    talk = Talk()
    one = talk.call(user("q"), said("He"), answer="llo|", prefill=True)
    assert one.position == 1 and talk.last is not None and talk.last.prompt.tolist() == ids("u:q|a:He")
    assert talk.events[0][1].prefill_tokens == 2
    two = talk.call(user("q"), said("Hello"), user("r"))
    assert two.parent is one and talk.last.prompt.tolist() == ids("u:q|a:Hello|u:r|a:")
    three = talk.call(
        user("q"), said("Hello"), user("r"), said("ok"), user("t"), said("We"), answer="ll|", prefill=True
    )
    assert three.parent is two and talk.events[2][1].prefill_tokens == 2


@pytest.mark.parametrize(
    ("messages", "hints", "expected"),
    [
        ((SYSTEM, user("q"), said("changed"), user("r")), Hints(), "edited"),
        ((SYSTEM, user("else")), Hints(), "root"),
        ((SYSTEM, user("else"), said("from elsewhere"), user("r")), Hints(), "unknown_parent"),
        ((user("work"),), Hints(agent="sub", parent_agent="main"), "subagent"),
        ((user("work"),), Hints(agent="sub", request_kind="collab_spawn"), "subagent"),
        ((user("sum up"),), Hints(agent="main", request_kind="compaction"), "compaction"),
        ((user("q: " + "long answer " * 5),), Hints(agent="main"), "compaction"),
        ((SYSTEM, user("x"), said("y")), Hints(context_edits=("{}",)), "edited"),
    ],
)
def test_the_class_of_a_new_chain(messages: tuple[Message, ...], hints: Hints, expected: str) -> None:
    talk = Talk()
    talk.call(SYSTEM, user("q"), answer="long answer " * 5 + "|", hints=Hints(agent="main"))
    talk.call(*messages, hints=hints)
    assert talk.events[1][1].chain_class == expected


def test_the_first_calls_of_a_broken_answer_are_adopted() -> None:
    talk = Talk()
    one = talk.call(user("q"), answer="t!a(1)!b(2)|")
    first = one.answer.tool_calls[0]
    two = talk.call(user("q"), said("t", first), result(first.id))
    assert talk.last is not None and talk.last.prompt.tolist() == ids("u:q|a:t!a(1)|t:done|a:")
    event = talk.events[1][1]
    assert two.parent is one and event.parent_by == "adopted" and event.chain_class == "continued"
    assert set(event.additions) == {"synthesised_close", "adopted_partial"}
    assert event.prompt.shared == len(ids("u:q|a:t!a(1)"))
    three = talk.call(user("q"), said("t", first), result(first.id), said("ok"), user("on"))
    assert three.parent is two


def test_calls_that_were_not_all_ours_are_not_adopted() -> None:
    talk = Talk()
    talk.call(user("q"), answer="t!a(1)!b(2)|")
    two = talk.call(user("q"), said("t", ToolCall("call_x_0", "a", "1")), result("call_x_0"))
    assert two.parent is None and talk.events[1][1].parent_by == "none"


def test_an_index_read_from_the_log_is_the_one_that_was_written() -> None:
    talk = Talk()
    messages = [SYSTEM]
    for turn in range(40):
        messages.append(user(f"q{turn}"))
        text = f"<t>a{turn}!c({turn})|" if turn % 4 else f"cut{turn}"
        node = talk.call(*messages, answer=text, finish="stop" if turn % 4 else "length", tools=("c",))
        messages.append(node.answer)
        messages += [result(c.id) for c in node.answer.tool_calls]
    talk.call(*messages[:3], said("edited"), user("x"), tools=("c",))
    read = SessionIndex()
    apply(read, talk.events, talk.blobs, talk.renderer)
    assert list(read.nodes) == list(talk.index.nodes) and read.synced == len(talk.events)
    for name, node in talk.index.nodes.items():
        other = read.nodes[name]
        for field in ("key", "request_key", "head", "shared", "own", "position", "answer", "parts", "finish", "closed",
                      "request_hash", "created", "usage", "sampled_from", "additions", "extended"):  # fmt: skip
            assert getattr(node, field) == getattr(other, field), (name, field)
        assert node.link.context.tolist() == other.link.context.tolist()
        assert (node.link.chain, node.link.links, node.link.message_chain, node.link.message_links) == (
            other.link.chain, other.link.links, other.link.message_chain, other.link.message_links
        )  # fmt: skip
        assert (node.parent and node.parent.completion) == (other.parent and other.parent.completion)
    assert read.tokens == sum(e.sampled.n for _, e in talk.events)
    # Piecewise reading, as after each of another instance's calls, gives the same.
    bit = SessionIndex()
    for event in talk.events:
        apply(bit, [event], talk.blobs, talk.renderer)
    assert [n.key for n in bit.nodes.values()] == [n.key for n in talk.index.nodes.values()]


def test_the_event_is_what_the_vocabulary_says() -> None:
    talk = Talk()
    talk.call(user("q"), answer="a|")
    event = talk.events[0][1]
    assert isinstance(event, CompletionCaptured)
    assert event.sampling.temperature == 1.0 and event.engine.replica == "e0" and event.context_exact is True
    assert event.usage == {"prompt_tokens": 6, "completion_tokens": 2, "cached_tokens": 0, "reasoning_tokens": 0}


def test_a_turn_that_says_nothing_is_left_out_and_named() -> None:
    """opencode keeps an empty turn for an answer whose stream broke."""
    talk = Talk()
    one = talk.call(user("q"), answer="!look()|")
    call = one.answer.tool_calls[0]
    two = talk.call(user("q"), said(""), said(call), result(call.id))
    assert two.parent is one and talk.last is not None
    assert talk.last.prompt.tolist() == [*ids("u:q|a:"), *ids("!look()|"), *ids("t:done|a:")]
    assert talk.events[-1][1].dropped == ("messages[1]",)
    three = talk.call(user("q"), said(""), said(call), result(call.id), said(), said("ok"), user("r"))
    assert three.parent is two and talk.events[-1][1].dropped == ("messages[1]", "messages[4]")


def test_thoughts_that_led_to_nothing_are_left_out_unless_they_were_a_whole_answer() -> None:
    talk = Talk()
    one = talk.call(user("q"), answer="<hm>a|")
    two = talk.call(user("q"), said(Thinking("h")), said(Thinking("hm"), "a"), user("r"), answer="<only>|")
    assert two.parent is one and talk.events[-1][1].dropped == ("messages[1]",)
    before = (user("q"), said(Thinking("hm"), "a"), user("r"))
    three = talk.call(*before, said(Thinking("only")), user("s"))
    assert three.parent is two and talk.events[-1][1].dropped == ()


def test_a_turn_that_was_sampled_empty_stays() -> None:
    talk = Talk()
    one = talk.call(user("q"), answer="|")
    two = talk.call(user("q"), said(""), user("r"))
    assert two.parent is one and talk.events[-1][1].dropped == ()
    assert talk.last is not None and talk.last.prompt.tolist() == ids("u:q|a:|u:r|a:")


def test_an_empty_turn_of_a_history_that_is_not_ours_is_shown() -> None:
    talk = Talk()
    talk.call(user("q"), said(""), user("r"))
    assert talk.last is not None and talk.last.prompt.tolist() == ids("u:q|a:|u:r|a:")
    assert talk.events[-1][1].dropped == ()


TASK = "find out who calls parse"
START = f'!agent({{"prompt": "{TASK}", "subagent_type": "general"}})|'


def test_a_conversation_about_a_tool_calls_argument_is_its_sub_agents() -> None:
    """Qwen Code and Gemini CLI say nothing of their sub-agents in headers."""
    talk = Talk()
    main = talk.call(user("q"), answer=START)
    child = talk.call(SYSTEM, Message("user", (Text("reminder"), Text(TASK))), answer="!look()|")
    event = talk.events[-1][1]
    name = main.answer.tool_calls[0].id
    assert (event.chain_class, event.agent, event.parent_agent) == ("subagent", name, "main")
    assert event.spawned_by == main.completion and child.parent is None and event.agent_role == "general"
    call = child.answer.tool_calls[0]
    talk.call(SYSTEM, Message("user", (Text("reminder"), Text(TASK))), said(call), result(call.id))
    event = talk.events[-1][1]
    assert (event.chain_class, event.agent, event.parent_agent, event.spawned_by) == ("continued", name, "main", "")
    assert event.agent_role == "general"
    again = talk.call(user("q"), said(*main.answer.parts), result(name, "nobody"))
    assert again.parent is main and (again.agent, again.parent_agent) == ("", "")


def test_a_sub_agents_own_name_and_its_sub_agents_parent() -> None:
    talk = Talk()
    first = talk.call(user("q"), answer=START)
    second = talk.call(user(TASK), hints=Hints(agent="a7"), answer=START.replace("parse", "render"))
    assert (second.agent, second.parent_agent) == ("a7", "main")
    deep = talk.call(user(TASK.replace("parse", "render")), hints=Hints(agent="a8"))
    assert (deep.agent, deep.parent_agent) == ("a8", "a7")
    assert [e.spawned_by for _, e in talk.events] == ["", first.completion, second.completion]
    assert [e.agent_role for _, e in talk.events] == ["", "general", "general"]


@pytest.mark.parametrize(
    ("arguments", "role"),
    [
        ('"subagent_type": "code-reviewer"', "code-reviewer"),
        ('"agent_type": "explorer"', "explorer"),
        ('"agent_name": "generalist"', "generalist"),
        ('"kind": "general"', ""),
        ('"subagent_type": "main"', ""),
        ('"subagent_type": "two words"', ""),
        (f'"subagent_type": "{"x" * 65}"', ""),
        ('"subagent_type": 5', ""),
    ],
)
def test_a_sub_agents_role_is_what_the_call_that_started_it_names(arguments: str, role: str) -> None:
    """It is equal in all sessions of a task, which an agent's own name isn't."""
    talk = Talk()
    talk.call(user("q"), answer=f'!agent({{"prompt": "{TASK}", {arguments}}})|')
    talk.call(user(TASK), hints=Hints(agent="a7"))
    assert talk.events[-1][1].agent_role == role and talk.events[-1][1].chain_class == "subagent"


def test_a_named_agent_beside_a_nameless_one_is_a_sub_agent_though_its_start_was_not_seen() -> None:
    talk = Talk()
    talk.call(user("q"))
    lonely = talk.call(user("else"), hints=Hints(agent="a7"))
    assert talk.events[-1][1].chain_class == "subagent"
    assert (lonely.agent, lonely.parent_agent) == ("a7", "main")


@pytest.mark.parametrize(
    ("answer", "asked"),
    [
        ('!look({"path": "src"})|', user("src")),
        ('!look({"path": "src/parse.py"})|', user("look at src/parse.py")),
        ('!look({"prompt": "a question of its own)|', user("a question of its own")),
    ],
)
def test_other_conversations_are_roots(answer: str, asked: Message) -> None:
    talk = Talk()
    talk.call(user("q"), answer=answer)
    talk.call(asked)
    assert talk.events[-1][1].chain_class == "root" and talk.events[-1][1].spawned_by == ""


class Naming(PlainRenderer):
    """A model that names its calls, and a template that prints the names."""

    def render(self, messages: Sequence[Message], head: Head, *, prefill: bool = False) -> list[int]:
        named = [f"[{m.call_id}]" if m.role == "tool" else "".join(f"[{c.id}]" for c in m.tool_calls) for m in messages]
        return super().render([*map(_prefixed, messages, named)], head, prefill=prefill)

    def parser(self, head: Head, *, prefill: str = "") -> PlainParser:
        return NamingParser()

    def parse(self, sampled: Sequence[int], head: Head, *, prefill: str = "") -> Answer:
        parser = NamingParser()
        parser.feed(sampled)
        return parser.answer()


class NamingParser(PlainParser):
    def answer(self) -> Answer:
        found = super().answer()
        calls = [p for p in found.parts if isinstance(p, ToolCall)]
        parts = (replace(p, id=f"f.{p.name}:{calls.index(p)}") if isinstance(p, ToolCall) else p for p in found.parts)
        return replace(found, parts=tuple(parts))


def _prefixed(message: Message, name: str) -> Message:
    return replace(message, parts=(Text(name), *message.parts)) if name else message


def test_templates_that_print_ids_get_the_models_own_back() -> None:
    talk = Talk(Naming())
    one = talk.call(user("q"), answer="!look()!find()|")
    first, second = (c.id for c in one.answer.tool_calls)
    assert first.startswith("call_") and one.own_ids == ((first, "f.look:0"), (second, "f.find:1"))
    two = talk.call(user("q"), one.answer, result(first, "a"), result(second, "b"))
    assert two.parent is one and talk.last is not None
    assert talk.last.prompt.tolist()[-len(ids("t:[f.look:0]a|t:[f.find:1]b|a:")) :] == ids(
        "t:[f.look:0]a|t:[f.find:1]b|a:"
    )
    # Another instance reads them from the log; and a full rendering shows them too.
    read = SessionIndex()
    apply(read, talk.events, talk.blobs, talk.renderer)
    assert read.own_ids == talk.index.own_ids
    talk.call(user("else"), one.answer, result(first, "a"))
    assert "a:[f.look:0][f.find:1]!look()!find()|t:[f.look:0]a|" in talk.renderer.decode(talk.last.prompt.tolist())


def test_a_harness_that_echoes_other_ids_has_them_replaced_by_place() -> None:
    talk = Talk(Naming())
    one = talk.call(user("q"), answer="!look()|")
    theirs = said(ToolCall("x1", "look", ""))
    two = talk.call(user("q"), theirs, result("x1", "a"))
    assert two.parent is one and talk.last is not None
    assert talk.renderer.decode(talk.last.prompt.tolist()).endswith("t:[f.look:0]a|a:")
