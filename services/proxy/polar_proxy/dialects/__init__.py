"""Provider dialects: four APIs that harnesses speak, each a pure translation between bytes and values.

`route` finds who is addressed. A request line that nobody serves is answered as a 404 in the shape that the caller most
likely understands.
"""

from __future__ import annotations

from collections.abc import Mapping

from .anthropic import Anthropic
from .base import Dialect, Route
from .openai_chat import OpenAIChat
from .openai_responses import OpenAIResponses

__all__ = ["ALL", "BY_NAME", "route"]

ALL: tuple[Dialect, ...] = (Anthropic(), OpenAIResponses(), OpenAIChat())
BY_NAME: dict[str, Dialect] = {dialect.name: dialect for dialect in ALL}


def route(method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> tuple[Dialect, Route]:
    """The dialect and what is asked of it; `kind` is `unknown` where nobody serves it. Header names are lower case.

    `path` has no session prefix.
    """
    for dialect in ALL:
        found = dialect.route(method, path, query, headers)
        if found is not None:
            return dialect, found
    likely = BY_NAME["openai_chat"]
    return likely, Route(likely.name, "unknown")
