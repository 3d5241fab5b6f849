"""Messages as every part of Polar sees them: between provider dialects, templates and the log.

A message is a role and an ordered tuple of parts; nothing a provider can say is merged, reordered or dropped on the
way in. Dialects (`polar_proxy.dialects`) make these values from wire bodies and back, renderers turn them into token
ids, and the log stores their JSON form (`to_json`, `from_json`), which is canonical: equal values, equal bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import orjson

__all__ = [
    "Image", "Json", "Message", "Part", "Role", "Text", "Thinking", "ToolCall", "ToolSpec",
    "dump", "from_json", "text_of", "to_json", "tool_from_json", "tool_to_json",
]  # fmt: skip

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Text:
    """Visible text."""

    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """A picture. Exactly one of `data` (base64), `url` or `blob` (sha256 of the stored body) is set."""

    mime: str = ""
    data: str = ""
    url: str = ""
    blob: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning of an assistant turn.

    `signature` is what the provider's protocol uses to recognise it later (Anthropic's signature, Responses'
    `encrypted_content`, Google's `thoughtSignature`); `redacted` marks a block whose text the client never saw.
    """

    text: str
    signature: str = ""
    redacted: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the assistant.

    `arguments` is the raw string, byte for byte as sampled or as the client sent it (for providers that send parsed
    objects: their compact JSON). `custom` marks freeform tools, whose `arguments` is the raw input, not JSON.
    """

    id: str
    name: str
    arguments: str
    namespace: str = ""
    custom: bool = False


Part = Text | Image | Thinking | ToolCall


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `call_id` and `is_error` belong to role `tool`; `name` to tools and named participants.

    `item_id` is the id under which the provider's protocol knows the turn or item, where it has one.
    """

    role: Role
    parts: tuple[Part, ...]
    call_id: str = ""
    name: str = ""
    is_error: bool = False
    item_id: str = ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(p for p in self.parts if isinstance(p, ToolCall))

    @property
    def thinking(self) -> tuple[Thinking, ...]:
        return tuple(p for p in self.parts if isinstance(p, Thinking))


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool offered to the model. `parameters` is a JSON schema; `grammar` belongs to custom (freeform) tools."""

    name: str
    description: str = ""
    parameters: dict[str, Json] | None = None
    namespace: str = ""
    custom: bool = False
    grammar: dict[str, Json] | None = None


def text_of(message: Message) -> str:
    """All visible text of the message, concatenated."""
    return "".join(p.text for p in message.parts if isinstance(p, Text))


def _part_json(part: Part) -> dict[str, Json]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Image):
        fields = {k: getattr(part, k) for k in ("mime", "data", "url", "blob", "detail")}
        return {"type": "image", **{k: v for k, v in fields.items() if v}}
    if isinstance(part, Thinking):
        out: dict[str, Json] = {"type": "thinking", "text": part.text}
        if part.signature:
            out["signature"] = part.signature
        if part.redacted:
            out["redacted"] = True
        return out
    out = {"type": "tool_call", "id": part.id, "name": part.name, "arguments": part.arguments}
    if part.namespace:
        out["namespace"] = part.namespace
    if part.custom:
        out["custom"] = True
    return out


def to_json(message: Message) -> dict[str, Json]:
    """The stored form: empty fields are left out."""
    out: dict[str, Json] = {"role": message.role, "parts": [_part_json(p) for p in message.parts]}
    for key in ("call_id", "name", "item_id"):
        if value := cast(str, getattr(message, key)):
            out[key] = value
    if message.is_error:
        out["is_error"] = True
    return out


def _part_from(value: dict[str, Json]) -> Part:
    fields = {k: v for k, v in value.items() if k != "type"}
    match value.get("type"):
        case "text":
            return Text(**fields)  # type: ignore[arg-type]
        case "image":
            return Image(**fields)  # type: ignore[arg-type]
        case "thinking":
            return Thinking(**fields)  # type: ignore[arg-type]
        case "tool_call":
            return ToolCall(**fields)  # type: ignore[arg-type]
    raise ValueError(f"unknown part type {value.get('type')!r}")


def from_json(value: dict[str, Json]) -> Message:
    """Inverse of `to_json`. Raises ValueError or TypeError on anything else."""
    parts = value.get("parts")
    if not isinstance(parts, list):
        raise ValueError("a message needs a list of parts")
    rest = {k: v for k, v in value.items() if k != "parts"}
    return Message(parts=tuple(_part_from(p) for p in parts if isinstance(p, dict)), **rest)  # type: ignore[arg-type]


def tool_to_json(tool: ToolSpec) -> dict[str, Json]:
    """The stored form of a tool: empty fields are left out."""
    out: dict[str, Json] = {"name": tool.name}
    for key in ("description", "parameters", "namespace", "custom", "grammar"):
        if value := getattr(tool, key):
            out[key] = value
    return out


def tool_from_json(value: dict[str, Json]) -> ToolSpec:
    """Inverse of `tool_to_json`."""
    return ToolSpec(**value)  # type: ignore[arg-type]


def dump(value: Json) -> bytes:
    """Canonical JSON bytes: sorted keys, no blanks. What content hashes are taken over."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
