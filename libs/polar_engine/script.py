"""What the scripted engine says: a prompt's text in, an answer's text out. Pure, stateless, the same every time.

The script does one job whatever agent asks: write `hello.txt` with the tool that the prompt offers, then say so. Flags
make it harder on everything around it. It is for tests and smoke runs of harnesses; nothing it says is sampled.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["FLAGS", "Script", "parse_script"]

FLAGS = {
    "file": "write hello.txt with a tool, then answer",
    "echo": "answer with the last user message",
    "twotools": "two tool calls in one answer",
    "think": "reason before each answer",
    "subagents": "start two sub-agents where the harness has them",
    "spaced": "arguments as JSON with odd spacing",
    "long": "a longer final answer",
}
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
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_NAME = re.compile(r'"name":\s*"([A-Za-z0-9_.\-]+)"')
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?=<\|im_end\|>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Script:
    """A set of flags."""

    flags: frozenset[str]

    def answer(self, prompt: str) -> str:
        """The answer to a ChatML prompt, without an end-of-turn token."""
        turns = _TURN.findall(prompt)
        offered = set(_NAME.findall("".join(text for role, text in turns if role == "system")))
        users = [text for role, text in turns if role == "user" and "<tool_response>" not in text]
        last = users[-1].strip() if users else ""
        thought = "<think>\nThe file has to be written.\n</think>\n\n" if "think" in self.flags else ""
        if "echo" in self.flags:
            return thought + last
        results = sum("<tool_response>" in text for _, text in turns)
        if results == 0 and (calls := self._first_calls(offered, "".join(users))):
            return thought + "I will write the file." + "".join(f"\n{self._call(n, a)}" for n, a in calls)
        if results == 1 and _SUBMIT in prompt and "bash" in offered:
            return thought + self._call("bash", {"command": f"echo {_SUBMIT}"})
        if not offered and "title" in prompt.lower():
            return '{"title": "Write hello.txt"}'
        if not offered and "hello.txt\n```" in prompt:
            return "hello.txt\n```\nhi\n```\n"
        done = "Done: hello.txt holds hi."
        return thought + (done + " Nothing else was changed." * 20 if "long" in self.flags else done)

    def _first_calls(self, offered: set[str], asked: str) -> list[tuple[str, dict[str, Any]]]:
        if "subagents" in self.flags and "SUBTASK" not in asked:
            for name, arguments in _SUBAGENTS:
                if name in offered:
                    return [
                        (name, _filled(arguments, f"SUBTASK-{part}: create hello.txt containing hi")) for part in "AB"
                    ]
        for name, arguments in _TOOLS:
            if name in offered:
                return [(name, arguments)] * (2 if "twotools" in self.flags else 1)
        return []

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        separators = (" ,  ", " :  ") if "spaced" in self.flags else (", ", ": ")
        body = json.dumps(arguments, separators=separators)
        return f'<tool_call>\n{{"name": "{name}", "arguments": {body}}}\n</tool_call>'


def _filled(arguments: dict[str, Any], prompt: str) -> dict[str, Any]:
    return {k: v or prompt for k, v in arguments.items()}


def parse_script(text: str) -> Script:
    """`file,think` → a script. Raises ValueError for unknown flags."""
    flags = frozenset(f for f in text.split(",") if f)
    if unknown := sorted(flags - set(FLAGS)):
        raise ValueError(f"unknown script flag {unknown[0]!r}; there are {', '.join(FLAGS)}")
    return Script(flags)
