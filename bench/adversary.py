"""An engine that makes exactness hard, and journals the ids it received and said.

It says what a model might and a template never would: ids that no tokenizer chooses, JSON with odd spacing, answers cut
by length or by a stop string, thinking, parallel calls. Each happens in at least a fifth of the turns. What is said
depends on the prompt alone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
from pathlib import Path
from typing import Any

import orjson
import uvloop
from tokenizers import Tokenizer

from bench.fake_engine import Engine

FEATURES = ("split", "spaced", "length", "stop", "thinking", "parallel")
_TOOL = re.compile(r'"name": ?"([a-z_]+)"')
_SAID = "the file has seven lines and one of them, naïvely, holds 日本 – so I look at it again before I change it"
_WORDS = tuple(_SAID.split())


class Adversary(Engine):
    """One connection."""

    tokenizer: Tokenizer
    journal: Any

    def _answer(self, request: dict[str, Any]) -> tuple[list[int], str, str | int | None, list[str]]:
        """Ids, finish reason, stop reason, and which features there are."""
        prompt = request["token_ids"]
        sampling = request["sampling_params"]
        rng = random.Random(f"{self.options.seed}/{len(prompt)}/{sum(prompt)}")
        seen = self.tokenizer.decode(prompt, skip_special_tokens=False)
        tools = sorted(set(_TOOL.findall(seen.partition("<|im_end|>")[0])))
        # How an answer ends: in text cut by length, at a stop string, or (mostly) with calls.
        end = rng.random()
        has = [f for f in ("split", "thinking") if rng.random() < 0.35]
        stop = rng.choice(sampling["stop"]) if sampling["stop"] and 0.24 <= end < 0.62 else None
        calls = 0
        if end < 0.24:
            has.append("length")
        elif stop is not None:
            has.append("stop")
        elif tools and rng.random() < 0.9:
            has += [f for f in ("spaced", "parallel") if rng.random() < 0.65]
            calls = 2 if "parallel" in has else 1
        text = "<think>\n" + self._words(rng) + "\n</think>\n\n" if "thinking" in has else ""
        text += self._words(rng)
        for number in range(calls):
            text += "\n<tool_call>\n" + self._call(rng, tools, number, spaced="spaced" in has) + "\n</tool_call>"
        if stop:
            ids = self._tokens(f"{text} {stop}{'' if rng.random() < 0.5 else 'x'}", rng, split="split" in has)
            return ids, "stop", stop, has
        ids = self._tokens(text, rng, split="split" in has)
        if "length" in has:
            return ids, "length", None, has
        return [*ids, self.options.end], "stop", self.options.end, has

    @staticmethod
    def _words(rng: random.Random) -> str:
        return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(3, 20)))

    def _call(self, rng: random.Random, tools: list[str], number: int, *, spaced: bool) -> str:
        arguments: dict[str, Any] = {"path": f"f{number}.txt", "content": self._words(rng), "deep": {"n": [1, number]}}
        gap = " " * rng.randint(1, 3) if spaced else ""
        body = orjson.dumps(arguments).decode()
        if spaced:
            body = body.replace('":', f'"{gap}:{gap}').replace(',"', f',{gap}"')
        return f'{{"name": "{rng.choice(tools)}", "arguments": {body}}}'

    def _tokens(self, text: str, rng: random.Random, *, split: bool) -> list[int]:
        if not split:
            return list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        for piece in re.split(r"(</?think>|</?tool_call>)", text):
            if piece.startswith("<") and (whole := self.tokenizer.token_to_id(piece)) is not None:
                ids.append(whole)
                continue
            at = 0
            while at < len(piece):
                size = rng.randint(1, 7)
                ids += self.tokenizer.encode(piece[at : at + size], add_special_tokens=False).ids
                at += size
        return ids

    async def _generate(self, request: dict[str, Any]) -> None:
        name = request.get("request_id")
        if not name:
            await super()._generate(request)
            return
        ids, finish, reason, has = self._answer(request)
        limit = request["sampling_params"]["max_tokens"]
        if len(ids) > limit:
            ids, finish, reason = ids[:limit], "length", None
        line = {"id": name, "prompt": request["token_ids"], "sampled": ids, "finish": finish, "features": has}
        self.journal.write(orjson.dumps(line) + b"\n")
        self.journal.flush()
        usage = {"prompt_tokens": len(request["token_ids"]), "completion_tokens": len(ids)}
        ending = {"finish_reason": finish, "stop_reason": reason}
        head = {"request_id": f"generate-tokens-{name}", "usage": None}
        told = {"prompt_token_ids": request["token_ids"]} if request.get("return_token_ids") else {}
        if not request.get("stream"):
            choice = self._choice(ids, "stop", len(ids)) | ending
            self._json(head | told | {"usage": usage, "choices": [choice]})
            return
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for at in range(0, len(ids), 3):
            last = at + 3 >= len(ids)
            choice = self._choice(ids[at : at + 3], "stop" if last else None, len(ids)) | (ending if last else {})
            self._event(head | (told if not at else {}) | {"choices": [choice]})
        self._event(head | {"usage": usage, "choices": []})
        self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def serve(options: argparse.Namespace) -> None:
    model = Path(options.model)
    Adversary.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    Adversary.journal = Path(options.journal).open("ab")  # noqa: SIM115 - open as long as the process lives
    options.end = Adversary.tokenizer.token_to_id("<|im_end|>")
    server = await asyncio.get_running_loop().create_server(lambda: Adversary(options), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--journal", required=True)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    options.tokens, options.ttft, options.gap, options.low, options.spread = 1, 0.0, 0.0, 100, 0
    uvloop.run(serve(options))


if __name__ == "__main__":
    main()
