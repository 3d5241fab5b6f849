"""How deeply a JSON body is nested, before anything parses it: deep bodies cost recursion wherever they're walked."""

from __future__ import annotations

import re

__all__ = ["too_deep"]

_STRING = re.compile(rb'"[^"]*+"')
_DULL = bytes(c for c in range(256) if c not in b'"[]{}')


def too_deep(body: bytes, limit: int) -> bool:
    """Whether arrays and objects are nested deeper than `limit`. Cheap where the body has few brackets."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    # Without its escapes a string ends at the next quote; without the dull bytes little is left to look at.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _DULL)
    brackets = _STRING.sub(b"", plain).replace(b'"', b"")
    depth = 0
    for byte in brackets:
        # '[' and '{' have bit 2 clear in 0x5b/0x7b, ']' and '}' have it set.
        depth += -1 if byte & 4 else 1
        if depth > limit:
            return True
    return False
