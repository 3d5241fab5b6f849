"""Broken requests, made from whole ones by a seed: captured ones, and small ones that hold every kind of field.

Every text carries the mark of the session that sends it, so that what comes back shows whose it is.
"""

from __future__ import annotations

import json
import random
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import orjson

from captures_kit import captures
from polar_proxy.dialects import route

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m", "stream": False, "n": 1, "temperature": 1, "max_tokens": 9, "stop": ["x"],
        "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "r"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
    },
    "/v1/messages": {
        "model": "m", "max_tokens": 9, "stream": False, "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "h", "signature": "s"},
                                              {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "r", "is_error": True}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "stop_sequences": ["x"],
    },
    "/v1/responses": {
        "model": "m", "stream": False, "instructions": "s", "max_output_tokens": 9,
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}, {"type": "custom", "name": "p"}],
    },
    "/v1beta/models/g:generateContent": {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "q"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"a": 1}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"o": "r"}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"type": "object"}}]}],
        "generationConfig": {"maxOutputTokens": 9, "stopSequences": ["x"]},
    },
}  # fmt: skip

STRANGE: list[Any] = [
    None, True, 0, -1, 1.5, 1e308, 2**70, "", "x", "\ud800", "\0", [], [[]], {}, {"a": []}, "💥" * 50, ["x"] * 40,
]  # fmt: skip


@dataclass(frozen=True)
class Broken:
    """A request to be sent; `name` says which dialect must answer."""

    name: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


def whole(mark: str) -> list[Broken]:
    """All requests before they are broken."""
    found = []
    for capture in captures():
        if capture.method == "POST":
            headers = {k: v for k, v in capture.headers.items() if k != "content-type"}
            found.append((capture.path, capture.query, headers, capture.written()))
    found += [(path, "", {}, orjson.dumps(body)) for path, body in BODIES.items()]
    out = []
    for path, query, headers, body in found:
        name = route("POST", path, {}, headers)[0].name
        said = body.replace(b"[text ", b"[" + mark.encode() + b" ").replace(b'"q"', b'"' + mark.encode() + b'"')
        out.append(Broken(name, path, query, headers, said))
    return out


def broken(request: Broken, rng: random.Random) -> Broken:
    """The request with one to three places changed; now and then its bytes, path, query or headers too."""
    path, query, headers = request.path, request.query, dict(request.headers)
    if rng.random() < 0.03:
        at = rng.randrange(1, len(path))
        path = path[:at] + rng.choice(["", "/", "%00", "%2e%2e/", ":", "x"]) + path[at + rng.randint(0, 2) :]
    if rng.random() < 0.05:
        query = rng.choice(["", "alt=sse", "alt=json", "alt", "key=x", "&&=", "beta=true&alt=%ff"])
    if headers and rng.random() < 0.1:
        name = rng.choice(list(headers))
        headers[name] = rng.choice(["", "0", "-1", "99999999999999999999", "{", "[]", '{"a":1}', "x" * 3000])
    body = written(mutated(orjson.loads(request.body), rng), rng)
    return Broken(request.name, path, query, headers, body)


def mutated(body: Any, rng: random.Random) -> Any:
    """One or a few places changed: removed, doubled, exchanged for something strange."""
    copy = orjson.loads(orjson.dumps(body))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = copy
        while True:
            keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.7:
                place = place[key]
                continue
            what = rng.random()
            if what < 0.6:
                place[key] = deepcopy(rng.choice(STRANGE))
            elif what < 0.8:
                del place[key]
            elif isinstance(place, list):
                place.append(place[key])
            else:
                place[f"{key}x"] = place[key]
            break
    return copy


def written(body: Any, rng: random.Random) -> bytes:
    raw = json.dumps(body).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        at = rng.randrange(len(raw))
        raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + rng.randint(0, 3) :]
    return raw
