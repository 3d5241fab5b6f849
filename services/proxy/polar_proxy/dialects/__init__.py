"""Provider dialects: four APIs that harnesses speak, each a pure translation between bytes and values.

`route` finds who is addressed. A request line that nobody serves is answered as a 404 in the shape that the caller most
likely understands.
"""

from __future__ import annotations

from collections.abc import Mapping

from .anthropic import Anthropic
from .base import Dialect, Route
from .google import Google
from .openai_chat import OpenAIChat
from .openai_responses import OpenAIResponses

__all__ = ["ALL", "BY_NAME", "route"]

# In the order in which they are asked: only the last takes a bare `/v1/models`.
ALL: tuple[Dialect, ...] = (Anthropic(), Google(), OpenAIResponses(), OpenAIChat())
BY_NAME: dict[str, Dialect] = {dialect.name: dialect for dialect in ALL}


def route(method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> tuple[Dialect, Route]:
    """The dialect and what is asked of it; `kind` is `unknown` where nobody serves it. Header names are lower case.

    `path` has no session prefix. Doubled and trailing slashes are forgiven.
    """
    while "//" in path:
        path = path.replace("//", "/")
    path = path.rstrip("/") or "/"
    for dialect in ALL:
        found = dialect.route(method, path, query, headers)
        if found is not None:
            return dialect, found
    likely = BY_NAME[_likely(path, headers)]
    return likely, Route(likely.name, "unknown")


def _likely(path: str, headers: Mapping[str, str]) -> str:
    if "anthropic-version" in headers or "x-api-key" in headers or "/messages" in path:
        return "anthropic"
    if "x-goog-api-key" in headers or path.startswith(("/v1beta", "/v1alpha", "/upload")) or "/models/" in path:
        return "google"
    return "openai_responses" if "/responses" in path else "openai_chat"
