"""Wire servers that answer as recorded: the structure of real answers, with values of our own.

vLLM's structures are those that a real server gave; SGLang's are its published fields. One logical answer is told in
each engine's way: ids 19, 490, 2 with their log-probs after the prompt 1, 9690, 198.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

PROMPT = [1, 9690, 198]
IDS = [19, 490, 2]
LOGPROBS = [-0.75, -5.5, -0.125]
VERSIONS = [{"version": "step-7", "start": 0, "end": 2}, {"version": "step-8", "start": 2, "end": 3}]


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    closed: bool = False


@dataclass
class Wire:
    """A server. `split`: bytes per write of a streamed body, 0 for all at once. `answer`: (status, headers, body) by
    path instead of the recorded one. `hang_after`: stop in mid-stream after so many bytes, and wait."""

    kind: str
    split: int = 0
    answer: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    hang_after: int | None = None
    cut_after: int | None = None
    requests: list[Request] = field(default_factory=list)
    edit: Callable[[dict[str, Any]], None] | None = None
    url: str = ""
    connections: int = 0

    @property
    def generations(self) -> list[Request]:
        paths = ("/inference/v1/generate", "/generate", "/v1/chat/completions")
        return [r for r in self.requests if r.path in paths]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while (request := await self._read(reader)) is not None:
                self.requests.append(request)
                await self._reply(request, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            if self.requests:
                self.requests[-1].closed = True
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Request | None:
        line = await reader.readline()
        if not line:
            return None
        method, path, _ = line.decode().split(" ")
        headers = {}
        while head := (await reader.readline()).decode().strip():
            name, _, value = head.partition(":")
            headers[name.lower()] = value.strip()
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        return Request(method, path, headers, json.loads(raw) if raw else None)

    async def _reply(self, request: Request, writer: asyncio.StreamWriter) -> None:
        path = request.path.partition("?")[0]
        if path in self.answer:
            status, headers, body = self.answer[path]
            await self._send(writer, status, headers, body)
        elif request.body and request.body.get("stream"):
            await self._stream(writer, b"".join(self.events(request)))
        else:
            status, told = self.whole(request, path)
            await self._send(writer, status, {"content-type": "application/json"}, json.dumps(told).encode())

    async def _send(self, writer: asyncio.StreamWriter, status: int, headers: dict[str, str], body: bytes) -> None:
        head = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
        writer.write(f"HTTP/1.1 {status} X\r\n{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        step = self.split or len(data)
        for at in range(0, len(data), step):
            if self.cut_after is not None and at >= self.cut_after:
                writer.close()
                raise ConnectionError
            if self.hang_after is not None and at >= self.hang_after:
                await asyncio.sleep(30)
            piece = data[at : at + step]
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    # -- what is said

    def whole(self, request: Request, path: str) -> tuple[int, Any]:
        """Status and JSON of an unstreamed answer."""
        if path in ("/health", "/resume", "/pause", "/collective_rpc", "/abort_requests", "/abort_request"):
            return 200, {"status": "ok"}
        if path in ("/update_weight_version", "/update_weights_from_disk", "/pause_generation", "/continue_generation"):
            return 200, {"success": True, "message": "ok"}
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "smol", "object": "model", "max_model_len": 2048}]}
        if path == "/version":
            return 200, {"version": "0.32.0"}
        if path == "/weight_info":
            return 200, {"weight_version": "step-8"}
        if path == "/is_paused":
            return 200, {"is_paused": False}
        if path == "/get_model_info":
            return 200, {"model_path": "smol", "is_generation": True, "weight_version": "step-8"}
        if path == "/get_server_info":
            return 200, {"version": "0.5.23", "context_length": 2048, "dtype": "float32", "served_model_name": "smol"}
        if path in ("/inference/v1/generate", "/generate", "/v1/chat/completions"):
            body = {"vllm": _vllm, "sglang": _sglang, "vllm_chat": _chat}[self.kind](len(IDS), 0, True)
            if self.kind == "vllm":
                body["prompt_token_ids"] = PROMPT if request.body.get("return_token_ids") else None
            if self.edit is not None:
                self.edit(body)
            return 200, body
        return 404, {"detail": "Not Found"}

    def events(self, request: Request) -> list[bytes]:
        """The events of a streamed answer, one id each."""
        out: list[dict[str, Any]] = []
        if self.kind == "vllm_chat":
            opening = _chat_chunk([], 0, False)
            opening["choices"][0]["delta"] = {"role": "assistant", "content": ""}
            opening["prompt_token_ids"] = PROMPT
            out.append(opening)
        for at in range(len(IDS)):
            last = at + 1 == len(IDS)
            if self.kind == "vllm":
                out.append(_vllm(1, at, last))
            elif self.kind == "sglang":
                out.append(_sglang(at + 1, 0, last))
            else:
                out.append(_chat_chunk(IDS[at : at + 1], at, last))
        if self.kind != "sglang":
            out.append({"usage": _USAGE, "choices": []})
        if self.edit is not None:
            for body in out:
                self.edit(body)
        return [b"data: " + json.dumps(e).encode() + b"\n\n" for e in out] + [b"data: [DONE]\n\n"]


_USAGE = {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def _vllm(count: int, at: int, last: bool) -> dict[str, Any]:
    ids, values = IDS[at : at + count], LOGPROBS[at : at + count]
    content = [
        {"token_id": i, "logprob": v, "rank": 1, "top_logprobs": [{"token_id": i, "logprob": v, "rank": 1}]}
        for i, v in zip(ids, values, strict=True)
    ]
    choice = {
        "index": 0, "finish_reason": "stop" if last else None, "stop_reason": 2 if last else None, "token_ids": ids,
        "routed_experts": None, "sampling_mask": None, "weight_versions": VERSIONS if last else None,
        "logprobs": {"content": content},
    }  # fmt: skip
    whole = last and count == len(IDS)
    return {
        "request_id": "generate-tokens-rid", "usage": _USAGE if whole else None, "output_mode": "tokens",
        "choices": [choice],
    }  # fmt: skip


def _sglang(count: int, at: int, last: bool) -> dict[str, Any]:
    """Everything so far, log-probs first in each triple."""
    ids = IDS[at : at + count]
    return {
        "text": "x" * count,
        "output_ids": ids,
        "meta_info": {
            "id": "rid", "finish_reason": {"type": "stop", "matched": 2} if last else None, "prompt_tokens": 3,
            "completion_tokens": count, "cached_tokens": 2, "weight_version": "step-8",
            "weight_versions": ["step-7", "step-7", "step-8"][:count],
            "output_token_logprobs": [[v, i, None] for i, v in zip(ids, LOGPROBS, strict=False)],
        },
    }  # fmt: skip


def _chat(count: int, at: int, last: bool) -> dict[str, Any]:
    content = [{"token": f"token_id:{i}", "logprob": v, "bytes": [1], "top_logprobs": []}
               for i, v in zip(IDS, LOGPROBS, strict=True)]  # fmt: skip
    choice = {
        "index": 0, "message": {"role": "assistant", "content": "hey", "tool_calls": [], "reasoning": None},
        "logprobs": {"content": content}, "finish_reason": "stop", "stop_reason": 2, "token_ids": IDS,
    }  # fmt: skip
    return {"id": "chatcmpl-x", "choices": [choice], "usage": _USAGE, "prompt_token_ids": PROMPT}


def _chat_chunk(ids: list[int], at: int, last: bool) -> dict[str, Any]:
    """The last id comes with an empty delta."""
    content = [{"token": f"token_id:{i}", "logprob": LOGPROBS[at], "bytes": [1], "top_logprobs": []} for i in ids]
    choice: dict[str, Any] = {
        "index": 0, "delta": {} if last else {"content": "h"}, "logprobs": {"content": content} if ids else None,
        "finish_reason": "stop" if last else None,
    }  # fmt: skip
    if ids:
        choice["token_ids"] = ids
    if last:
        choice["stop_reason"] = 2
    return {"id": "chatcmpl-x", "object": "chat.completion.chunk", "choices": [choice]}


@asynccontextmanager
async def serving(wire: Wire) -> AsyncIterator[Wire]:
    server = await asyncio.start_server(wire.handle, "127.0.0.1", 0)
    wire.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield wire
    finally:
        server.close()
