"""Real agent programs in a real sandbox against a scripted model: each writes its file and ends with 0."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from runtime_scripted import CLOSING, SUBMIT, Scripted

import runtime_docker
from polar_gateway.harnesses import registry, toolchain
from polar_gateway.harnesses.base import Harness, Launch, LaunchContext
from polar_gateway.preparing import place_files
from polar_runtime import ExecResult, Limits, Runtime, RuntimeSpec, make_runtime

pytestmark = pytest.mark.harness

PROMPT = "Create hello.txt containing hi"
KEY = "key-of-session"
_API_PATHS = {
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "google": "GenerateContent",
}


async def run(
    harness: Harness,
    model: Scripted,
    tmp_path: Path,
    *,
    args: Mapping[str, object] | None = None,
    prompt: str = PROMPT,
    files: Mapping[str, bytes] | None = None,
    timeout: float = 90.0,
    kind: str = "local",
    image: str = "",
    options: Mapping[str, str] | None = None,
) -> tuple[Launch, ExecResult, dict[str, bytes]]:
    """One attempt: toolchain mounted, files uploaded, launched by the relay; returns the working directory's files."""
    installed = await asyncio.to_thread(toolchain.ensure, harness)
    spec = RuntimeSpec(
        kind, "smoke.1", tmp_path / "attempts", image=image, mounts=toolchain.mounts(installed),
        proxy_socket=model.path, limits=Limits(memory_mb=4096, pids=1024), options=options or {},
    )  # fmt: skip
    async with make_runtime(spec) as rt:
        launch = harness.launch(context(rt, prompt, args or {}))
        await rt.upload(files or {})
        await place_files(rt, launch)
        result = await rt.exec(
            launch.argv, env=launch.env, cwd=launch.cwd or None, stdin=launch.stdin, timeout=timeout, proxy=True
        )
        return launch, result, await rt.download(["."])


def context(rt: Runtime, prompt: str, args: Mapping[str, object]) -> LaunchContext:
    return LaunchContext(
        prompt,
        rt.workdir,
        rt.home,
        rt.base_url(KEY),
        KEY,
        "scripted",
        100_000,
        4096,
        args,
        retries=1,
        call_timeout_s=30,
    )


@pytest.mark.parametrize("api", ["openai-chat", "openai-responses", "anthropic", "google"])
async def test_pi_speaks_four_apis(api: str, tmp_path: Path) -> None:
    model = Scripted(tmp_path / "proxy" / "proxy.sock")
    server = await model.serve()
    harness = registry.find("pi")
    _, result, files = await run(harness, model, tmp_path, args={"api": api}, prompt=f"- @nobody {PROMPT} $(id)")
    server.close()
    assert result.exit_code == 0, result.output_tail
    assert files["./hello.txt"] == b"hi\n"
    assert result.stdout.decode().strip() == CLOSING
    assert harness.classify_exit(result.exit_code, result.output_tail).kind == "finished"
    assert len(model.calls) == 2
    for call in model.calls:
        assert call.key == KEY and _API_PATHS[api] in call.path
    assert f"- @nobody {PROMPT} $(id)" in str(model.calls[0].body)


_CLIS = {
    "claude_code": ("anthropic", {}),
    "codex": ("openai-responses", {}),
    "qwen_code": ("openai-chat", {}),
    "gemini_cli": ("google", {}),
    "opencode": ("openai-chat", {}),
    "mini_swe_agent": ("openai-chat", {}),
    "aider": ("openai-chat", {"files": ["hello.txt"]}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in ("mini_swe_agent", "aider") else ()) for n in _CLIS]
)
@pytest.mark.timeout(900)
async def test_each_cli_writes_its_file(name: str, tmp_path: Path) -> None:
    api, args = _CLIS[name]
    model = Scripted(tmp_path / "proxy" / "proxy.sock", edit_text="hello.txt\n```\nhi\n```\n")
    model.final_command = SUBMIT if name == "mini_swe_agent" else ""
    server = await model.serve()
    harness = registry.find(name)
    prompt = f"--help {PROMPT}; $(touch evil) `touch evil`"
    _, result, files = await run(harness, model, tmp_path, args=args, prompt=prompt)
    server.close()
    assert result.exit_code == 0, result.output_tail
    assert files["./hello.txt"] == b"hi\n"
    assert not [f for f in files if "evil" in f]
    assert harness.classify_exit(result.exit_code, result.output_tail).kind == "finished"
    assert model.calls
    for call in model.calls:
        assert call.key == KEY and _API_PATHS[api] in call.path
    assert any(prompt in str(c.body) for c in model.calls)
    if harness.session_header:
        assert any(harness.session_header in c.headers for c in model.calls)


