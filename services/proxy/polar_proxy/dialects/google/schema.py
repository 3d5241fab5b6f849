"""Google's schema dialect to JSON schema: type names are upper case there."""

from __future__ import annotations

from polar_proxy.dialects.fields import Json

__all__ = ["json_schema"]

_TYPES = frozenset(("STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"))
_NAMED = ("properties", "$defs", "defs", "definitions")
_NESTED = ("items", "additionalProperties", "not")
_LISTED = ("anyOf", "any_of", "allOf", "oneOf", "prefixItems", "prefix_items")


def json_schema(schema: Json) -> Json:
    """The schema with lower-case type names; everything else as it came."""
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    kind = out.get("type")
    if isinstance(kind, str) and kind in _TYPES:
        out["type"] = kind.lower()
    for key in _NAMED:
        if isinstance(named := out.get(key), dict):
            out[key] = {name: json_schema(inner) for name, inner in named.items()}
    for key in _NESTED:
        if isinstance(inner := out.get(key), dict):
            out[key] = json_schema(inner)
    for key in _LISTED:
        if isinstance(several := out.get(key), list):
            out[key] = [json_schema(inner) for inner in several]
    return out
