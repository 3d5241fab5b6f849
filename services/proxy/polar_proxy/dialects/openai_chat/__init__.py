"""OpenAI Chat Completions: `/v1/chat/completions` and the model listing, with or without `/v1`.

Text completions (`/v1/completions`) are a 404: a bare prompt has no messages, so no conversation could be traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from polar_common.errors import PolarError, RequestError
from polar_proxy.dialects.base import ChatRequest, Encoder, Minted, Reply, Route
from polar_proxy.dialects.faults import fault

from . import request, response

__all__ = ["OpenAIChat"]


class OpenAIChat:
    """The dialect of most harnesses: pi, Qwen Code, opencode, aider, mini-swe-agent, lm-eval."""

    name = "openai_chat"

    def route(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route | None:
        rest = path.removeprefix("/v1")
        if method == "POST" and rest == "/chat/completions":
            return Route(self.name, "generate")
        if method == "GET" and rest == "/models":
            return Route(self.name, "list_models")
        if method == "GET" and rest.startswith("/models/") and len(rest) > 8:
            return Route(self.name, "get_model", model=rest[8:])
        return None

    def parse(self, route: Route, headers: Mapping[str, str], body: bytes) -> ChatRequest:
        return request.parse(headers, body)

    def encode(self, replies: Sequence[Reply], request: ChatRequest) -> bytes:
        return response.encode(replies, request)

    def encoder(self, request: ChatRequest, minted: Sequence[Minted]) -> Encoder:
        return response.ChatEncoder(request, minted)

    def count(self, tokens: int) -> bytes:
        return orjson.dumps({"total_tokens": tokens})

    def models(self, ids: Sequence[str], context_window: int, route: Route) -> bytes:
        found = response.models(ids, context_window, route.model)
        if found is None:
            raise RequestError(f"the model {route.model!r} isn't served here", status=404, path="model")
        return found

    def error(self, error: PolarError) -> tuple[int, dict[str, str], bytes]:
        what = fault(error)
        return what.status, what.headers(), response.error_body(what)
