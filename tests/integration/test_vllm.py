"""The proxy on a real vLLM on the CPU: `make test-vllm` installs it into an environment of its own and runs this.

`POLAR_TEST_VLLM` names that environment's Python. What the contract suite says with recorded answers is checked here
against the server itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from proxy_kit import CompletionAborted, Kit, running, session_key, settings, streamed, user

from polar_common.bus import Bus
from polar_common.events import PolicyPublished
from polar_common.nats_server import NatsServer, free_port
from polar_common.task_spec import SamplingSpec
from polar_proxy.app import Proxy
from polar_proxy.engines.chat import VllmChatEngine
from polar_proxy.engines.vllm import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.timeout(300)]


@pytest.fixture(scope="session")
def weights() -> Path:
    from polar_engine.models import ensure_model

    return Path(str(ensure_model("smollm2-135m").path))


@pytest.fixture(scope="session")
def vllm(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server's URL."""
    python, port = os.environ["POLAR_TEST_VLLM"], free_port()
    env = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
    }  # fmt: skip
    command = [
        python, "-m", "vllm.entrypoints.cli.main", "serve", str(weights), "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", "smol", "--max-model-len", "2048", "--dtype", "float32", "--enforce-eager",
        "--max-num-seqs", "8", "--enable-scale-out", "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 280
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture
async def kit(vllm: str, weights: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path) -> AsyncIterator[Kit]:
    async with serving(vllm, weights, nats_server, bus, tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def serving(
    vllm: str, weights: Path, nats_server: NatsServer, bus: Bus, data: Path, **more: Any
) -> AsyncIterator[Kit]:
    proxy = Proxy(settings(weights, nats_server.url, data, vllm, **more))
    async with running(proxy) as url, httpx.AsyncClient(timeout=120) as client:
        while not any(r.usable for r in proxy.service.pool.replicas):  # type: ignore[union-attr]
            await asyncio.sleep(0.1)
        yield Kit(proxy, None, bus, url, client)  # type: ignore[arg-type]


async def test_capabilities_of_both_ways_to_ask(vllm: str) -> None:
    for adapter in (VllmEngine, VllmChatEngine):
        engine = adapter(vllm, "", "e0")
        found = await engine.capabilities()
        assert (found.model, found.engine, found.context_window) == ("smol", "vllm", 2048)
        assert found.logprobs == "processed" and found.ids_out and found.weight_update and found.problems == ()
        assert found.ids_in == (adapter is VllmEngine) and found.reports_prompt
        await engine.close()


def recomputed(weights: Path, ids: list[int], start: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(str(weights), local_files_only=True, dtype=torch.float32)
    with torch.no_grad():
        logits = net(torch.tensor([ids])).logits[0]
    rows = torch.log_softmax(logits[start - 1 : len(ids) - 1].float(), dim=-1)
    return rows.gather(1, torch.tensor(ids[start:]).unsqueeze(1)).squeeze(1).numpy()


async def test_turns_continue_exactly_and_recompute(kit: Kit, weights: Path) -> None:
    messages: list[dict[str, Any]] = [user("Name a colour.")]
    for turn in range(3):
        response = await kit.chat(messages, stream=bool(turn % 2), max_tokens=12, stop=["zebra"])
        assert response.status_code == 200, response.text
        said = streamed(response.text) if turn % 2 else response.json()["choices"][0]["message"]
        messages += [{"role": "assistant", "content": said["content"]}, user("Another.")]
    resolved = await kit.captured()
    assert [r.event.chain_class for r in resolved] == ["root", "continued", "continued"]
    for item in resolved:
        assert item.event.untrainable == "" and item.event.context_exact is not False
        assert item.event.versions and item.logprobs is not None
        np.testing.assert_allclose(
            item.logprobs, recomputed(weights, item.context.tolist(), len(item.prompt)), atol=1e-4
        )
    assert resolved[0].event.context_exact is True


async def test_streamed_and_whole_answers_with_one_seed_record_the_same(kit: Kit) -> None:
    found = []
    for number, stream in enumerate((False, True)):
        key = session_key(session=f"s1-abcdefghij0123456789-{number}", sampling=SamplingSpec(mode="follow"))
        assert (await kit.chat([user("Count.")], key=key, stream=stream, seed=5, max_tokens=16)).status_code == 200
        found.append((await kit.captured(key))[0])
    assert found[0].sampled.tolist() == found[1].sampled.tolist()
    np.testing.assert_allclose(found[0].logprobs, found[1].logprobs, atol=1e-5)


async def test_a_client_that_leaves_frees_the_engine_within_a_second(kit: Kit, vllm: str) -> None:
    call = asyncio.ensure_future(kit.chat([user("Tell a very long story.")], stream=True, max_tokens=1500))
    await asyncio.sleep(1.5)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    left = time.monotonic()
    event = (await kit.eventually(CompletionAborted))[0]
    assert event.reason == "client_gone"
    async with httpx.AsyncClient() as client:
        while True:
            text = (await client.get(f"{vllm}/metrics")).text
            running_now = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
            if all(line.endswith(" 0.0") for line in running_now):
                break
            assert time.monotonic() - left < 2, running_now
            await asyncio.sleep(0.05)


async def test_stop_strings_cuts_choices_and_schemas(kit: Kit) -> None:
    stopped = await kit.chat([user("Count from 1 to 20, with commas.")], stop=[","], max_tokens=40)
    cut = await kit.chat([user("Tell a story.")], max_tokens=5)
    several = await kit.chat([user("Say a number.")], n=3, max_tokens=5)
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    guided = await kit.chat([user("Give n.")], response_format=form, max_tokens=30)
    for response in (stopped, cut, several, guided):
        assert response.status_code == 200, response.text
    events = [r.event for r in await kit.captured()]
    if events[0].finish == "stop_string":
        assert "," not in stopped.json()["choices"][0]["message"]["content"]
    assert events[1].finish == "length" and len(several.json()["choices"]) == 3
    assert events[-1].constrained and guided.json()["choices"][0]["message"]["content"].lstrip().startswith("{")
    assert len(events) == 6 and all(e.untrainable == "" for e in events)


async def test_too_long_a_prompt_is_the_providers_own_error(kit: Kit) -> None:
    response = await kit.chat([user("many words " * 2000)])
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"


async def test_weights_are_swapped_in_flight(kit: Kit, weights: Path) -> None:
    running_call = asyncio.ensure_future(kit.chat([user("Tell a long story.")], stream=True, max_tokens=150))
    await asyncio.sleep(1.0)
    event = PolicyPublished(segment="s1", version="step-1", policy_seq=1, model="smol", weights=str(weights))
    await kit.bus.once(event)
    assert (await running_call).status_code == 200
    for _ in range(100):
        response = await kit.chat([user("And now?")], max_tokens=4)
        assert response.status_code == 200
        last = (await kit.captured())[-1].event
        if last.policy_seq == 1:
            break
        await asyncio.sleep(0.1)
    assert last.versions[0].version == "step-1" and last.kv_salt == "step-1"
    first = (await kit.captured())[0].event
    assert first.policy_seq == 0 and first.versions[-1].version in ("step-1", first.versions[0].version)


async def test_the_chat_api_is_native_and_gives_ids(
    vllm: str, weights: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    async with serving(vllm, weights, nats_server, bus, tmp_path, proxy_engine_kind="vllm_chat") as kit:
        for stream in (False, True):
            response = await kit.chat([user("Say hi.")], stream=stream, max_tokens=6)
            assert response.status_code == 200, response.text
        one, two = await kit.captured()
        assert one.prompt.tolist() == two.prompt.tolist() and len(one.prompt) > 5
        for item in (one, two):
            assert item.event.context == "native" and item.event.untrainable == ""
            np.testing.assert_allclose(
                item.logprobs, recomputed(weights, item.context.tolist(), len(item.prompt)), atol=1e-4
            )
