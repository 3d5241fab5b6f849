"""OpenAI Responses: `/v1/responses` and its token count.

A WebSocket upgrade is told apart, so that it can be refused with 426 (clients then fall back to HTTP at once). There is
no `/v1/responses/compact`: harnesses that compact do it with an ordinary call, which is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from polar_common.errors import PolarError
from polar_proxy.dialects.base import ChatRequest, Encoder, Minted, Reply, Route
from polar_proxy.dialects.faults import fault
from polar_proxy.dialects.openai_chat import OpenAIChat
from polar_proxy.dialects.openai_chat.response import error_body
from polar_proxy.dialects.openai_responses import request, response, stream

__all__ = ["OpenAIResponses"]


class OpenAIResponses:
    """The dialect of Codex and of pi's Responses provider."""

    name = "openai_responses"

    def route(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route | None:
        rest = path.removeprefix("/v1")
        if rest == "/responses":
            if method == "POST":
                return Route(self.name, "generate")
            if method == "GET":
                return Route(self.name, "upgrade")
        if rest == "/responses/input_tokens" and method == "POST":
            return Route(self.name, "count_tokens")
        return None

    def parse(self, route: Route, headers: Mapping[str, str], body: bytes) -> ChatRequest:
        return request.parse(headers, body)

    def encode(self, replies: Sequence[Reply], request: ChatRequest) -> bytes:
        return response.encode(replies, request)

    def encoder(self, request: ChatRequest, minted: Sequence[Minted]) -> Encoder:
        return stream.ResponsesEncoder(request, minted)

    def count(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})

    def models(self, ids: Sequence[str], context_window: int, route: Route) -> bytes:
        return OpenAIChat().models(ids, context_window, route)

    def error(self, error: PolarError) -> tuple[int, dict[str, str], bytes]:
        what = fault(error)
        return what.status, what.headers(), error_body(what)
