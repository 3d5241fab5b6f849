"""Agent programs in windows smaller than those they were made for: nothing is summed up while there is room, and what
doesn't fit any more is summed up and gone on with, where the program does that."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_kit import CALLS, run, served
from proxy_engine import Heard, Say, ScriptedEngine

from polar_common.bus import Bus
from polar_common.nats_server import NatsServer

pytestmark = [pytest.mark.nats, pytest.mark.harness, pytest.mark.timeout(600)]

ROOM = {"pi": 4_096, "claude_code": 40_000, "codex": 32_768, "qwen_code": 66_000, "opencode": 24_000}
"""By program: its first prompt in the words of a small vocabulary, and a little more."""
WORDS = "The quick brown fox jumps over the lazy dog and writes a file named notes.txt to the disk."
LINES = {"pi": 100, "claude_code": 160, "qwen_code": 70}


class Asked:
    """Answers calls that offer tools, `rounds` times with a tool call that prints much, and keeps every prompt."""

    def __init__(self, engine: ScriptedEngine, name: str, rounds: int = 1, noise: int = 0) -> None:
        self.engine, self.call, self.rounds, self.noise = engine, CALLS[name], rounds, noise
        self.working: list[int] = []
        self.other: list[str] = []
        engine.script = self

    def __call__(self, heard: Heard) -> Say:
        text = self.engine.tokenizer.decode(heard.prompt, skip_special_tokens=False)
        # Some ask for a summary with all tools before it, as their engine's cache has it.
        if '"parameters"' not in text or any(s in text[-200:] for s in ("this summary", "<state_snapshot> XML")):
            self.other.append(text)
            return Say("A summary.")
        self.working.append(len(heard.prompt))
        if len(self.working) > self.rounds:
            return Say("Done.")
        # No two alike: programs stop a model that repeats itself.
        more = self.call.replace("hello.txt", f"hello.txt; yes '{WORDS}' | head -{self.noise}; : {len(self.working)}")
        return Say(f"I will.\n<tool_call>\n{more}\n</tool_call>")


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen_code", "opencode")]
"""Programs that CI doesn't install."""


@pytest.mark.parametrize("name", ["pi", "claude_code", "codex", *SLOW])
async def test_nothing_is_summed_up_while_there_is_room(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, name: str
) -> None:
    async with served(model_dir, nats_server, bus, tmp_path, ROOM[name]) as proxy:
        asked = Asked(proxy.engine, name)
        result, written = await run(proxy, name, tmp_path, context_window=ROOM[name], max_tokens_per_call=256)
    assert (result.exit_code, written) == (0, b"hi"), result.output_tail
    assert len(asked.working) == 2, (asked.working, result.output_tail)
    assert [text for text in asked.other if "title" not in text.lower()] == []


@pytest.mark.parametrize(
    ("name", "window"),
    [("pi", 20_000), ("claude_code", 64_000), pytest.param("qwen_code", 66_000, marks=pytest.mark.slow)],
)
async def test_a_context_that_grows_full_is_summed_up_and_gone_on_with(
    model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, name: str, window: int
) -> None:
    async with served(model_dir, nats_server, bus, tmp_path, window) as proxy:
        asked = Asked(proxy.engine, name, rounds=9, noise=LINES[name])
        result, written = await run(proxy, name, tmp_path, context_window=window)
    assert (result.exit_code, written) == (0, b"hi"), (asked.working, result.output_tail)
    assert asked.other and "hello.txt" in asked.other[0] and len(asked.working) == 10, (asked.working, asked.other)
    assert any(later < earlier for earlier, later in zip(asked.working, asked.working[1:], strict=False))
