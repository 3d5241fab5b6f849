"""Reading and writing JSON over HTTP, for all routes of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from polar_common.errors import RequestError
from polar_engine.requests import parse_body

__all__ = ["json_reply", "read_object"]

# A prompt of a million tokens is 8 MB of JSON.
_LARGEST_BODY = 32 << 20


def json_reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(body), status, dict(headers or {}), "application/json")


async def read_object(request: Request, *, optional: bool = False) -> dict[str, Any]:
    """The request's JSON object; `optional` takes an empty body as an empty object. Raises RequestError 400 or 413."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > _LARGEST_BODY:
            raise RequestError(f"the body is larger than {_LARGEST_BODY} bytes", status=413)
        parts.append(part)
    raw = b"".join(parts)
    return {} if optional and not raw.strip() else parse_body(raw)
