"""What the scripted engine says: a prompt's text in, an answer's text out. Pure, stateless, the same every time.

The script does one job whatever agent asks: write `hello.txt` with the tool that the prompt offers, then say so. Flags
make it harder on everything around it. With the flag `orders`, a user's message may choose flags and faults for its own
conversation (`polar.script=think,split polar.faults=500-1,cut-3 polar.job=NAME`), so that one engine plays every part
of a test at once. It is for tests and smoke runs of harnesses; nothing it says is sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["FLAGS", "Orders", "Script", "parse_faults", "parse_script"]

FLAGS = {
    "file": "write hello.txt with a tool, then answer",
    "echo": "answer with the last user message",
    "twotools": "two tool calls in one answer: hello.txt and second.txt",
    "think": "reason before each answer",
    "subagents": "start two sub-agents where the harness has them, and wait for them where it must be told to",
    "spaced": "arguments as JSON with odd spacing",
    "long": "a longer final answer",
    "split": "answers are tokenised in ways their tokenizer wouldn't choose, as samples sometimes are",
    "orders": "take flags, faults and a job's name from the user's message",
}
FAULTS = ("429", "500", "cut", "late")
COMMAND = "printf 'hi\\n' > hello.txt"

# Tool name → arguments that do the job; the names are those of the agent CLIs.
_TOOLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Bash", {"command": COMMAND, "description": "Write hello.txt"}),
    ("exec_command", {"cmd": COMMAND}),
    ("shell_command", {"command": COMMAND}),
    ("shell", {"command": ["bash", "-lc", COMMAND]}),
    ("run_shell_command", {"command": COMMAND, "description": "Write hello.txt", "is_background": False}),
    ("bash", {"command": COMMAND, "description": "Write hello.txt"}),
    ("write_file", {"file_path": "hello.txt", "content": "hi\n"}),
    ("write", {"path": "hello.txt", "filePath": "hello.txt", "content": "hi\n"}),
)
_SUBAGENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Agent", {"description": "part", "prompt": "", "subagent_type": "general-purpose"}),
    ("agent", {"description": "part", "prompt": "", "subagent_type": "general-purpose"}),
    ("task", {"description": "part", "prompt": "", "subagent_type": "general"}),
    ("spawn_agent", {"message": ""}),
    ("invoke_agent", {"agent_name": "generalist", "prompt": ""}),
)
# Tools by which an agent has to be told to wait for those it started, and a sub-agent says that it is done.
_WAIT, _REPORT = "wait_agent", "complete_task"
_AGENT_ID = re.compile(r'\bagent_id\\?":\s*\\?"([0-9a-f-]{36})')
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_NAME = re.compile(r'"name":\s*"([A-Za-z0-9_.\-]+)"')
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?=<\|im_end\|>|\Z)", re.DOTALL)
_ORDER = re.compile(r"\bpolar\.(script|faults|job)=([A-Za-z0-9_,-]+)")
_DONE = "Done: hello.txt holds hi."


@dataclass(frozen=True, slots=True)
class Orders:
    """What a conversation asks of the engine itself. `faults`: call number → kind, counted over the calls of `job`."""

    flags: frozenset[str] | None = None
    faults: Mapping[int, str] = field(default_factory=dict)
    job: str = ""


@dataclass(frozen=True, slots=True)
class Script:
    """A set of flags."""

    flags: frozenset[str]

    def orders(self, prompt: str) -> Orders:
        """What the first user's message that gives orders says. Nothing without the flag `orders`.

        A call without tools, such as one for a title, has the flags alone: it would take a fault from the conversation
        beside which it is made. Raises ValueError for unknown flags and faults.
        """
        if "orders" not in self.flags:
            return Orders()
        turns = _TURN.findall(prompt)
        for text in _asked(turns):
            if found := dict(_ORDER.findall(text)):
                flags = parse_script(found["script"]).flags if "script" in found else None
                faults = parse_faults(found.get("faults", ""))
                return Orders(flags, faults, found.get("job", "")) if _tools(turns) else Orders(flags)
        return Orders()

    def ordered(self, orders: Orders) -> Script:
        """The script that such a conversation gets."""
        return self if orders.flags is None else replace(self, flags=orders.flags)

    def answer(self, prompt: str) -> str:
        """The answer to a ChatML prompt, without an end-of-turn token."""
        turns = _TURN.findall(prompt)
        offered = _tools(turns)
        users = _asked(turns)
        thought = "<think>\nThe file has to be written.\n</think>\n\n" if "think" in self.flags else ""
        if "echo" in self.flags:
            return thought + (users[-1].strip() if users else "")
        results = _rounds(turns)
        if calls := self._calls(offered, "".join(users), results):
            said = "" if results else "I will write the file."
            return thought + said + "".join(f"\n{self._call(n, a)}" for n, a in calls)
        if results and len(results) == 1 and _SUBMIT in prompt and "bash" in offered:
            return thought + self._call("bash", {"command": f"echo {_SUBMIT}"})
        if not offered and "title" in prompt.lower():
            return '{"title": "Write hello.txt"}'
        if not offered and "hello.txt\n```" in prompt:
            return "hello.txt\n```\nhi\n```\n"
        return thought + (_DONE + " Nothing else was changed." * 20 if "long" in self.flags else _DONE)

    def _calls(self, offered: set[str], asked: str, results: list[str]) -> list[tuple[str, dict[str, Any]]]:
        """The tool calls that are due, none where the job is done. `results`: what tools said, by round."""
        main = "SUBTASK" not in asked
        if results:
            if len(results) > 1:
                return []
            wait = _offered(offered, _WAIT)
            if main and wait and (started := _AGENT_ID.findall(results[0])):
                return [(wait, {"targets": list(dict.fromkeys(started))})]
            return [(_REPORT, {"result": _DONE})] if not main and _REPORT in offered else []
        if main and "subagents" in self.flags:
            for name, arguments in _SUBAGENTS:
                if found := _offered(offered, name):
                    return [(found, _filled(arguments, _subtask(part, asked))) for part in "AB"]
        for name, arguments in _TOOLS:
            if name in offered:
                second = {k: _elsewhere(v) for k, v in arguments.items()}
                return [(name, arguments), (name, second)][: 2 if "twotools" in self.flags else 1]
        return []

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        separators = (" ,  ", " :  ") if "spaced" in self.flags else (", ", ": ")
        body = json.dumps(arguments, separators=separators)
        return f'<tool_call>\n{{"name": "{name}", "arguments": {body}}}\n</tool_call>'


def _tools(turns: list[tuple[str, str]]) -> set[str]:
    return set(_NAME.findall("".join(text for role, text in turns if role == "system")))


def _asked(turns: list[tuple[str, str]]) -> list[str]:
    return [text for role, text in turns if role == "user" and "<tool_response>" not in text]


def _rounds(turns: list[tuple[str, str]]) -> list[str]:
    """What tools said, one text per answer that called them; templates give each result a turn, or all one."""
    rounds: list[str] = []
    before = ""
    for _, text in turns:
        if "<tool_response>" in text:
            if "<tool_response>" in before:
                rounds[-1] += text
            else:
                rounds.append(text)
        before = text
    return rounds


def _offered(offered: set[str], name: str) -> str:
    """The tool's full name, which may have a namespace before it; "" where it isn't offered."""
    return next((o for o in sorted(offered) if o == name or o.endswith(f".{name}")), "")


def _filled(arguments: dict[str, Any], prompt: str) -> dict[str, Any]:
    return {k: v or prompt for k, v in arguments.items()}


def _subtask(part: str, asked: str) -> str:
    """A sub-agent's prompt. It belongs to the same job, has no faults of its own, and starts nobody."""
    orders = dict(_ORDER.findall(asked))
    flags = ",".join(f for f in orders.get("script", "").split(",") if f != "subagents")
    told = [f"polar.script={flags}" if flags else "", f"polar.job={orders['job']}" if "job" in orders else ""]
    return " ".join([f"SUBTASK-{part}: create hello.txt containing hi", *filter(None, told)])


def _elsewhere(value: Any) -> Any:
    if isinstance(value, list):
        return [_elsewhere(v) for v in value]
    return value.replace("hello.txt", "second.txt") if isinstance(value, str) else value


def parse_script(text: str) -> Script:
    """`file,think` → a script. Raises ValueError for unknown flags."""
    flags = frozenset(f for f in text.split(",") if f)
    if unknown := sorted(flags - set(FLAGS)):
        raise ValueError(f"unknown script flag {unknown[0]!r}; there are {', '.join(FLAGS)}")
    return Script(flags)


def parse_faults(text: str) -> dict[int, str]:
    """`500@2,cut@5` (or `500-2,cut-5`) → {2: "500", 5: "cut"}: call number → fault. Raises ValueError."""
    out = {}
    for item in filter(None, text.split(",")):
        kind, _, number = item.replace("-", "@").partition("@")
        if kind not in FAULTS or not number.isdigit():
            raise ValueError(f"{item!r} is no fault; write 429@N, 500@N, cut@N or late@N")
        out[int(number)] = kind
    return out
