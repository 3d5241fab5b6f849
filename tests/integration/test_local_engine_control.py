"""Control of the local engine: aborts, pauses, weights that change in mid-request, bounds, and its process."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from local_engine_kit import GENERATE, EngineClient, Reference, logprobs_of

pytest.importorskip("torch")
from polar_engine.models import ensure_model
from polar_engine.testing import EngineThread, engine_thread

PROMPT = [504, 300, 301, 302]
LONG = {"max_tokens": 30_000, "ignore_eos": True}


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    with engine_thread(model="tiny") as running:
        yield running


@pytest.fixture
def client(engine: EngineThread) -> EngineClient:
    return EngineClient(engine.url)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with every weight changed a little."""
    from safetensors.torch import load_file, save_file

    source = ensure_model("tiny").path
    target = tmp_path_factory.mktemp("weights")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(source / name, target / name)
    tensors = load_file(str(source / "model.safetensors"))
    save_file({k: v * 1.07 for k, v in tensors.items()}, str(target / "model.safetensors"), {"format": "pt"})
    return target


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def in_background(work: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def busy(engine: EngineThread) -> Callable[[], bool]:
    start = engine.host.scheduler.steps
    return lambda: engine.host.scheduler.steps > start + 3


def stopped_within_a_step(engine: EngineThread) -> None:
    """The engine noticed, and at most the step under way was still finished."""
    until(lambda: engine.host.load_count == 0)
    engine.host.scheduler.clear_cache().result(2)
    steps = engine.host.scheduler.steps
    time.sleep(0.05)
    assert engine.host.scheduler.steps == steps


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_generation(engine: EngineThread, stream: bool) -> None:
    body = json.dumps({"token_ids": PROMPT, "sampling_params": LONG, "stream": stream}).encode()
    host, port = engine.url.removeprefix("http://").split(":")
    running = busy(engine)
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        connection.sendall(head + body)
        until(running)
    stopped_within_a_step(engine)


def test_a_client_that_leaves_doesnt_disturb_the_others(engine: EngineThread, client: EngineClient) -> None:
    alone = client.generate(PROMPT, max_tokens=200, seed=1, ignore_eos=True)["choices"][0]

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=engine.url) as http:
            body = {"token_ids": PROMPT, "sampling_params": LONG}
            with pytest.raises(httpx.TimeoutException):
                await http.post(GENERATE, json=body, timeout=0.1)

    leaving = in_background(lambda: asyncio.run(leave()))
    beside = client.generate(PROMPT, max_tokens=200, seed=1, ignore_eos=True)["choices"][0]
    leaving.result(10)
    assert beside["token_ids"] == alone["token_ids"]
    stopped_within_a_step(engine)


@pytest.mark.parametrize("asked", ["mine", "generate-tokens-mine"])
def test_abort_by_id_ends_the_answer_with_what_it_has(engine: EngineThread, client: EngineClient, asked: str) -> None:
    running = busy(engine)
    answer = in_background(lambda: client.generate(PROMPT, request={"request_id": "mine"}, n=2, **LONG))
    until(running)
    assert client.post("/abort_requests", {"request_ids": ["nobody's"]}) == {"status": "aborted", "aborted": 0}
    assert client.post("/abort_requests", {"request_ids": [asked]}) == {"status": "aborted", "aborted": 1}
    choices = answer.result(5)["choices"]
    assert [c["finish_reason"] for c in choices] == ["abort", "abort"]
    for choice in choices:
        assert 0 < len(choice["token_ids"]) < 30_000
        assert len(logprobs_of(choice)) == len(choice["token_ids"])
    stopped_within_a_step(engine)


def test_pause_abort_ends_what_runs_and_refuses_what_comes(engine: EngineThread, client: EngineClient) -> None:
    running = busy(engine)
    answer = in_background(lambda: client.stream(PROMPT, **LONG))
    until(running)
    assert client.get("/is_paused") == {"is_paused": False}
    assert client.post("/pause?mode=abort") == {"status": "paused"}
    assert answer.result(5)[0].finish_reason == "abort"
    assert client.get("/is_paused") == {"is_paused": True}
    refused = client.http.post(GENERATE, json={"token_ids": PROMPT})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert client.post("/resume") == {"status": "resumed"}
    assert client.generate(PROMPT, max_tokens=1)["choices"]


