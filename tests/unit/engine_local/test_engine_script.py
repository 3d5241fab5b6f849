"""The scripted engine's words: what it answers to which prompt, and the orders a prompt may give."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from polar_engine.script import FLAGS, Orders, parse_faults, parse_script

CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def prompt(*turns: tuple[str, str], tools: tuple[str, ...] = ()) -> str:
    """A ChatML prompt; turns of role `tool` are rendered as templates do, as users' turns."""
    system = "\n".join(json.dumps({"name": t, "description": "", "parameters": {}}) for t in tools)
    shown = [("system", system), *turns] if tools else list(turns)
    text = ""
    for role, said in shown:
        body = f"<tool_response>\n{said}\n</tool_response>" if role == "tool" else said
        text += f"<|im_start|>{'user' if role == 'tool' else role}\n{body}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


def calls(answer: str) -> list[tuple[str, Any]]:
    found = [json.loads(text) for text in CALL.findall(answer)]
    return [(c["name"], c["arguments"]) for c in found]


@pytest.mark.parametrize(
    ("tools", "name"),
    [
        (("Agent", "Bash", "Read"), "Bash"),
        (("exec_command", "write_stdin"), "exec_command"),
        (("read", "bash", "edit", "write"), "bash"),
        (("list_directory", "run_shell_command"), "run_shell_command"),
        (("write_file",), "write_file"),
    ],
)
def test_the_file_is_written_with_the_tool_there_is_and_then_said(tools: tuple[str, ...], name: str) -> None:
    script = parse_script("file")
    first = script.answer(prompt(("user", "Go"), tools=tools))
    [(called, arguments)] = calls(first)
    assert called == name and "hello.txt" in json.dumps(arguments)
    last = script.answer(prompt(("user", "Go"), ("assistant", first), ("tool", "ok"), tools=tools))
    assert last == "Done: hello.txt holds hi."


def test_two_calls_differ_and_their_results_are_one_round() -> None:
    script = parse_script("file,twotools")
    first = script.answer(prompt(("user", "Go"), tools=("bash",)))
    (_, one), (_, two) = calls(first)
    assert ("hello.txt" in one["command"], "second.txt" in two["command"]) == (True, True)
    both = (("user", "Go"), ("assistant", first), ("tool", "ok"), ("tool", "ok"))
    assert calls(script.answer(prompt(*both, tools=("bash",)))) == []


def test_thinking_spacing_and_length() -> None:
    script = parse_script("file,think,spaced,long")
    first = script.answer(prompt(("user", "Go"), tools=("bash",)))
    assert first.startswith("<think>\n") and '"command" :  "' in first
    assert calls(first)[0][1]["command"].endswith("hello.txt")
    last = script.answer(prompt(("user", "Go"), ("assistant", first), ("tool", "ok"), tools=("bash",)))
    assert last.startswith("<think>\n") and len(last) > 300


def test_sub_agents_are_started_once_awaited_and_report() -> None:
    script = parse_script("file,subagents,orders")
    tools = ("exec_command", "team.spawn_agent", "team.wait_agent", "complete_task")
    asked = ("user", "Go polar.script=file,subagents,think polar.job=j polar.faults=cut-1")
    first = script.answer(prompt(asked, tools=tools))
    assert [name for name, _ in calls(first)] == ["team.spawn_agent"] * 2
    tasks = [arguments["message"] for _, arguments in calls(first)]
    assert tasks[0] == "SUBTASK-A: create hello.txt containing hi polar.script=file,think polar.job=j"
    ids = [f"{n}1a227ed-dfe0-75d2-b3cf-76583ab2052{n}" for n in range(2)]
    started = [("tool", json.dumps({"agent_id": i, "nickname": "x"})) for i in ids]
    waiting = script.answer(prompt(asked, ("assistant", first), *started, tools=tools))
    assert calls(waiting) == [("team.wait_agent", {"targets": ids})]
    done = (*started, ("assistant", waiting), ("tool", "both are done"))
    assert calls(script.answer(prompt(asked, ("assistant", first), *done, tools=tools))) == []
    own = script.answer(prompt(("user", tasks[1]), tools=tools))
    assert [name for name, _ in calls(own)] == ["exec_command"]
    report = script.answer(prompt(("user", tasks[1]), ("assistant", own), ("tool", "ok"), tools=tools))
    assert [name for name, _ in calls(report)] == ["complete_task"]


def test_side_calls_and_echo() -> None:
    assert parse_script("file").answer(prompt(("user", "Generate a title"))) == '{"title": "Write hello.txt"}'
    assert parse_script("echo").answer(prompt(("user", "first"), ("user", "second"))) == "second"
    assert parse_script("file").answer(prompt(("user", "Edit hello.txt\n```"))) == "hello.txt\n```\nhi\n```\n"


def test_orders_are_taken_from_the_user_alone_and_only_where_allowed() -> None:
    said = "Go. polar.script=think,split polar.faults=500-1,cut-3 polar.job=a"
    told = prompt(("tool", "polar.script=echo"), ("user", said), tools=("bash",))
    assert parse_script("file").orders(told) == Orders()
    script = parse_script("file,orders")
    orders = script.orders(told)
    assert orders == Orders(frozenset({"think", "split"}), {1: "500", 3: "cut"}, "a")
    assert script.ordered(orders).flags == {"think", "split"}
    # A call beside the conversation takes none of its faults.
    assert script.orders(prompt(("user", said))) == Orders(frozenset({"think", "split"}))
    assert script.ordered(Orders(job="a")) == script
    with pytest.raises(ValueError, match="unknown script flag 'nothing'"):
        script.orders(prompt(("user", "polar.script=nothing")))
    with pytest.raises(ValueError, match="is no fault"):
        script.orders(prompt(("user", "polar.faults=600-1"), tools=("bash",)))


def test_faults_and_flags_are_checked() -> None:
    assert parse_faults("500@2,429@3,cut-4,late-6") == {2: "500", 3: "429", 4: "cut", 6: "late"}
    for bad in ("500", "500@", "now@2", "500@x"):
        with pytest.raises(ValueError, match="is no fault"):
            parse_faults(bad)
    with pytest.raises(ValueError, match="there are file, echo"):
        parse_script("file,bogus")
    assert parse_script("").flags == frozenset() and set(FLAGS) > {"file", "orders"}
