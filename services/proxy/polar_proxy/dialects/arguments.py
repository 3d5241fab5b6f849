"""Tool arguments between the sampled string and the forms that protocols want.

The record always keeps the sampled string. Protocols that carry an object (Anthropic, Google) get the parsed object;
a string that isn't a JSON object travels as `{"_raw": "<the string>"}` and comes back as the string, so that nothing is
lost either way. An empty string is an empty object in both directions.
"""

from __future__ import annotations

import orjson

from polar_render.loose import loads
from polar_render.messages import Json

from .fields import Obj, compact

__all__ = ["RAW_KEY", "as_object", "from_object", "object_text"]

RAW_KEY = "_raw"


def _parsed(arguments: str) -> Json:
    try:
        return loads(arguments)
    except orjson.JSONDecodeError:
        return None


def as_object(arguments: str) -> Obj:
    """The object to send for sampled arguments."""
    if not arguments.strip():
        return {}
    value = _parsed(arguments)
    return value if isinstance(value, dict) else {RAW_KEY: arguments}


def object_text(arguments: str) -> str:
    """`as_object` as JSON text: the sampled string itself where it is an object; "" for no arguments."""
    if not arguments.strip():
        return ""
    return arguments if isinstance(_parsed(arguments), dict) else compact({RAW_KEY: arguments})


def from_object(value: Obj) -> str:
    """The string to record for an object that a client sent: what `as_object` was given, up to JSON white space."""
    if len(value) == 1 and isinstance(raw := value.get(RAW_KEY), str) and not isinstance(_parsed(raw), dict):
        return raw
    return compact(value)
