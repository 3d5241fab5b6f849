"""vLLM's Chat Completions with `return_token_ids`: the engine's own template, for native contexts.

The answer is parsed from the sampled ids, as everywhere; what the engine makes of it is used only where it gives no
ids (then nothing can be trained, and the harness is served all the same). Chunks with an empty delta carry ids too.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

import orjson

from polar_common.errors import EngineDown, EngineError, EngineRefused
from polar_render.messages import Image, Json, Message, Part, Text, Thinking, ToolCall, ToolSpec

from .base import Capabilities, Chunk, GenerateRequest
from .vllm import VllmEngine, finish_of, sampling_json
from .wire import error_from, events, load, logprobs_of, token_ids

__all__ = ["VllmChatEngine", "chat_messages"]

_SIDE = 56
"""Pixels: some processors take nothing smaller than two patches."""


def _png(side: int) -> str:
    """A black square as a data URL."""

    def block(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = zlib.compress((b"\0" + b"\0\0\0" * side) * side)
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", rows) + block(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


_PICTURE = _png(_SIDE)


def _content(message: Message, images: Mapping[str, str]) -> Json:
    if not any(isinstance(p, Image) for p in message.parts):
        return "".join(p.text for p in message.parts if isinstance(p, Text))
    parts: list[Json] = []
    for part in message.parts:
        if isinstance(part, Text):
            parts.append({"type": "text", "text": part.text})
        elif isinstance(part, Image):
            picture: dict[str, Json] = {"url": part.url or images[part.blob]}
            if part.detail:
                picture["detail"] = part.detail
            parts.append({"type": "image_url", "image_url": picture})
    return parts


def chat_messages(messages: tuple[Message, ...], images: Mapping[str, str]) -> list[Json]:
    """Messages in the chat API's form, arguments verbatim. `images`: data URLs by the pictures' hashes."""
    found: list[Json] = []
    for message in messages:
        out: dict[str, Json] = {"role": message.role, "content": _content(message, images)}
        if message.role == "tool":
            out["tool_call_id"] = message.call_id
        if message.name:
            out["name"] = message.name
        if thinking := "".join(t.text for t in message.thinking):
            out["reasoning"] = out["reasoning_content"] = thinking
        if calls := message.tool_calls:
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": _name(c), "arguments": c.arguments or "{}"}}
                for c in calls
            ]
        found.append(out)
    return found


def _name(tool: ToolCall | ToolSpec) -> str:
    return f"{tool.namespace}.{tool.name}" if tool.namespace else tool.name


def _tools(tools: tuple[ToolSpec, ...]) -> list[Json]:
    free: dict[str, Json] = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return [
        {
            "type": "function",
            "function": {
                "name": _name(t),
                "description": t.description,
                "parameters": free if t.custom else t.parameters or {"type": "object", "properties": {}},
            },
        }
        for t in tools
    ]


class _Said:
    """What the engine itself made of the answer, for the case that it gives no ids."""

    def __init__(self) -> None:
        self.text = ""
        self.thinking = ""
        self.calls: dict[int, ToolCall] = {}

    def add(self, delta: dict[str, Any]) -> None:
        self.text += delta.get("content") or ""
        self.thinking += delta.get("reasoning_content") or delta.get("reasoning") or ""
        for number, call in enumerate(delta.get("tool_calls") or ()):
            index, function = call.get("index", number), call.get("function") or {}
            known = self.calls.get(index, ToolCall("", "", ""))
            name, arguments = function.get("name") or "", function.get("arguments") or ""
            self.calls[index] = ToolCall("", known.name + name, known.arguments + arguments)

    def parts(self) -> tuple[Part, ...]:
        found: list[Part] = [Thinking(self.thinking)] if self.thinking else []
        if self.text:
            found.append(Text(self.text))
        return (*found, *(self.calls[i] for i in sorted(self.calls)))


class VllmChatEngine(VllmEngine):
    """One vLLM server, asked through its chat API."""

    name = "vllm_chat"

    def _chat(self, request: GenerateRequest, stream: bool) -> bytes:
        native = request.native
        if native is None:
            raise EngineRefused("this engine takes messages, not ids", 400)
        body: dict[str, Any] = {
            "model": self.model,
            "messages": chat_messages(native.messages, native.images),
            "stream": stream,
            **sampling_json(request.sampling, request.stop_token_ids),
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            "chat_template_kwargs": native.head.template_args,
            "add_generation_prompt": not native.prefill,
            "continue_final_message": native.prefill,
        }
        if native.head.tools:
            # "none" shows the tools to the model and leaves the reading of its calls to us.
            body |= {"tools": _tools(native.head.tools), "tool_choice": "none"}
        if request.guide is not None:
            body["response_format"] = request.guide
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        if stream:
            body["stream_options"] = {"include_usage": True}
        return orjson.dumps(body)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        response = await self._wire.post("/v1/chat/completions", self._chat(request, True), _named(request))
        said, finished, ids = _Said(), False, 0
        try:
            async for told in events(response):
                chunk = Chunk()
                for data in told:
                    read_chat(chunk, load(data), said)
                finished = response.over = finished or chunk.finish is not None
                ids += len(chunk.ids)
                if finished and not ids:
                    chunk.parts = said.parts()
                yield chunk
            if not finished:
                raise EngineDown("the engine's stream ended without a finish reason")
        finally:
            self._wire.release(response, ending=finished)

    async def complete(self, request: GenerateRequest) -> Chunk:
        body = await self._wire.ask("/v1/chat/completions", self._chat(request, False), _named(request))
        chunk, said = Chunk(), _Said()
        read_chat(chunk, body, said)
        if chunk.finish is None:
            raise EngineDown("the engine's answer has no finish reason")
        if not chunk.ids:
            chunk.parts = said.parts()
        return chunk

    async def _try(self) -> Chunk:
        body = {
            "model": self.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "temperature": 1.0,
            "logprobs": True, "top_logprobs": 0, "return_token_ids": True,
        }  # fmt: skip
        chunk = Chunk()
        read_chat(chunk, await self._wire.ask("/v1/chat/completions", orjson.dumps(body)), _Said())
        return chunk

    async def capabilities(self) -> Capabilities:
        found = await self._capabilities(ids_in=False)
        return replace(found, images=await self._takes_images())

    async def _takes_images(self) -> bool:
        """Whether the model sees pictures: nothing lists it, so it is shown one. However it refuses, it doesn't."""
        picture: Json = {"type": "image_url", "image_url": {"url": _PICTURE}}
        body = {
            "model": self.model, "messages": [{"role": "user", "content": [picture, {"type": "text", "text": "x"}]}],
            "max_tokens": 1, "temperature": 1.0,
        }  # fmt: skip
        try:
            await self._wire.ask("/v1/chat/completions", orjson.dumps(body))
        except EngineError:
            return False
        return True

    async def abort(self, request_id: str) -> None:
        await self._wire.ask("/abort_requests", orjson.dumps({"request_ids": [f"chatcmpl-{request_id}"]}))