def test_pause_wait_lets_what_runs_end(engine: EngineThread, client: EngineClient) -> None:
    running = busy(engine)
    answer = in_background(lambda: client.generate(PROMPT, max_tokens=300, ignore_eos=True))
    until(running)
    paused = in_background(lambda: client.post("/pause?mode=wait"))
    until(lambda: engine.host.paused == "wait")
    client.generate(PROMPT, status=503)
    assert paused.result(10) == {"status": "paused"}
    assert len(answer.result(1)["choices"][0]["token_ids"]) == 300
    client.post("/resume")


def test_pause_keep_freezes_and_goes_on_where_it_stood(engine: EngineThread, client: EngineClient) -> None:
    params = {"max_tokens": 400, "seed": 5, "ignore_eos": True}
    expected = client.generate(PROMPT, **params)["choices"][0]
    running = busy(engine)
    answer = in_background(lambda: client.generate(PROMPT, **params))
    until(running)
    client.post("/pause?mode=keep&clear_cache=false")
    steps = engine.host.scheduler.steps
    late = in_background(lambda: client.generate(PROMPT, max_tokens=2, seed=1, ignore_eos=True))
    time.sleep(0.1)
    assert engine.host.scheduler.steps == steps
    assert not answer.done()
    assert not late.done()
    client.post("/resume")
    kept = answer.result(10)["choices"][0]
    assert kept["token_ids"] == expected["token_ids"]
    assert logprobs_of(kept) == pytest.approx(logprobs_of(expected), abs=1e-4)
    assert len(late.result(5)["choices"][0]["token_ids"]) == 2
    client.post("/pause?mode=never", status=400)


def test_a_swap_in_mid_request_splits_the_answer_by_version(
    engine: EngineThread, client: EngineClient, other_weights: Path
) -> None:
    running = busy(engine)
    answer = in_background(lambda: client.generate(PROMPT, seed=3, **LONG, request={"request_id": "s"}))
    until(running)
    updated = client.post("/update_weights", {"path": str(other_weights), "version": "v1"})
    assert updated["success"] is True
    assert updated["version"] == "v1"
    until(busy(engine))
    client.post("/abort_requests", {"request_ids": ["s"]})
    choice = answer.result(5)["choices"][0]
    first, second = choice["weight_versions"]
    cut, end = first["end"], len(choice["token_ids"])
    assert (first, second) == (
        {"version": "v0", "start": 0, "end": cut},
        {"version": "v1", "start": cut, "end": end},
    )
    assert 0 < cut < end
    assert choice["kv_mixed"] is True
    expected = _mixed_recompute(ensure_model("tiny").path, other_weights, choice["token_ids"], cut)
    assert np.abs(expected - logprobs_of(choice)).max() < 1e-4


def _mixed_recompute(before: Path, after: Path, answer: list[int], cut: int) -> np.ndarray:
    """What both sets of weights say, the later one over the keys and values that the earlier one left."""
    import torch
    from transformers import AutoModelForCausalLM

    old, new = (AutoModelForCausalLM.from_pretrained(str(p), dtype=torch.float32).eval() for p in (before, after))
    ids = torch.tensor([[*PROMPT, *answer[:-1]]])
    # The last token sampled by the old weights was fed to the new ones.
    seam = len(PROMPT) + cut - 1
    with torch.inference_mode():
        head = old(ids[:, :seam], use_cache=True)
        name = "cache" if getattr(head, "cache", None) is not None else "past_key_values"
        tail = new(ids[:, seam:], use_cache=True, **{name: getattr(head, name)})
        rows = torch.cat([head.logits[0, len(PROMPT) - 1 :], tail.logits[0]]).double().log_softmax(-1)
        return rows[torch.arange(len(answer)), torch.tensor(answer)].numpy()


