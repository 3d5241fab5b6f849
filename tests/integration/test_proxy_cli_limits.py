"""Real agent programs on a real proxy whose engine refuses: a few refusals cost retries, endless ones end the program.

Each program may try again as often as its launch says, whatever way its API has of telling a refusal.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cli_kit import CALLS, run, served
from proxy_engine import Say
from proxy_kit import CompletionAborted, Kit

from polar_common.bus import Bus
from polar_common.events import CompletionCaptured
from polar_common.nats_server import NatsServer
from polar_gateway.harnesses import registry

pytestmark = [pytest.mark.nats, pytest.mark.harness, pytest.mark.timeout(600)]

RETRIES = 2
WINDOW = 400_000
"""The prompts of these programs are long in the words of a small vocabulary."""
NAMES = ("pi", "claude_code", "codex")


@pytest.fixture
async def proxy(model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path) -> AsyncIterator[Kit]:
    async with served(model_dir, nats_server, bus, tmp_path, WINDOW) as made:
        yield made


def refusal(status: int) -> Say:
    return Say(status=status, error="come again", headers={"retry-after": "1"})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("status", [429, 500])
async def test_as_many_refusals_as_retries_are_allowed_cost_nothing_else(
    proxy: Kit, name: str, status: int, tmp_path: Path
) -> None:
    call = f"I will.\n<tool_call>\n{CALLS[name]}\n</tool_call>"
    proxy.engine.say(*[refusal(status)] * RETRIES, call, "Done.")
    result, written = await run(proxy, name, tmp_path, retries=RETRIES)
    assert (result.exit_code, written) == (0, b"hi"), result.output_tail
    events = [e for e in await proxy.of(CompletionCaptured) if isinstance(e, CompletionCaptured)]
    assert [e.chain_class for e in events] == ["root", "continued"]
    assert {e.reason for e in await proxy.of(CompletionAborted)} == {"engine_error"}
    assert len(await proxy.of(CompletionAborted)) == RETRIES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("status", [429, 500])
async def test_endless_refusals_end_the_program_after_its_retries(
    proxy: Kit, name: str, status: int, tmp_path: Path
) -> None:
    proxy.engine.script = lambda heard: refusal(status)
    result, written = await run(proxy, name, tmp_path, retries=RETRIES)
    assert not result.timed_out and written == b""
    ended = registry.find(name).classify_exit(result.exit_code, result.output_tail)
    assert ended.kind == "harness_error", (result.exit_code, result.output_tail)
    assert len(proxy.engine.journal) == RETRIES + 1
    assert len(await proxy.of(CompletionAborted)) == RETRIES + 1 and not await proxy.of(CompletionCaptured)
