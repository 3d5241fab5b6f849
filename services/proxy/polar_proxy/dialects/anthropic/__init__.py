"""Anthropic Messages: `/v1/messages`, its token count, model listing and reachability probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from polar_common.errors import PolarError, RequestError
from polar_proxy.dialects.anthropic import request, response
from polar_proxy.dialects.base import ChatRequest, Encoder, Minted, Reply, Route
from polar_proxy.dialects.faults import fault

__all__ = ["Anthropic"]


class Anthropic:
    """The dialect of Claude Code and of pi's Anthropic provider."""

    name = "anthropic"

    def route(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route | None:
        rest = path.removeprefix("/v1")
        if method == "POST" and rest == "/messages":
            return Route(self.name, "generate")
        if method == "POST" and rest == "/messages/count_tokens":
            return Route(self.name, "count_tokens")
        if path == "/api/hello" and method in ("HEAD", "GET"):
            return Route(self.name, "hello")
        if method == "GET" and "anthropic-version" in headers:
            if rest == "/models":
                return Route(self.name, "list_models")
            if rest.startswith("/models/") and len(rest) > 8:
                return Route(self.name, "get_model", model=rest[8:])
        return None

    def parse(self, route: Route, headers: Mapping[str, str], body: bytes) -> ChatRequest:
        return request.parse(headers, body, counting=route.kind == "count_tokens")

    def encode(self, replies: Sequence[Reply], request: ChatRequest) -> bytes:
        return response.encode(replies, request)

    def encoder(self, request: ChatRequest, minted: Sequence[Minted]) -> Encoder:
        return response.AnthropicEncoder(request, minted)

    def count(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})

    def models(self, ids: Sequence[str], context_window: int, route: Route) -> bytes:
        found = response.models(ids, context_window, route.model)
        if found is None:
            raise RequestError(f"model: {route.model}", status=404)
        return found

    def error(self, error: PolarError) -> tuple[int, dict[str, str], bytes]:
        what = fault(error)
        return what.status, what.headers(), response.error_body(what)
