"""The client's side of each protocol, written from its documentation: collects a stream, and echoes an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

Json = dict[str, Any]
Events = list[tuple[str, Any]]


def collect_chat(events: Events) -> Json:
    """The message that a Chat stream adds up to, in the shape of an unstreamed choice."""
    message: Json = {"role": "assistant", "content": "", "refusal": None}
    calls: dict[int, Json] = {}
    finish = None
    for _, chunk in events:
        if chunk == "[DONE]" or not chunk["choices"]:
            continue
        choice = chunk["choices"][0]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for piece in delta.get("tool_calls", []):
            call = calls.setdefault(piece["index"], {})
            for key, value in piece.items():
                if isinstance(value, dict):
                    inner = call.setdefault(key, {})
                    for name, text in value.items():
                        inner[name] = inner.get(name, "") + text
                elif key != "index":
                    call[key] = value
        finish = choice["finish_reason"] or finish
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
        message["content"] = message["content"] or None
    return {"message": message, "finish_reason": finish}


def collect_anthropic(events: Events) -> Json:
    """The message that a Messages stream adds up to. Fails where a delta has no open block."""
    message: Json = {}
    open_block: int | None = None
    pieces: list[str] = []
    for name, data in events:
        assert name == data["type"]
        if name == "message_start":
            message = data["message"]
        elif name == "content_block_start":
            assert open_block is None and data["index"] == len(message["content"])
            open_block, pieces = data["index"], []
            message["content"].append(data["content_block"])
        elif name == "content_block_delta":
            assert data["index"] == open_block
            block, delta = message["content"][-1], data["delta"]
            if delta["type"] == "input_json_delta":
                pieces.append(delta["partial_json"])
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] = block.get(key, "") + delta[key]
        elif name == "content_block_stop":
            assert data["index"] == open_block
            open_block = None
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = orjson.loads("".join(pieces) or "{}")
        elif name == "message_delta":
            message |= data["delta"] | {"usage": data["usage"]}
    assert open_block is None and events[-1][0] == "message_stop"
    return message


def collect_responses(events: Events) -> Json:
    """The final response; on the way, items must be announced, filled and finished consistently."""
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    done: list[Json] = []
    texts: dict[str, str] = {}
    for name, data in events:
        assert name == data["type"]
        if name == "response.output_item.added":
            assert data["output_index"] == len(done)
        elif name.endswith(".delta"):
            assert data["output_index"] == len(done)
            texts[data["item_id"]] = texts.get(data["item_id"], "") + data["delta"]
        elif name == "response.output_item.done":
            item = data["item"]
            done.append(item)
            shown = item.get("arguments", item.get("input"))
            if shown is None:
                shown = "".join(part["text"] for part in item.get("content", item.get("summary", [])))
            assert texts.get(item["id"], "") == shown
    final: Json = events[-1][1]["response"]
    assert final["output"] == done
    return final


def collect_google(events: Events) -> Json:
    """The candidate that a stream adds up to; adjacent texts of one kind are joined."""
    parts: list[Json] = []
    last: Json = {}
    for _, chunk in events:
        last = chunk
        for part in chunk["candidates"][0]["content"]["parts"]:
            before = parts[-1] if parts else {}
            if part == {"text": ""}:
                continue
            alike = part.keys() == before.keys() and "thoughtSignature" not in part
            if "text" in part and alike and part.get("thought") == before.get("thought"):
                before["text"] += part["text"]
            else:
                parts.append(dict(part))
    for _, chunk in events[:-1]:
        assert "finishReason" not in chunk["candidates"][0]
    candidate = last["candidates"][0]
    content = {"role": "model", "parts": parts or [{"text": ""}]}
    return last | {"candidates": [candidate | {"content": content}]}


def echo_chat(answer: Json) -> Json:
    message = dict(answer["choices"][0]["message"])
    return {"model": "m", "messages": [{"role": "user", "content": "Go"}, message, {"role": "user", "content": "on"}]}


def echo_anthropic(answer: Json) -> Json:
    turn = {"role": "assistant", "content": answer["content"]}
    users = [{"role": "user", "content": "Go"}, turn, {"role": "user", "content": "on"}]
    return {"model": "m", "max_tokens": 9, "messages": users}


def echo_responses(answer: Json) -> Json:
    items = [{"role": "user", "content": "Go"}, *answer["output"], {"role": "user", "content": "on"}]
    return {"model": "m", "input": items}


def echo_google(answer: Json) -> Json:
    content = answer["candidates"][0]["content"]
    return {"contents": [{"parts": [{"text": "Go"}]}, content, {"role": "user", "parts": [{"text": "on"}]}]}


COLLECT: dict[str, Callable[[Events], Json]] = {
    "openai_chat": collect_chat,
    "anthropic": collect_anthropic,
    "openai_responses": collect_responses,
    "google": collect_google,
}
ECHO: dict[str, Callable[[Json], Json]] = {
    "openai_chat": echo_chat,
    "anthropic": echo_anthropic,
    "openai_responses": echo_responses,
    "google": echo_google,
}
