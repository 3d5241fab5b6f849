"""Reads one tool call written as XML-like parameters (Qwen3-Coder, Qwen3.5): `<function=f><parameter=a>…`.

Such a format carries no JSON: the arguments are put together as compact JSON, each value as its schema says, a string
verbatim. The record keeps the sampled ids either way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from .loose import exactly
from .messages import Json, ToolSpec

__all__ = ["XmlScanner"]

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_BODY = re.compile(r"(?:\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>)", re.DOTALL)
_END = re.compile(r"\s*</function>\s*\Z")


class XmlScanner:
    """Same questions as `CallScanner`: the name comes early, the arguments at the end."""

    def __init__(self, tools: Mapping[str, ToolSpec]) -> None:
        self.name: str | None = None
        self.arguments = ""
        self.broken = False
        self._raw: list[str] = []
        self._tools = tools
        self._body = 0
        self._fresh = ""

    @property
    def raw(self) -> str:
        """The whole text between the tags."""
        return "".join(self._raw)

    def take(self) -> str:
        """All arguments, once they are known: after `finish`, and only once."""
        fresh, self._fresh = self._fresh, ""
        return fresh

    def feed(self, text: str) -> None:
        self._raw.append(text)
        if self.name is None and (match := _FUNCTION.match(self.raw)):
            self.name = match[1].strip() or None
            self._body = match.end()

    def finish(self) -> None:
        """Puts the arguments together. A body that isn't made of parameters is broken, its raw text the arguments."""
        if self.name is None:
            self.broken = True
            return
        raw, at = self.raw, self._body
        values: dict[str, Json] = {}
        while match := _BODY.match(raw, at):
            key = match[1].strip()
            values[key] = self._value(key, match[2])
            at = match.end()
        self.broken = _END.match(raw, at) is None
        whole = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
        self._fresh = self.arguments = raw[self._body :].strip() if self.broken else whole

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
            return exactly(text)
        except ValueError:
            return text
