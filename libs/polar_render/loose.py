"""JSON as programs in JavaScript write it: a text that they cut amid an emoji has half a surrogate pair, escaped.

Such a half is no Unicode text, and no tokenizer can encode it; as in a browser's encoder it becomes U+FFFD.
"""

from __future__ import annotations

import json
import re

import orjson

from .messages import Json

__all__ = ["exactly", "loads"]

_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(rb"\\\\|" + _HIGH + _LOW + rb"|(" + _HIGH + rb"|" + _LOW + rb")")
"""An escaped backslash, a pair, or (as a group) a half."""


def _mended(raw: bytes) -> bytes:
    return _ESCAPES.sub(lambda m: rb"\ufffd" if m[1] else m[0], raw)


def loads(text: str | bytes) -> Json:
    """Raises orjson.JSONDecodeError for what isn't JSON."""
    try:
        value: Json = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if "surrogate" not in str(error):
            raise
        value = orjson.loads(_mended(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text))
    return value


def exactly(text: str) -> Json:
    """With integers of any size. Raises ValueError for what isn't JSON, and for what is nested too deeply."""
    if "\\u" in text:
        text = _mended(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")
    try:
        value: Json = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value
