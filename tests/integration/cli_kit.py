"""Real agent programs on a real proxy: one attempt of a program, without a house around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from proxy_engine import ScriptedEngine
from proxy_kit import SECRET, Kit, kit

from polar_common.bus import Bus
from polar_common.keys import sign
from polar_common.nats_server import NatsServer
from polar_gateway.harnesses import registry, toolchain
from polar_gateway.harnesses.base import LaunchContext
from polar_gateway.preparing import place_files
from polar_runtime import ExecResult, Limits, RuntimeSpec, make_runtime

__all__ = ["CALLS", "run", "served"]

CALLS = {
    "pi": '{"name": "bash", "arguments": {"command": "printf hi > hello.txt"}}',
    "claude_code": '{"name": "Bash", "arguments": {"command": "printf hi > hello.txt", "description": "Write"}}',
    "codex": '{"name": "exec_command", "arguments": {"cmd": "printf hi > hello.txt"}}',
    "qwen_code": '{"name": "run_shell_command", "arguments": {"command": "printf hi > hello.txt", '
    '"description": "Write", "is_background": false}}',
    "gemini_cli": '{"name": "run_shell_command", "arguments": {"command": "printf hi > hello.txt", '
    '"description": "Write", "is_background": false}}',
    "opencode": '{"name": "bash", "arguments": {"command": "printf hi > hello.txt", "description": "Write"}}',
}
"""By program: a tool call that writes hello.txt."""


@asynccontextmanager
async def served(model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path, window: int) -> AsyncIterator[Kit]:
    """A proxy before a scripted engine with that window."""
    engine = ScriptedEngine(model_dir)
    engine.window = window
    await engine.start()
    try:
        async with kit(model_dir, nats_server.url, bus, tmp_path, engine) as made:
            yield made
    finally:
        await engine.stop()


async def run(proxy: Kit, name: str, tmp_path: Path, **told: Any) -> tuple[ExecResult, bytes]:
    """One attempt of the program; its end, and the file it was to write. `told` changes the launch's context."""
    harness = registry.find(name)
    installed = await asyncio.to_thread(toolchain.ensure, harness)
    spec = RuntimeSpec(
        "local", "limits.1", tmp_path / "attempts", mounts=toolchain.mounts(installed),
        proxy_socket=proxy.proxy.settings.socket_path, limits=Limits(memory_mb=4096, pids=1024),
    )  # fmt: skip
    token = sign(proxy.key, SECRET.encode())
    async with make_runtime(spec) as rt:
        context: dict[str, Any] = {"context_window": 200_000, "max_tokens_per_call": 1024, "call_timeout_s": 60} | told
        launch = harness.launch(
            LaunchContext(
                "Create hello.txt containing hi", rt.workdir, rt.home, rt.base_url(token), token, "policy", **context
            )
        )
        await place_files(rt, launch)
        result = await rt.exec(
            launch.argv, env=launch.env, cwd=launch.cwd or None, stdin=launch.stdin, timeout=150, proxy=True
        )
        return result, (await rt.download(["."])).get("./hello.txt", b"")
