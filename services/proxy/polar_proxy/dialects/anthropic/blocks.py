"""Anthropic content blocks: wire objects to message parts."""

from __future__ import annotations

from polar_proxy.dialects import fields as f
from polar_proxy.dialects.arguments import from_object
from polar_proxy.dialects.pictures import inline, located
from polar_render.messages import Image, Message, Part, Role, Text, Thinking, ToolCall

__all__ = ["Blocks"]

_KNOWN = {
    "text": f.keys("type text"),
    "image": f.keys("type source"),
    "document": f.keys("type source title context"),
    "search_result": f.keys("type source title content"),
    "tool_reference": f.keys("type tool_name"),
    "thinking": f.keys("type thinking signature"),
    "redacted_thinking": f.keys("type data"),
    "tool_use": f.keys("type id name input"),
    "tool_result": f.keys("type tool_use_id content is_error"),
}
_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}


class Blocks:
    """Reads the blocks of one request. `references` are the tools that tool searches have loaded so far."""

    def __init__(self, seen: f.Seen) -> None:
        self._seen = seen
        self.references: set[str] = set()

    def messages(self, message: f.Obj, path: str) -> list[Message]:
        """The messages in one wire message: each tool result stands for itself, in its place."""
        told = f.text(message, "role", path)
        role = _ROLES.get(told)
        if role is None:
            raise f.bad(f"{path}.role", f"unknown role {told!r}")
        self._seen.extra(message, f.keys("role content"), "messages[*]")
        content = message.get("content")
        if type(content) is str:
            return [Message(role, (Text(content),))]
        if type(content) is not list:
            raise f.bad(f"{path}.content", "must be a string or an array of content blocks")
        blocks = f.objects(message, "content", path)
        if role == "assistant":
            parts = [self._assistant(block, f"{path}.content[{i}]") for i, block in enumerate(blocks)]
            return [Message(role, tuple(parts))]
        return self._user(role, blocks, path)

    def _user(self, role: Role, blocks: list[f.Obj], path: str) -> list[Message]:
        out: list[Message] = []
        parts: list[Part] = []
        for index, block in enumerate(blocks):
            where = f"{path}.content[{index}]"
            if block.get("type") == "tool_result":
                if parts:
                    out.append(Message(role, tuple(parts)))
                    parts = []
                out.append(self._tool_result(block, where))
            else:
                parts.append(self.visible(block, where))
        if parts or not out:
            out.append(Message(role, tuple(parts)))
        return out

    def visible(self, block: f.Obj, path: str, within: str = "messages[*].content[*]") -> Part:
        """A block that holds something to read or to look at."""
        kind = f.text(block, "type", path)
        known = _KNOWN.get(kind)
        if known is None:
            raise f.bad(f"{path}.type", f"unknown content block type {kind!r}")
        self._seen.extra(block, known, within)
        if kind == "text":
            return Text(f.text(block, "text", path))
        if kind == "image":
            return self._image(block, path)
        if kind == "document":
            return self._document(block, path)
        if kind == "search_result":
            return self._search_result(block, path)
        if kind == "tool_reference":
            self.references.add(f.text(block, "tool_name", path))
            return Text(f.compact({"type": "tool_reference", "tool_name": block["tool_name"]}))
        raise f.bad(f"{path}.type", f"a {kind!r} block can't stand here")

    def _assistant(self, block: f.Obj, path: str) -> Part:
        kind = f.text(block, "type", path)
        if kind not in ("thinking", "redacted_thinking", "tool_use"):
            return self.visible(block, path)
        self._seen.extra(block, _KNOWN[kind], "messages[*].content[*]")
        if kind == "thinking":
            return Thinking(f.text(block, "thinking", path), f.text_or_none(block, "signature", path) or "")
        if kind == "redacted_thinking":
            return Thinking("", f.text(block, "data", path), redacted=True)
        arguments = from_object(f.table(block, "input", path) or {})
        return ToolCall(f.text(block, "id", path), f.text(block, "name", path), arguments)

    def _tool_result(self, block: f.Obj, path: str) -> Message:
        self._seen.extra(block, _KNOWN["tool_result"], "messages[*].content[*]")
        call_id, failed = f.text(block, "tool_use_id", path), f.flag(block, "is_error", path)
        content = block.get("content")
        if type(content) is str:
            parts: tuple[Part, ...] = (Text(content),)
        else:
            within = "messages[*].content[*].content[*]"
            parts = tuple(
                self.visible(inner, f"{path}.content[{i}]", within)
                for i, inner in enumerate(f.objects(block, "content", path))
            )
        return Message("tool", parts, call_id=call_id, is_error=bool(failed))

    def _source(self, block: f.Obj, path: str) -> tuple[f.Obj, str, str]:
        source = f.table(block, "source", path)
        if source is None:
            raise f.bad(f"{path}.source", "is required")
        return source, f"{path}.source", f.text(source, "type", f"{path}.source")

    def _image(self, block: f.Obj, path: str) -> Image:
        source, where, kind = self._source(block, path)
        if kind == "base64":
            return inline(f.text(source, "media_type", where), f.text(source, "data", where), f"{where}.data")
        if kind == "url":
            return located(f.text(source, "url", where), f"{where}.url")
        raise f.bad(f"{where}.type", f"images come as base64 or url, not {kind!r}; there is no file store")

    def _document(self, block: f.Obj, path: str) -> Text:
        source, where, kind = self._source(block, path)
        heads = [f.text_or_none(block, key, path) for key in ("title", "context")]
        if kind == "text":
            body = f.text(source, "data", where)
        elif kind == "content":
            body = self._texts(source, "content", where)
        else:
            raise f.bad(f"{where}.type", f"only plain-text documents can be shown to this model, not {kind!r}")
        return Text("\n".join([head for head in heads if head] + [body]))

    def _search_result(self, block: f.Obj, path: str) -> Text:
        heads = [f.text_or_none(block, key, path) for key in ("title", "source")]
        return Text("\n".join([head for head in heads if head] + [self._texts(block, "content", path)]))

    def _texts(self, obj: f.Obj, key: str, path: str) -> str:
        content = obj.get(key)
        if type(content) is str:
            return content
        return "\n".join(f.text(one, "text", f"{path}.{key}[{i}]") for i, one in enumerate(f.objects(obj, key, path)))
