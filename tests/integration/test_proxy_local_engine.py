"""The proxy on the local engine: real sampling, and log-probs that a recompute of the whole context confirms."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from proxy_kit import Kit, running, session_key, settings, streamed, user

from polar_common.bus import Bus
from polar_common.nats_server import NatsServer
from polar_common.task_spec import SamplingSpec
from polar_proxy.app import Proxy

pytestmark = pytest.mark.nats
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def local() -> Any:
    from polar_engine.testing import engine_thread

    with engine_thread(model="tiny") as engine:
        yield engine


@pytest.fixture
async def kit(local: Any, nats_server: NatsServer, bus: Bus, tmp_path: Path) -> AsyncIterator[Kit]:
    import httpx

    model = Path(str(local.host.model.path))
    proxy = Proxy(settings(model, nats_server.url, tmp_path, local.url))
    async with running(proxy) as url, httpx.AsyncClient(timeout=60) as client:
        yield Kit(proxy, local, bus, url, client)


def recomputed(model: Path, ids: list[int], start: int) -> Any:
    """Log-probs of ids[start:] given all before them."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(str(model), local_files_only=True, dtype=torch.float32)
    with torch.no_grad():
        logits = net(torch.tensor([ids])).logits[0]
    rows = torch.log_softmax(logits[start - 1 : len(ids) - 1].float(), dim=-1)
    return rows.gather(1, torch.tensor(ids[start:]).unsqueeze(1)).squeeze(1).numpy()


async def test_sampled_turns_continue_exactly_and_recompute(kit: Kit, local: Any) -> None:
    messages: list[dict[str, Any]] = [user("count")]
    for turn in range(3):
        response = await kit.chat(messages, stream=bool(turn % 2), max_tokens=12)
        assert response.status_code == 200, response.text
        said = streamed(response.text) if turn % 2 else response.json()["choices"][0]["message"]
        kept = {k: v for k, v in said.items() if k in ("role", "content", "tool_calls") and v}
        messages += [{"role": "assistant", "content": "", **kept}, user("more")]
    resolved = await kit.captured()
    assert [r.event.chain_class for r in resolved] == ["root", "continued", "continued"]
    model = Path(str(local.host.model.path))
    for item in resolved:
        assert item.event.context_exact is True and item.event.untrainable == ""
        assert item.logprobs is not None and item.event.engine.name == "polar" and item.event.engine.dtype == "float32"
        fresh = recomputed(model, item.context.tolist(), len(item.prompt))
        np.testing.assert_allclose(item.logprobs, fresh, atol=1e-4)


async def test_streamed_and_whole_answers_with_one_seed_record_the_same(kit: Kit) -> None:
    """One request at a time, sessions of their own, the harness's seed followed."""
    found = []
    for number, stream in enumerate((False, True)):
        key = session_key(session=f"s1-abcdefghij0123456789-{number}", sampling=SamplingSpec(mode="follow"))
        response = await kit.chat([user("count to ten")], key=key, stream=stream, seed=11, max_tokens=24)
        assert response.status_code == 200, response.text
        found.append((await kit.captured(key))[0])
    one, two = found
    assert one.sampled.tolist() == two.sampled.tolist() and one.prompt.tolist() == two.prompt.tolist()
    assert one.logprobs is not None and two.logprobs is not None
    np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)
    assert one.event.finish == two.event.finish and one.event.closed == two.event.closed
