"""Typed access to decoded request bodies: a wrong type becomes a RequestError that names its JSON path, never a 500.

Every reader treats a missing key and `null` alike, as all four providers do. Paths are built only where they are needed
for an error or name a container, so that reading a field costs a dictionary look-up and a type test.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator

import orjson

from polar_common.errors import RequestError
from polar_render.loose import loads
from polar_render.messages import Json

__all__ = [
    "MAX_DEPTH", "Json", "Obj", "Seen", "bad", "compact", "fingerprint", "flag", "integer", "integer_or_none", "items",
    "keys", "load", "number", "objects", "strings", "table", "text", "text_or_none",
]  # fmt: skip

Obj = dict[str, Json]

# Templates, logs and clients nest what they get into more levels; orjson itself writes at most 254.
MAX_DEPTH = 100
_SPARE = 254 - MAX_DEPTH


def bad(path: str, message: str, status: int = 400) -> RequestError:
    """The refusal of a request: `message` says what is wrong with the field `path`."""
    return RequestError(message, status=status, path=path)


@functools.cache
def keys(names: str) -> frozenset[str]:
    """A set of field names, written as one string."""
    return frozenset(names.split())


def load(body: bytes) -> Obj:
    """The request body as an object. Raises RequestError on anything else, and on nesting beyond MAX_DEPTH."""
    try:
        value = loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {_kind(value)}")
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH:
        _check_depth(value)
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _check_depth(value: Obj) -> None:
    wrapped: Json = value
    for _ in range(_SPARE):
        wrapped = [wrapped]
    try:
        orjson.dumps(wrapped)
    except TypeError as error:
        raise RequestError(f"nested deeper than {MAX_DEPTH} levels", path=_deep_path(value)) from error


def _deep_path(value: Json) -> str:
    level: list[tuple[str, Json]] = [("", value)]
    for _ in range(MAX_DEPTH):
        level = [child for path, node in level for child in _children(path, node)] or level
    path = level[0][0]
    return path if len(path) <= 200 else path[:200] + "…"


def _children(path: str, node: Json) -> Iterator[tuple[str, Json]]:
    if isinstance(node, dict):
        for key, value in node.items():
            if isinstance(value, dict | list):
                yield (f"{path}.{key}" if path else key), value
    elif isinstance(node, list):
        for index, item in enumerate(node):
            if isinstance(item, dict | list):
                yield f"{path}[{index}]", item


def _at(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _wrong(path: str, key: str, wanted: str, value: object) -> RequestError:
    return bad(_at(path, key), f"must be {wanted}, not {_kind(value)}")


def text(obj: Obj, key: str, path: str = "") -> str:
    """A string that must be there."""
    value = obj.get(key)
    if type(value) is str:
        return value
    if value is None:
        raise bad(_at(path, key), "is required and must be a string")
    raise _wrong(path, key, "a string", value)


def text_or_none(obj: Obj, key: str, path: str = "") -> str | None:
    """A string, or None where it is missing."""
    value = obj.get(key)
    if value is None or type(value) is str:
        return value
    raise _wrong(path, key, "a string", value)


def flag(obj: Obj, key: str, path: str = "") -> bool | None:
    """A boolean, or None where it is missing."""
    value = obj.get(key)
    if value is None or value is True or value is False:
        return value
    raise _wrong(path, key, "a boolean", value)


def number(obj: Obj, key: str, path: str = "", low: float = -1e9, high: float = 1e9) -> float | None:
    """A number between `low` and `high`, or None where it is missing."""
    value = obj.get(key)
    if value is None:
        return None
    if type(value) is not int and type(value) is not float:
        raise _wrong(path, key, "a number", value)
    if not low <= value <= high:
        raise bad(_at(path, key), f"must be between {low:g} and {high:g}")
    return float(value)


def integer_or_none(obj: Obj, key: str, path: str = "", low: int = 0, high: int = 2**63 - 1) -> int | None:
    """A whole number (`40.0` counts) between `low` and `high`, or None where it is missing."""
    value = obj.get(key)
    if value is None:
        return None
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise _wrong(path, key, "an integer", value)
    if not low <= value <= high:
        raise bad(_at(path, key), f"must be between {low} and {high}")
    return value


def integer(obj: Obj, key: str, path: str = "", low: int = 0, high: int = 2**63 - 1) -> int:
    """A whole number that must be there."""
    value = integer_or_none(obj, key, path, low, high)
    if value is None:
        raise bad(_at(path, key), "is required and must be an integer")
    return value


def items(obj: Obj, key: str, path: str = "") -> list[Json]:
    """An array; empty where it is missing."""
    value = obj.get(key)
    if value is None:
        return []
    if type(value) is not list:
        raise _wrong(path, key, "an array", value)
    return value


def objects(obj: Obj, key: str, path: str = "") -> list[Obj]:
    """An array of objects; empty where it is missing."""
    values = items(obj, key, path)
    for index, value in enumerate(values):
        if type(value) is not dict:
            raise bad(f"{_at(path, key)}[{index}]", f"must be an object, not {_kind(value)}")
    return values  # type: ignore[return-value]


def strings(obj: Obj, key: str, path: str = "", limit: int = 64) -> tuple[str, ...]:
    """An array of at most `limit` strings, or a single string."""
    value = obj.get(key)
    if type(value) is str:
        return (value,)
    values = items(obj, key, path)
    if len(values) > limit:
        raise bad(_at(path, key), f"holds more than {limit} strings")
    for index, one in enumerate(values):
        if type(one) is not str:
            raise bad(f"{_at(path, key)}[{index}]", f"must be a string, not {_kind(one)}")
    return tuple(values)  # type: ignore[arg-type]


def table(obj: Obj, key: str, path: str = "") -> Obj | None:
    """An object, or None where it is missing."""
    value = obj.get(key)
    if value is None or type(value) is dict:
        return value
    raise _wrong(path, key, "an object", value)


def compact(value: Json) -> str:
    """Compact JSON, keys in the order in which they came."""
    return orjson.dumps(value).decode()


def fingerprint(*parts: object) -> str:
    """Hex hash of JSON-able values and message dataclasses; equal values, equal hash."""
    return hashlib.blake2b(orjson.dumps(parts), digest_size=16).hexdigest()


class Seen:
    """Collects what a request holds and the engine doesn't get, as JSON paths with `[*]` for any index."""

    __slots__ = ("_paths",)

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}

    def add(self, path: str) -> None:
        self._paths[path] = None

    def extra(self, obj: Obj, known: frozenset[str], path: str = "") -> None:
        """Notes the keys of `obj` that aren't in `known` and hold something."""
        if not obj.keys() <= known:
            for key in obj.keys() - known:
                if obj[key] not in (None, [], {}, ""):
                    self._paths[_at(path, key)] = None

    def paths(self) -> tuple[str, ...]:
        return tuple(sorted(self._paths))