def _named(request: GenerateRequest) -> str:
    return f"x-request-id: {request.request_id}\r\n"


def read_chat(chunk: Chunk, body: dict[str, Any], said: _Said) -> None:
    """Add one answer or one event. Raises EngineError for an error in it, EngineDown for nonsense."""
    try:
        if (error := body.get("error")) is not None:
            raise error_from(int(error.get("code") or 500), orjson.dumps(body))
        if (prompt := body.get("prompt_token_ids")) is not None:
            chunk.prompt_ids = token_ids(prompt)
        if (usage := body.get("usage")) is not None:
            chunk.prompt_tokens = usage.get("prompt_tokens") or 0
            chunk.completion_tokens = usage.get("completion_tokens") or 0
            chunk.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in body["choices"]:
            if choice.get("index"):
                raise ValueError("a choice that wasn't asked for")
            said.add(choice.get("delta") or choice.get("message") or {})
            chunk.ids += token_ids(choice.get("token_ids") or [])
            content = (choice.get("logprobs") or {}).get("content")
            if content is not None:
                values = logprobs_of(content, "logprob")
                chunk.logprobs = values if chunk.logprobs is None else chunk.logprobs + values
            if choice.get("finish_reason") is not None:
                reason = choice["finish_reason"]
                chunk.finish = finish_of("stop" if reason == "tool_calls" else reason)
                chunk.stop_reason = choice.get("stop_reason")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineDown(f"an answer that isn't understood: {error!r}") from error