_TOY = """
task: toy
dataset_path: json
dataset_kwargs: {data_files: {test: toy.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_lm_eval_asks_one_completion_a_question(tmp_path: Path) -> None:
    model = Scripted(tmp_path / "proxy" / "proxy.sock", edit_text="4")
    server = await model.serve()
    harness = registry.find("lm_eval")
    rows = "".join(f'{{"question": "{i} + 2?", "answer": "{i + 2}"}}\n' for i in range(4))
    _, result, files = await run(
        harness, model, tmp_path, args={"tasks": ["toy"]}, files={"toy.yaml": _TOY.encode(), "toy.jsonl": rows.encode()}
    )
    server.close()
    assert result.exit_code == 0, result.output_tail
    assert len(model.calls) == 4
    assert {c.key for c in model.calls} == {KEY}
    results = next(content for name, content in files.items() if "results_" in name)
    assert b'"exact_match,none": 0.25' in results


_SKILL = """---
name: greeting
description: How to greet a quagga politely
---
Bow.
"""
# A tool server as the protocol has it on standard input and output, one JSON object a line.
_SERVER = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    result = {}
    if asked["method"] == "initialize":
        result = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "notes", "version": "1"}}
    elif asked["method"] == "tools/list":
        result = {"tools": [{"name": "fetch_note", "description": "A note", "inputSchema": {"type": "object"}}]}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
_WITH_TOOLS = ("claude_code", "codex", "qwen_code", "gemini_cli", "opencode")


@pytest.mark.parametrize("name", ["pi", *_WITH_TOOLS])
@pytest.mark.timeout(900)
async def test_skills_and_tool_servers_reach_the_model(name: str, tmp_path: Path) -> None:
    """pi has skills and no tool servers, the others both: what the model is told shows that they were found."""
    model = Scripted(tmp_path / "proxy" / "proxy.sock")
    server = await model.serve()
    args: dict[str, object] = {"skills": ["skills/greeting"]}
    if name in _WITH_TOOLS:
        args["mcp_servers"] = {"notes": {"command": "python3", "args": ["server.py"]}}
    given = {"skills/greeting/SKILL.md": _SKILL.encode(), "server.py": _SERVER.encode()}
    _, result, _ = await run(registry.find(name), model, tmp_path, args=args, files=given)
    server.close()
    assert result.exit_code == 0, result.output_tail
    told = "".join(str(call.body) for call in model.calls)
    assert "greet a quagga politely" in told
    assert ("fetch_note" in told) == (name in _WITH_TOOLS)


@pytest.mark.docker
@pytest.mark.parametrize("name", ["pi", "claude_code", "codex"])
async def test_clis_run_in_an_image_that_has_none_of_what_they_need(name: str, tmp_path: Path) -> None:
    model = Scripted(tmp_path / "proxy" / "proxy.sock")
    server = await model.serve()
    harness = registry.find(name)
    with runtime_docker.own_daemon() as host:
        image = runtime_docker.glibc_image(host)
        options = {"docker_host": host}
        _, result, files = await run(harness, model, tmp_path, kind="docker", image=image, options=options)
        assert runtime_docker.containers(host, tmp_path / "attempts") == []
    server.close()
    assert result.exit_code == 0, result.output_tail
    assert files["./hello.txt"] == b"hi\n"
    assert {c.key for c in model.calls} == {KEY}


@pytest.mark.parametrize("name", ["pi", "claude_code", "codex"])
async def test_a_model_that_always_fails_is_an_error_after_the_retries_allowed(name: str, tmp_path: Path) -> None:
    model = Scripted(tmp_path / "proxy" / "proxy.sock", status=500)
    server = await model.serve()
    harness = registry.find(name)
    _, result, files = await run(harness, model, tmp_path)
    server.close()
    assert not result.timed_out
    ended = harness.classify_exit(result.exit_code, result.output_tail)
    assert ended.kind == "harness_error", (result.exit_code, result.output_tail)
    assert ended.reason
    assert 1 <= len(model.calls) <= 8
    assert files == {}