def test_after_a_swap_new_requests_know_only_the_new_weights(client: EngineClient, other_weights: Path) -> None:
    prompt = [504, *range(100, 180)]
    client.generate(prompt, max_tokens=5)
    assert client.get("/weight_info")["weight_version"] == "v0"
    client.post("/update_weights", {"path": str(other_weights), "version": "v1"})
    assert client.get("/weight_info")["weight_version"] == "v1"
    answer = client.generate(prompt, max_tokens=8, seed=1, ignore_eos=True)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    choice = answer["choices"][0]
    assert choice["weight_versions"] == [{"version": "v1", "start": 0, "end": 8}]
    assert choice["kv_mixed"] is False
    expected = Reference(other_weights).logprobs(prompt, choice["token_ids"])
    assert np.abs(expected - logprobs_of(choice)).max() < 1e-4


def test_what_an_old_request_leaves_isnt_reused_by_new_weights(
    engine: EngineThread, client: EngineClient, other_weights: Path
) -> None:
    running = busy(engine)
    answer = in_background(lambda: client.generate(PROMPT, **LONG, request={"request_id": "s"}))
    until(running)
    client.post("/update_weights", {"path": str(other_weights), "version": "v1"})
    client.post("/abort_requests", {"request_ids": ["s"]})
    whole = PROMPT + answer.result(5)["choices"][0]["token_ids"]
    fresh = client.generate(whole, max_tokens=1)
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_vllms_own_way_to_change_weights(engine: EngineThread, client: EngineClient, other_weights: Path) -> None:
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(other_weights)}}
    assert client.post("/collective_rpc", reload) == {"results": [None]}
    assert client.get("/weight_info")["weight_version"] == "v0"
    named = client.post("/update_weight_version", {"new_version": "step-8"})
    assert named == {"success": True, "new_version": "step-8"}
    choice = client.generate(PROMPT, max_tokens=3, ignore_eos=True)["choices"][0]
    assert choice["weight_versions"] == [{"version": "step-8", "start": 0, "end": 3}]
    client.post("/collective_rpc", {"method": "exec", "kwargs": {}}, status=400)
    client.post("/collective_rpc", {"method": "reload_weights"}, status=400)


def test_weights_that_dont_fit_change_nothing(client: EngineClient, tmp_path: Path) -> None:
    before = client.generate(PROMPT, max_tokens=9, seed=2, ignore_eos=True)["choices"][0]
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        if path.name == "file":
            path.write_text("x")
        refused = client.post("/update_weights", {"path": str(path), "version": "v9"}, status=400)
        assert refused["error"]["code"] == 400
    wider = _another_shape(tmp_path / "wider")
    refused = client.post("/update_weights", {"path": str(wider), "version": "v9"}, status=400)
    assert "another shape" in refused["error"]["message"]
    client.post("/update_weights", {"path": str(wider)}, status=400)
    assert client.get("/weight_info")["weight_version"] == "v0"
    after = client.generate(PROMPT, max_tokens=9, seed=2, ignore_eos=True)["choices"][0]
    assert after["token_ids"] == before["token_ids"]


def _another_shape(path: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(ensure_model("tiny").path))
    config.num_hidden_layers = 1
    config.layer_types = config.layer_types[:1]
    AutoModelForCausalLM.from_config(config).save_pretrained(str(path))
    return path


def test_a_full_engine_says_when_to_come_back() -> None:
    with engine_thread(model="tiny", max_waiting=2) as running:
        client = EngineClient(running.url)
        with ThreadPoolExecutor(2) as pool:
            held = [pool.submit(client.generate, PROMPT, **LONG) for _ in range(2)]
            until(lambda: running.host.load_count == 2)
            assert client.get("/load") == {"server_load": 2}
            refused = client.http.post(GENERATE, json={"token_ids": PROMPT})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            client.post("/pause?mode=abort")
            assert all(f.result(5)["choices"][0]["finish_reason"] == "abort" for f in held)


