"""Google contents: turns of parts to messages.

Both spellings of field names are taken (`functionCall`, `function_call`). Calls without an id are paired with their
results by name and order, under ids made from their place, so that a template sees which result belongs to which call.
"""

from __future__ import annotations

import base64
import binascii

from polar_proxy.dialects import fields as f
from polar_proxy.dialects.arguments import from_object
from polar_proxy.dialects.base import completion_of
from polar_proxy.dialects.pictures import inline, located
from polar_render.messages import Image, Message, Part, Role, Text, Thinking, ToolCall

__all__ = ["Contents", "camel"]

_CONTENT = f.keys("role parts")
_PART = f.keys("text thought thoughtSignature inlineData fileData functionCall functionResponse")
_ROLES: dict[str, Role] = {"user": "user", "model": "assistant", "function": "user", "system": "system"}
_UNSUPPORTED = ("executableCode", "codeExecutionResult", "videoMetadata", "toolCall", "toolResponse")


def camel(obj: f.Obj) -> f.Obj:
    """The object with snake_case keys spelt in camelCase; a key that is there in both spellings keeps the latter."""
    if not any("_" in key for key in obj):
        return obj
    out: f.Obj = {}
    for key, value in obj.items():
        head, *rest = key.split("_")
        out.setdefault(head + "".join(word[:1].upper() + word[1:] for word in rest), value)
    return out | {key: value for key, value in obj.items() if "_" not in key}


def _signature(value: str) -> str:
    """Our own signature, taken out of its base64; "" for anybody else's."""
    try:
        text = base64.b64decode(value, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return text if completion_of(text) else ""


def _join(parts: list[Part], new: list[Part]) -> None:
    """Appends; a signature that came with a later part belongs to the thought before it."""
    if new and isinstance(sign := new[0], Thinking) and sign.signature and not sign.text:
        for index, part in enumerate(parts):
            if isinstance(part, Thinking) and not part.signature:
                parts[index] = Thinking(part.text, sign.signature)
                new = new[1:]
                break
    parts += new


class Contents:
    """Reads the contents of one request."""

    def __init__(self, seen: f.Seen) -> None:
        self._seen = seen
        self._unanswered: list[tuple[str, str]] = []

    def system(self, body: f.Obj) -> list[Message]:
        given = body.get("systemInstruction")
        if given is None:
            return []
        if type(given) is str:
            return [Message("system", (Text(given),))]
        content = f.table(body, "systemInstruction") or {}
        path = "systemInstruction"
        parts: list[Part] = []
        for index, part in enumerate(f.objects(content, "parts", path)):
            parts.append(Text(f.text(part, "text", f"{path}.parts[{index}]")))
        return [Message("system", tuple(parts))] if parts else []

    def messages(self, content: f.Obj, path: str, index: int) -> list[Message]:
        """The messages in one content: each function response stands for itself, in its place."""
        self._seen.extra(content, _CONTENT, "contents[*]")
        told = f.text_or_none(content, "role", path) or "user"
        role = _ROLES.get(told)
        if role is None:
            raise f.bad(f"{path}.role", f"unknown role {told!r}")
        out: list[Message] = []
        parts: list[Part] = []
        for number, raw in enumerate(f.objects(content, "parts", path)):
            where, part = f"{path}.parts[{number}]", camel(raw)
            if role != "assistant" and part.get("functionResponse") is not None:
                if parts:
                    out.append(Message(role, tuple(parts)))
                    parts = []
                out.append(self._response(part, where))
            else:
                _join(parts, self._part(part, where, f"pos_{index}_{number}"))
        if parts or not out:
            out.append(Message(role, tuple(parts)))
        return out

    def _part(self, part: f.Obj, path: str, place: str) -> list[Part]:
        self._seen.extra(part, _PART, "contents[*].parts[*]")
        for key in _UNSUPPORTED:
            if part.get(key) is not None:
                raise f.bad(f"{path}.{key}", "can't be shown to this model")
        signature = self._signed(part, path)
        text = f.text_or_none(part, "text", path)
        if f.flag(part, "thought", path):
            return [Thinking(text or "", signature)]
        out: list[Part] = [Thinking("", signature)] if signature else []
        if text is not None:
            return [*out, Text(text)] if text or not signature else out
        for key in ("inlineData", "fileData"):
            if (media := f.table(part, key, path)) is not None:
                return [*out, self._image(camel(media), f"{path}.{key}")]
        if (call := f.table(part, "functionCall", path)) is not None:
            return [*out, self._call(call, f"{path}.functionCall", place)]
        if signature:
            return out
        raise f.bad(
            path, "holds nothing that this model takes: text, inlineData, fileData, functionCall or its response"
        )

    def _signed(self, part: f.Obj, path: str) -> str:
        value = f.text_or_none(part, "thoughtSignature", path)
        if not value:
            return ""
        signature = _signature(value)
        if not signature:
            self._seen.add("contents[*].parts[*].thoughtSignature")
        return signature

    def _image(self, media: f.Obj, path: str) -> Image:
        self._seen.extra(media, f.keys("mimeType data fileUri displayName"), "contents[*].parts[*].inlineData")
        mime = f.text_or_none(media, "mimeType", path) or ""
        if mime and not mime.startswith("image/"):
            raise f.bad(f"{path}.mimeType", f"this model takes images, not {mime!r}")
        if path.endswith("inlineData"):
            return inline(mime, f.text(media, "data", path), f"{path}.data")
        return located(f.text(media, "fileUri", path), f"{path}.fileUri", mime=mime)

    def _call(self, call: f.Obj, path: str, place: str) -> ToolCall:
        self._seen.extra(call, f.keys("id name args"), "contents[*].parts[*].functionCall")
        name = f.text(call, "name", path)
        identity = f.text_or_none(call, "id", path) or place
        self._unanswered.append((name, identity))
        return ToolCall(identity, name, from_object(f.table(call, "args", path) or {}))

    def _response(self, part: f.Obj, path: str) -> Message:
        where = f"{path}.functionResponse"
        response = camel(f.table(part, "functionResponse", path) or {})
        self._seen.extra(response, f.keys("id name response parts"), "contents[*].parts[*].functionResponse")
        name = f.text(response, "name", where)
        told = f.text_or_none(response, "id", where) or ""
        value = f.table(response, "response", where) or {}
        parts: list[Part] = []
        text, failed = _spoken(value)
        if text:
            parts.append(Text(text))
        for index, inner in enumerate(f.objects(response, "parts", where)):
            at = f"{where}.parts[{index}]"
            media = camel(inner)
            key = "inlineData" if media.get("inlineData") is not None else "fileData"
            parts.append(self._image(camel(f.table(media, key, at) or {}), f"{at}.{key}"))
        return Message("tool", tuple(parts), call_id=self._answered(name, told), name=name, is_error=failed)

    def _answered(self, name: str, told: str) -> str:
        """The id of the call that this response belongs to."""
        for index, (called, identity) in enumerate(self._unanswered):
            if identity == told or (not told and called == name):
                del self._unanswered[index]
                return identity
        return told


def _spoken(value: f.Obj) -> tuple[str, bool]:
    """The text of a response, and whether it reports a failure. `output`, `result` and `error` alone speak for all."""
    if len(value) == 1:
        for key in ("output", "result", "error"):
            if isinstance(said := value.get(key), str):
                return said, key == "error"
    return (f.compact(value) if value else ""), False
