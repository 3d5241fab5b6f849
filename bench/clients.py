"""Harnesses in a few lines: one per API, each with the habits that the real CLIs have when they send a turn back.

chat: arguments written anew, thinking sent back (as pi and Qwen Code do). anthropic: parsed arguments, thinking with
its signature, cache marks that move (Claude Code). responses: items sent back as they came, arguments byte for byte
(Codex). google: thoughts dropped, parsed arguments, own ids (Gemini CLI).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import orjson

__all__ = ["CLIENTS", "Harness"]

SYSTEM = "You are a careful agent. Use the tools."
TOOLS = ("look_at", "write_file")
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}, "deep": {"type": "object"}},
}
Obj = dict[str, Any]


class Harness(ABC):
    """A conversation. `calls`: ids and names of tool calls that wait for their results."""

    path = ""

    def __init__(self, stop: tuple[str, ...], limit: int) -> None:
        self.stop = stop
        self.limit = limit
        self.calls: list[tuple[str, str]] = []

    def url(self, stream: bool) -> str:
        return self.path

    @abstractmethod
    def body(self, stream: bool) -> Obj: ...

    @abstractmethod
    def took(self, answer: Obj) -> None:
        """Put an unstreamed answer into the history."""

    @abstractmethod
    def gathered(self, events: list[Obj]) -> Obj:
        """A stream's events as the unstreamed answer."""

    @abstractmethod
    def say(self, text: str) -> None: ...

    @abstractmethod
    def results(self) -> None:
        """Answer the waiting calls."""


class Chat(Harness):
    path = "/v1/chat/completions"

    def __init__(self, stop: tuple[str, ...], limit: int) -> None:
        super().__init__(stop, limit)
        self.messages: list[Obj] = [{"role": "system", "content": SYSTEM}]

    def body(self, stream: bool) -> Obj:
        tools = [{"type": "function", "function": {"name": n, "parameters": PARAMETERS}} for n in TOOLS]
        return {"model": "m", "messages": self.messages, "tools": tools, "stream": stream, "stop": list(self.stop),
                "max_tokens": self.limit}  # fmt: skip

    def gathered(self, events: list[Obj]) -> Obj:
        message: Obj = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
        for event in events:
            for choice in event["choices"]:
                delta = choice["delta"]
                message["content"] += delta.get("content") or ""
                message["reasoning_content"] += delta.get("reasoning_content") or ""
                for call in delta.get("tool_calls") or ():
                    if call.get("id"):
                        message["tool_calls"].append({"id": call["id"], "type": "function", "function": {
                            "name": call["function"]["name"], "arguments": ""}})  # fmt: skip
                    message["tool_calls"][call["index"]]["function"]["arguments"] += (
                        call["function"].get("arguments") or ""
                    )
        return {"choices": [{"message": message}]}

    def took(self, answer: Obj) -> None:
        told = answer["choices"][0]["message"]
        message: Obj = {"role": "assistant", "content": told.get("content") or None}
        if told.get("reasoning_content"):
            message["reasoning_content"] = told["reasoning_content"]
        calls = []
        for call in told.get("tool_calls") or ():
            function = dict(call["function"])
            function["arguments"] = orjson.dumps(orjson.loads(function["arguments"] or "{}")).decode()
            calls.append({**call, "function": function})
        if calls:
            message["tool_calls"] = calls
        self.calls = [(c["id"], c["function"]["name"]) for c in calls]
        self.messages.append(message)

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def results(self) -> None:
        for number, (call, _) in enumerate(self.calls):
            self.messages.append({"role": "tool", "tool_call_id": call, "content": f"result {number} of {call[-4:]}"})


class Anthropic(Harness):
    path = "/v1/messages?beta=true"

    def __init__(self, stop: tuple[str, ...], limit: int) -> None:
        super().__init__(stop, limit)
        self.messages: list[Obj] = []
        self.count = 0

    def body(self, stream: bool) -> Obj:
        self.count += 1
        billing = f"x-anthropic-billing-header: cc_version=2; cch={self.count:05x};"
        for message in self.messages:
            for block in message["content"]:
                block.pop("cache_control", None)
        self.messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        return {
            "model": "claude", "max_tokens": self.limit, "messages": self.messages, "stream": stream,
            "system": [{"type": "text", "text": billing}, {"type": "text", "text": SYSTEM}],
            "tools": [{"name": n, "input_schema": PARAMETERS} for n in TOOLS], "stop_sequences": list(self.stop),
        }  # fmt: skip

    def gathered(self, events: list[Obj]) -> Obj:
        blocks: list[Obj] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(dict(event["content_block"]))
            elif event["type"] == "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                kind = delta["type"]
                if kind == "input_json_delta":
                    block["json"] = block.get("json", "") + delta["partial_json"]
                else:
                    key = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}[kind]
                    block[key] = block.get(key, "") + delta[key]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = orjson.loads(block.pop("json", "") or "{}")
        return {"content": blocks}

    def took(self, answer: Obj) -> None:
        blocks = [dict(b) for b in answer["content"] if b["type"] != "text" or b["text"]]
        self.calls = [(b["id"], b["name"]) for b in blocks if b["type"] == "tool_use"]
        self.messages.append({"role": "assistant", "content": blocks or [{"type": "text", "text": "(nothing)"}]})

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def results(self) -> None:
        blocks = [
            {"type": "tool_result", "tool_use_id": c, "content": [{"type": "text", "text": f"result of {c[-4:]}"}]}
            for c, _ in self.calls
        ]
        self.messages.append({"role": "user", "content": blocks})