def test_a_long_prompt_doesnt_stop_the_others(engine: EngineThread, client: EngineClient) -> None:
    """Tokens of a decoding request keep coming while 6,000 prompt tokens are read."""
    running = busy(engine)
    arrivals: list[tuple[float, int]] = []

    def watch() -> None:
        body = {"token_ids": PROMPT, "sampling_params": LONG, "stream": True, "request_id": "w"}
        with client.http.stream("POST", GENERATE, json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    arrivals.append((time.monotonic(), len(json.loads(line[6:])["choices"][0]["token_ids"])))

    watching = in_background(watch)
    until(running)
    start = time.monotonic()
    EngineClient(engine.url).generate([7] * 6000, max_tokens=1)
    end = time.monotonic()
    client.post("/abort_requests", {"request_ids": ["w"]})
    watching.result(5)
    during = sum(count for at, count in arrivals if start < at < end)
    # 6,000 tokens in chunks of 64 are 94 steps, each with a token for the other request.
    assert during >= 60


def test_a_failing_step_ends_its_requests_with_an_error(
    engine: EngineThread, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = engine.host.scheduler.model.step

    def broken(chunks: Any) -> Any:
        logits = step(chunks)
        logits[:, 3] = float("nan")
        return logits

    monkeypatch.setattr(engine.host.scheduler.model, "step", broken)
    error = client.generate(PROMPT, status=500)["error"]
    assert error["code"] == 500
    assert "no finite logits" in error["message"]
    monkeypatch.undo()
    assert client.generate(PROMPT, max_tokens=2, ignore_eos=True)["choices"][0]["finish_reason"] == "length"
    assert client.http.get("/health").status_code == 200


def test_a_request_that_breaks_the_scheduler_doesnt_take_the_others_along(
    engine: EngineThread, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(engine.host.scheduler, "_admit", broken)
    assert "no room" in client.generate(PROMPT, status=500)["error"]["message"]
    events = client.http.post(GENERATE, json={"token_ids": PROMPT, "stream": True}).text
    assert json.loads(events.split("\n\n")[0].removeprefix("data: "))["error"]["code"] == 500
    monkeypatch.undo()
    assert len(client.generate(PROMPT, max_tokens=3, ignore_eos=True)["choices"][0]["token_ids"]) == 3
    assert client.get("/load") == {"server_load": 0}


def _start(tmp_path: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "polar_engine", "--model", "tiny", "--ready-file", str(tmp_path / "ready.json")]
    return subprocess.Popen([*command, *options], stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _ready(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "ready.json"
    until(path.exists, 60)
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def test_the_process_tells_its_port_and_ends_on_sigterm(tmp_path: Path) -> None:
    process = _start(tmp_path, "--served-name", "mine", "--model-version", "step-3")
    try:
        told = _ready(tmp_path)
        assert told["pid"] == process.pid
        assert told["model"] == "mine"
        client = EngineClient(f"http://127.0.0.1:{told['port']}")
        assert client.get("/v1/models")["data"][0]["id"] == "mine"
        answer = client.generate(PROMPT, max_tokens=2, request={"model": "mine"}, ignore_eos=True)
        assert answer["choices"][0]["weight_versions"][0]["version"] == "step-3"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        _, errors = process.communicate()
    # Its standard error is a log: one JSON object a line.
    assert any(json.loads(line)["event"] == "ready" for line in errors.splitlines())


def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-m', 'polar_engine', '--model', 'tiny', '--ready-file', sys.argv[1]])\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "ready.json")], stderr=subprocess.DEVNULL)
    told = _ready(tmp_path)
    parent.kill()
    parent.wait()

    def gone() -> bool:
        try:
            httpx.get(f"http://127.0.0.1:{told['port']}/health", timeout=1)
        except httpx.TransportError:
            return True
        return False

    until(gone, 20)


def test_a_wrong_setting_is_a_clear_failure(tmp_path: Path) -> None:
    process = _start(tmp_path, "--max-model-len", "99999999")
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert b"max_model_len" in errors
