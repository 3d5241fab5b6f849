"""Reads one tool call written as XML-like parameters (Qwen3-Coder, Qwen3.5): `<function=f><parameter=a>…`.

Such a format carries no JSON: the arguments are put together as compact JSON, each value as its schema says, a string
verbatim. The record keeps the sampled ids either way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from .messages import Json, ToolSpec

__all__ = ["XmlScanner"]

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_BODY = re.compile(r"(?:\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>)", re.DOTALL)
_END = re.compile(r"\s*</function>\s*\Z")


class XmlScanner:
    """Same questions as `CallScanner`: the name comes early, the arguments at the end."""

    def __init__(self, tools: Mapping[str, ToolSpec]) -> None:
        self.raw = ""
        self.name: str | None = None
        self.arguments = ""
        self.broken = False
        self._tools = tools
        self._body = 0

    def feed(self, text: str) -> None:
        self.raw += text
        if self.name is None and (match := _FUNCTION.match(self.raw)):
            self.name = match[1].strip() or None
            self._body = match.end()

    def finish(self) -> None:
        """Puts the arguments together. A body that isn't made of parameters is broken, its raw text the arguments."""
        if self.name is None:
            self.broken = True
            return
        values: dict[str, Json] = {}
        at = self._body
        while match := _BODY.match(self.raw, at):
            key = match[1].strip()
            values[key] = self._value(key, match[2])
            at = match.end()
        if _END.match(self.raw, at):
            self.arguments = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
        else:
            self.broken = True
            self.arguments = self.raw[self._body :].strip()

    def _value(self, key: str, text: str) -> Json:
        tool = self._tools.get(self.name or "")
        if tool is None or tool.custom:
            return text
        properties = (tool.parameters or {}).get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        kind = schema.get("type") if isinstance(schema, dict) else "string"
        if kind == "string":
            return text
        try:
            value: Json = json.loads(text)
        except ValueError:
            return text
        return value
