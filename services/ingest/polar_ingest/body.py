"""Reading request bodies within a bound, and telling which field of a JSON text was open when the bound was reached."""

from __future__ import annotations

import re

from starlette.requests import ClientDisconnect, Request

from polar_common.errors import RequestError

__all__ = ["open_path", "read_body"]

_DRAIN = 8
"""So many times the bound are read and thrown away, so that the client gets its answer instead of a reset."""
_TOKENS = re.compile(rb'"((?:[^"\\]|\\.)*+)(?:"|\\?\Z)|([{}\[\],:])', re.DOTALL)


async def read_body(request: Request, limit: int) -> bytes:
    """The body. Raises RequestError 413, naming the field that was being read, as soon as it exceeds `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                parts.append(chunk)
            elif size > limit * _DRAIN:
                break
    except ClientDisconnect as error:
        raise RequestError("the connection was closed before the body's end", path="body") from error
    body = b"".join(parts)
    if size > limit:
        raise RequestError(f"the request has more than {limit} bytes", 413, open_path(body) or "body")
    return body


def open_path(prefix: bytes) -> str:
    """The path of the value at which a JSON text breaks off, e.g. `tasks[2].instruction`; "" for the whole text."""
    stack: list[str | int] = []
    expecting_key = False
    for match in _TOKENS.finditer(prefix):
        mark = match.group(2)
        if mark is None:
            if expecting_key and stack:
                stack[-1] = match.group(1)[:80].decode("utf-8", "replace")
        elif mark == b"{":
            stack.append("")
            expecting_key = True
        elif mark == b"[":
            stack.append(0)
            expecting_key = False
        elif mark in b"}]":
            if stack:
                stack.pop()
            expecting_key = False
        elif mark == b":":
            expecting_key = False
        elif stack:
            top = stack[-1]
            expecting_key = isinstance(top, str)
            if isinstance(top, int):
                stack[-1] = top + 1
    text = ""
    for part in stack:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text.rstrip(".")
