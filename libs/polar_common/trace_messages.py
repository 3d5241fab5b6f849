"""Messages of the trace stream, read: traces, manifests and closings, with damage told from the future."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from .errors import FromTheFuture, Poison
from .traces import GroupTraces, Trace, TraceManifest

__all__ = ["read_message"]

_Kind = TypeVar("_Kind", GroupTraces, Trace, TraceManifest)


def read_message(kind: type[_Kind], body: bytes, subject: str = "") -> _Kind:
    """A body as `kind`. Raises Poison for what isn't one, FromTheFuture for a schema version that this code doesn't
    know: its fields may mean something else, even where they fit. Both name the subject, if it is given."""
    where = f"{subject}: " if subject else ""
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Poison(f"{where}not JSON: {error}") from error
    known = kind.model_fields["schema_version"].default
    version = value.get("schema_version") if isinstance(value, dict) else None
    if isinstance(version, int) and not isinstance(version, bool) and version > known:
        raise FromTheFuture(f"{where}{kind.__name__} version {version}; this code knows {known}")
    try:
        # From the text: JSON has no tuples, and strictness differs.
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise Poison(f"{where}{kind.__name__}: {error}") from error
