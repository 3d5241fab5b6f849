"""A scripted model for real harnesses: first a tool call that writes hello.txt, then a closing sentence.

It serves the four model APIs, streamed and not, on a Unix socket in a directory of its own, below any `/s/<key>`
prefix, and remembers what it was asked. Which tool it calls depends on which it is offered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMAND = "printf 'hi\\n' > hello.txt"
CLOSING = "Wrote hello.txt."
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
Json = dict[str, Any]


@dataclass
class Seen:
    """One model call."""

    method: str
    path: str
    headers: dict[str, str]
    body: Json

    @property
    def key(self) -> str:
        return self.path.split("/")[2] if self.path.startswith("/s/") else ""


@dataclass
class Scripted:
    """`await serve()`, then point harnesses at the socket. `status` ≠ 200 makes every call fail with it."""

    path: Path
    seen: list[Seen] = field(default_factory=list)
    final_command: str = ""
    """A second tool call, for harnesses that end only by one."""
    edit_text: str = ""
    """What is answered instead of a tool call where no tools are offered."""
    status: int = 200
    pause: float = 0.0

    async def serve(self) -> asyncio.Server:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        server = await asyncio.start_unix_server(self._connection, self.path)
        self.path.chmod(0o666)
        return server

    @property
    def calls(self) -> list[Seen]:
        return [s for s in self.seen if s.method == "POST"]

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while request := await _request(reader):
                self.seen.append(request)
                await asyncio.sleep(self.pause)
                writer.write(self._answer(request))
                await writer.drain()
        writer.close()

    def _answer(self, request: Seen) -> bytes:
        path = request.path.partition("?")[0]
        if request.method == "HEAD":
            return _plain(200, None)
        if request.method != "POST":
            return _plain(426 if path.endswith("/responses") else 404, {"error": {"message": "not here"}})
        if self.status != 200:
            return _plain(self.status, {"error": {"message": "scripted failure", "type": "scripted"}})
        encode = next((e for part, e in _APIS.items() if part in path), None)
        if encode is None:
            return _plain(404, {"error": {"message": "not here"}})
        stream = bool(request.body.get("stream")) or ":stream" in path
        whole, events = encode(request.body, *self._turn(request.body))
        return _sse(events) if stream else _plain(200, whole)

    def _turn(self, body: Json) -> tuple[str, list[tuple[str, Json]]]:
        tools = _offered(body)
        results = json.dumps(body).count('"tool_result"') + sum(
            json.dumps(body).count(mark) for mark in ('"role": "tool"', '"function_call_output"', '"functionResponse"')
        )
        command = COMMAND if results == 0 else self.final_command if results == 1 else ""
        call = _pick(tools, command) if command else None
        if call:
            return "I will write the file.", [call]
        return (self.edit_text if self.edit_text and not tools else CLOSING), []


async def _request(reader: asyncio.StreamReader) -> Seen | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    raw = b""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            raw += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    else:
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(method, path, headers, json.loads(raw) if raw else {})


def _offered(body: Json) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for tool in body.get("tools") or []:
        for one in tool.get("functionDeclarations", []) or [tool.get("function", tool)]:
            schema = one.get("input_schema") or one.get("parameters") or one.get("parametersJsonSchema") or {}
            found[one.get("name", "")] = schema.get("properties", {})
    return found


def _pick(tools: dict[str, Json], command: str) -> tuple[str, Json] | None:
    for name in ("Bash", "bash", "exec_command", "shell", "run_shell_command"):
        if name in tools:
            arguments: Json = {"cmd" if "cmd" in tools[name] else "command": command}
            if "description" in tools[name]:
                arguments["description"] = "Write the file"
            if "is_background" in tools[name]:
                arguments["is_background"] = False
            return name, arguments
    return None


Calls = list[tuple[str, Json]]
Event = tuple[str, Json | str]


def _chat(body: Json, text: str, calls: Calls) -> tuple[Json, Iterator[Event]]:
    made = [
        {"index": i, "id": f"call_{i}_{len(body['messages'])}", "type": "function",
         "function": {"name": n, "arguments": json.dumps(a)}}
        for i, (n, a) in enumerate(calls)
    ]  # fmt: skip
    reason = "tool_calls" if calls else "stop"
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    base: Json = {"id": "chatcmpl-1", "created": 1, "model": body.get("model")}
    message: Json = {"role": "assistant", "content": text} | ({"tool_calls": made} if made else {})
    choice = {"index": 0, "message": message, "finish_reason": reason}

    def events() -> Iterator[Event]:
        deltas = [{"role": "assistant", "content": ""}, {"content": text}, *({"tool_calls": [c]} for c in made)]
        for delta in deltas:
            yield "", {**base, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}
        end = {"index": 0, "delta": {}, "finish_reason": reason}
        yield "", {**base, "object": "chat.completion.chunk", "choices": [end]}
        yield "", {**base, "object": "chat.completion.chunk", "choices": [], "usage": usage}
        yield "", "[DONE]"

    return {**base, "object": "chat.completion", "choices": [choice], "usage": usage}, events()


def _messages(body: Json, text: str, calls: Calls) -> tuple[Json, Iterator[Event]]:
    count = len(body["messages"])
    blocks: list[Json] = [{"type": "text", "text": text}]
    blocks += [
        {"type": "tool_use", "id": f"toolu_{i}_{count}", "name": n, "input": a} for i, (n, a) in enumerate(calls)
    ]
    reason = "tool_use" if calls else "end_turn"
    usage = {"input_tokens": 100, "output_tokens": 10}
    whole: Json = {"id": "msg_1", "type": "message", "role": "assistant", "model": body.get("model"), "content": blocks}
    whole |= {"stop_reason": reason, "stop_sequence": None, "usage": usage}

    def events() -> Iterator[Event]:
        yield "message_start", {"message": {**whole, "content": [], "stop_reason": None}}
        for i, block in enumerate(blocks):
            tool = block["type"] == "tool_use"
            start = {**block, "input": {}} if tool else {"type": "text", "text": ""}
            delta: Json = {"type": "text_delta", "text": block.get("text")}
            if tool:
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield "content_block_start", {"index": i, "content_block": start}
            yield "content_block_delta", {"index": i, "delta": delta}
            yield "content_block_stop", {"index": i}
        yield "message_delta", {"delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}
        yield "message_stop", {}

    return whole, ((name, {"type": name, **data}) for name, data in events())  # type: ignore[dict-item]


def _responses(body: Json, text: str, calls: Calls) -> tuple[Json, Iterator[Event]]:
    count = len(body["input"])
    part = {"type": "output_text", "text": text, "annotations": []}
    items: list[Json] = [
        {"id": f"fc_{i}_{count}", "type": "function_call", "call_id": f"call_{i}_{count}", "name": n,
         "arguments": json.dumps(a), "status": "completed"}
        for i, (n, a) in enumerate(calls)
    ]  # fmt: skip
    if not items:
        items = [{"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}]
    usage = {"input_tokens": 100, "output_tokens": 10, "total_tokens": 110}
    whole: Json = {"id": "resp_1", "object": "response", "status": "completed", "model": body.get("model")}
    whole |= {"output": items, "usage": usage}

    def events() -> Iterator[Event]:
        yield "response.created", {"response": {**whole, "status": "in_progress", "output": [], "usage": None}}
        for i, item in enumerate(items):
            yield "response.output_item.added", {"output_index": i, "item": {**item, "status": "in_progress"}}
            if item["type"] == "message":
                where = {"item_id": item["id"], "output_index": i, "content_index": 0}
                yield "response.content_part.added", {**where, "part": {**part, "text": ""}}
                yield "response.output_text.delta", {**where, "delta": text}
                yield "response.output_text.done", {**where, "text": text}
                yield "response.content_part.done", {**where, "part": part}
            else:
                where = {"item_id": item["id"], "output_index": i}
                yield "response.function_call_arguments.delta", {**where, "delta": item["arguments"]}
                yield "response.function_call_arguments.done", {**where, "arguments": item["arguments"]}
            yield "response.output_item.done", {"output_index": i, "item": item}
        yield "response.completed", {"response": whole}

    numbered = enumerate(events())
    return whole, ((name, {"type": name, "sequence_number": i, **data}) for i, (name, data) in numbered)  # type: ignore[dict-item]


def _google(body: Json, text: str, calls: Calls) -> tuple[Json, Iterator[Event]]:
    parts: list[Json] = [{"text": text}]
    parts += [{"functionCall": {"name": n, "args": a}} for n, a in calls]
    usage = {"promptTokenCount": 100, "candidatesTokenCount": 10, "totalTokenCount": 110}
    candidate = {"index": 0, "content": {"role": "model", "parts": parts}, "finishReason": "STOP"}
    whole: Json = {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "scripted"}
    return whole, iter([("", whole)])


_APIS = {
    "/chat/completions": _chat,
    "/v1/messages": _messages,
    "/v1/responses": _responses,
    "enerateContent": _google,
}


def _plain(status: int, body: Json | None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    return (
        f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    )


def _sse(events: Iterator[Event]) -> bytes:
    out = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    for name, data in events:
        line = data if isinstance(data, str) else json.dumps(data)
        chunk = (f"event: {name}\n" if name else "").encode() + f"data: {line}\n\n".encode()
        out += b"%x\r\n%s\r\n" % (len(chunk), chunk)
    return out + b"0\r\n\r\n"
