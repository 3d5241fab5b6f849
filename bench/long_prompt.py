"""A prompt of about 96k tokens through the proxy: new to it, and as the continuation of a call (DESIGN §11).

The text is source code of the standard library in messages of some 4,000 tokens, as an agent's history is. What the
same ids cost when sent straight to the engine is taken off.
"""

from __future__ import annotations

import asyncio
import sysconfig
from pathlib import Path

import orjson
from tokenizers import Tokenizer

from bench.load import Client, Result, bench_key, chat_path, median

__all__ = ["long_prompts"]

TOKENS = 96_000
_MESSAGE = 12_000
"""Characters of one message."""


def _sources() -> str:
    """Enough source text for a few prompts that share nothing long."""
    root = Path(sysconfig.get_path("stdlib"))
    return "\n".join(path.read_text() for path in sorted([*root.glob("*.py"), *root.glob("asyncio/*.py")]))


def _talk(text: str, tokenizer: Tokenizer, number: int) -> list[dict[str, str]]:
    """Messages with `TOKENS` tokens in all, of a stretch of the text that no other number uses."""
    messages = [{"role": "system", "content": "You are an agent that reads code."}]
    at, left = number * TOKENS * 6 % (len(text) - TOKENS * 6), TOKENS
    while left > 0:
        piece = f"File {number}, at {at}:\n{text[at : at + _MESSAGE]}"
        at += _MESSAGE
        left -= len(tokenizer.encode(piece, add_special_tokens=False).ids)
        messages += [{"role": "user", "content": piece}, {"role": "assistant", "content": f"Read up to {at}."}]
    return [*messages[:-1]]


async def _measure(proxy: int, engine: int, secret: str, talks: list[list[dict[str, str]]]) -> dict[str, list[float]]:
    through, straight = await Client.connect(proxy), await Client.connect(engine)
    times: dict[str, list[float]] = {"cold": [], "continued": [], "engine": []}
    direct = orjson.dumps(
        {"model": "policy", "token_ids": list(range(100, 100 + TOKENS)), "request_id": "x", "stream": False,
         "sampling_params": {"max_tokens": 64, "temperature": 1.0, "logprobs": 0}}
    )  # fmt: skip
    for number, messages in enumerate(talks):
        path = chat_path(bench_key(f"s1-long{number:08d}"), secret)
        times["engine"].append((await straight.post("/inference/v1/generate", direct)).whole_s * 1e3)
        for kind in ("cold", "continued"):
            body = orjson.dumps({"model": "policy", "messages": messages, "max_tokens": 64})
            answer = await through.post(path, body)
            assert answer.status == 200, answer.body
            times[kind].append(answer.whole_s * 1e3)
            said = orjson.loads(answer.body)["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on, please."}]
    through.close()
    straight.close()
    return times


def long_prompts(proxy: int, engine: int, secret: str, model: Path, count: int) -> list[Result]:
    """Milliseconds that the proxy adds to a call, median of `count` conversations."""
    tokenizer, text = Tokenizer.from_file(str(model / "tokenizer.json")), _sources()
    talks = [_talk(text, tokenizer, number) for number in range(count + 1)]
    times = asyncio.run(_measure(proxy, engine, secret, talks))
    base = median(times["engine"][1:])
    results = []
    for kind, bar in (("cold", 250), ("continued", 30)):
        value = median(times[kind][1:]) - base
        note = f"bar {bar} ms; best {min(times[kind][1:]) - base:.1f}; {TOKENS} tokens"
        results.append(Result(f"long_{kind}_ms", round(value, 2), "ms", round(base, 2), None, note))
    return results
