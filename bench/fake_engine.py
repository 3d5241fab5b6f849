"""A fast fake engine for benchmarks: vLLM's token endpoint over a bare protocol, fixed answers, chosen delays.

`python -m bench.fake_engine` prints its port on a line and serves until it's killed. It says `--tokens` ids per answer,
one per event when streamed, the first after `--ttft-ms`, the others `--gap-ms` apart.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from typing import Any

import httptools
import orjson
import uvloop

WINDOW = 131_072


class Engine(asyncio.Protocol):
    """One connection. `options`: tokens, ttft and gap in seconds, the end-of-turn id, the ids to say."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.transport: Any = None
        self.parser = httptools.HttpRequestParser(self)
        self.url = b""
        self.body = b""
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url, self.body = b"", b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if self.url == b"/inference/v1/generate":
            request = orjson.loads(self.body)
            self.task = asyncio.get_running_loop().create_task(self._generate(request))
        elif self.url == b"/v1/models":
            self._json({"data": [{"id": "policy", "max_model_len": WINDOW}]})
        else:
            self._json({"version": "fake"})

    def _json(self, value: Any) -> None:
        body = orjson.dumps(value)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)

    def _ids(self, request: dict[str, Any]) -> list[int]:
        """Ids that differ from prompt to prompt, so that conversations do."""
        prompt, low = request["token_ids"], self.options.low
        mixed = (sum(prompt[-64:]) * 31 + len(prompt)) % 997
        count = min(self.options.tokens, request["sampling_params"]["max_tokens"])
        if self.options.spread:
            rng = random.Random(mixed * 1_000_003 + len(prompt))
            return [low + rng.randrange(self.options.spread) for _ in range(count - 1)] + [self.options.end]
        return [low + (mixed + 7 * i) % 300 for i in range(count - 1)] + [self.options.end]

    def _logprobs(self, ids: list[int]) -> list[float]:
        """The same everywhere, or as different as real ones are: what they cost to store depends on it."""
        if not self.options.spread:
            return [-0.7377762198448181] * len(ids)
        rng = random.Random(str(ids[:8]))
        return [-rng.expovariate(2.5) for _ in ids]

    def _choice(self, ids: list[int], finish: str | None, total: int) -> dict[str, Any]:
        return {
            "index": 0,
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [{"version": "v0", "start": 0, "end": total}] if finish else None,
            "logprobs": {
                "content": [
                    {"token_id": i, "logprob": p, "rank": 1,
                     "top_logprobs": [{"token_id": i, "logprob": p, "rank": 1}]}
                    for i, p in zip(ids, self._logprobs(ids), strict=True)
                ]
            },
        }  # fmt: skip

    async def _generate(self, request: dict[str, Any]) -> None:
        ids = self._ids(request)
        usage = {
            "prompt_tokens": len(request["token_ids"]),
            "completion_tokens": len(ids),
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        name = f"generate-tokens-{request.get('request_id')}"
        if self.options.ttft:
            await asyncio.sleep(self.options.ttft)
        if not request.get("stream"):
            if self.options.gap:
                await asyncio.sleep(self.options.gap * (len(ids) - 1))
            body = {
                "request_id": name,
                "model": "policy",
                "usage": usage,
                "choices": [self._choice(ids, "stop", len(ids))],
            }
            if request.get("return_token_ids"):
                body["prompt_token_ids"] = request["token_ids"]
            self._json(body)
            return
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for at, token in enumerate(ids):
            if at and self.options.gap:
                await asyncio.sleep(self.options.gap)
            last = at + 1 == len(ids)
            event = {"request_id": name, "usage": None, "output_mode": "tokens",
                     "choices": [self._choice([token], "stop" if last else None, len(ids))]}  # fmt: skip
            if not at and request.get("return_token_ids"):
                event["prompt_token_ids"] = request["token_ids"]
            self._event(event)
        self._event({"request_id": name, "usage": usage, "choices": []})
        done = b"data: [DONE]\n\n"
        self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(done), done))

    def _event(self, value: Any) -> None:
        data = b"data: " + orjson.dumps(value) + b"\n\n"
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def serve(options: argparse.Namespace) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Engine(options), "127.0.0.1", options.port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--ttft-ms", type=float, default=0)
    parser.add_argument("--gap-ms", type=float, default=0)
    parser.add_argument("--low", type=int, default=100, help="smallest id to say; 300 ids above it are used")
    parser.add_argument("--spread", type=int, default=0, help="ids to draw from, with log-probs that differ")
    parser.add_argument("--end", type=int, default=2, help="end-of-turn id")
    options = parser.parse_args(argv)
    options.ttft, options.gap = options.ttft_ms / 1000, options.gap_ms / 1000
    try:
        uvloop.run(serve(options))
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