class Responses(Harness):
    path = "/v1/responses"

    def __init__(self, stop: tuple[str, ...], limit: int) -> None:
        super().__init__((), limit)
        self.items: list[Obj] = [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": SYSTEM}]}
        ]

    def body(self, stream: bool) -> Obj:
        return {
            "model": "gpt", "input": self.items, "stream": stream, "store": False, "max_output_tokens": self.limit,
            "include": ["reasoning.encrypted_content"], "parallel_tool_calls": True,
            "tools": [{"type": "function", "name": n, "parameters": PARAMETERS, "strict": False} for n in TOOLS],
        }  # fmt: skip

    def gathered(self, events: list[Obj]) -> Obj:
        done = [e for e in events if e["type"] in ("response.completed", "response.incomplete")]
        items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert len(done) == 1, events[-1]
        return {"output": items}

    def took(self, answer: Obj) -> None:
        self.items += answer["output"]
        self.calls = [(i["call_id"], i["name"]) for i in answer["output"] if i["type"] == "function_call"]

    def say(self, text: str) -> None:
        self.items.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]})

    def results(self) -> None:
        for call, _ in self.calls:
            self.items.append({"type": "function_call_output", "call_id": call, "output": f"result of {call[-4:]}"})


class Google(Harness):
    def __init__(self, stop: tuple[str, ...], limit: int) -> None:
        super().__init__(stop, limit)
        self.contents: list[Obj] = []
        self.made = 0

    def url(self, stream: bool) -> str:
        return "/v1beta/models/gemini:" + ("streamGenerateContent?alt=sse" if stream else "generateContent")

    def body(self, stream: bool) -> Obj:
        config: Obj = {"maxOutputTokens": self.limit, "thinkingConfig": {"includeThoughts": True}}
        if self.stop:
            config["stopSequences"] = list(self.stop)
        return {
            "contents": self.contents, "systemInstruction": {"role": "user", "parts": [{"text": SYSTEM}]},
            "tools": [{"functionDeclarations": [{"name": n, "parametersJsonSchema": PARAMETERS} for n in TOOLS]}],
            "generationConfig": config,
        }  # fmt: skip

    def gathered(self, events: list[Obj]) -> Obj:
        parts: list[Obj] = []
        for event in events:
            for candidate in event.get("candidates") or ():
                parts += candidate.get("content", {}).get("parts") or ()
        return {"candidates": [{"content": {"parts": parts}}]}

    def took(self, answer: Obj) -> None:
        parts: list[Obj] = []
        self.calls = []
        for part in answer["candidates"][0].get("content", {}).get("parts") or ():
            if part.get("thought"):
                continue
            if (call := part.get("functionCall")) is not None:
                self.made += 1
                name = f"{call['name']}_{self.made}"
                kept: Obj = {"functionCall": {"name": call["name"], "args": call["args"], "id": name}}
                if not self.calls:
                    kept["thoughtSignature"] = "skip_thought_signature_validator"
                parts.append(kept)
                self.calls.append((name, call["name"]))
            elif part.get("text"):
                if parts and "text" in parts[-1]:
                    parts[-1]["text"] += part["text"]
                else:
                    parts.append({"text": part["text"]})
        self.contents.append({"role": "model", "parts": parts or [{"text": ""}]})

    def say(self, text: str) -> None:
        self.contents.append({"role": "user", "parts": [{"text": text}]})

    def results(self) -> None:
        parts = [
            {"functionResponse": {"id": i, "name": n, "response": {"output": f"result of {i}"}}} for i, n in self.calls
        ]
        self.contents.append({"role": "user", "parts": parts})


CLIENTS: dict[str, type[Harness]] = {"chat": Chat, "anthropic": Anthropic, "responses": Responses, "google": Google}
