"""The proxy end to end against a real log: contexts are exact, both ways of answering record the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from proxy_engine import Say, make_model_dir
from proxy_kit import Kit, kit

from polar_common.bus import Bus
from polar_common.nats_server import NatsServer

pytestmark = pytest.mark.nats

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "description": "write a file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def proxy(model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path) -> AsyncIterator[Kit]:
    async with kit(model_dir, nats_server.url, bus, tmp_path) as made:
        yield made


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_continues_on_the_sampled_ids(proxy: Kit, stream: bool) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for turn in range(4):
        proxy.engine.say(Say(f"answer number {turn}", seed=turn))
        messages.append(user(f"question {turn}"))
        message = await proxy.told(messages, stream=stream)
        assert message["content"] == f"answer number {turn}"
        messages.append({"role": "assistant", "content": message["content"]})
    resolved = await proxy.agrees()
    assert [r.event.chain_class for r in resolved] == ["root", "continued", "continued", "continued"]
    for before, after in pairwise(resolved):
        assert after.event.parent == before.completion
        assert after.prompt[: before.context_length].tolist() == before.context.tolist()
        assert after.event.context_exact is True and after.event.context_faithful
        canonical = proxy.engine.tokenizer.encode("answer number", add_special_tokens=False).ids
        assert before.sampled[: len(canonical)].tolist() != canonical
    text = proxy.engine.tokenizer.decode(resolved[-1].prompt.tolist(), skip_special_tokens=False)
    assert text.count("<|im_start|>assistant") == 4 and "answer number 2<|im_end|>\n<|im_start|>user" in text
    assert all(e.event.untrainable == "" and e.event.logprobs is not None for e in resolved)
