"""Google generateContent: `/v1beta/models/M:generateContent` and its siblings, under `/v1` too.

The method stands behind the last colon, since model names may hold colons. A stream is SSE only with `alt=sse`; without
it, it is one JSON array written bit by bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import orjson

from polar_common.errors import PolarError, RequestError
from polar_proxy.dialects.base import ChatRequest, Encoder, Minted, Reply, Route
from polar_proxy.dialects.faults import fault
from polar_proxy.dialects.google import request, response

__all__ = ["Google"]

_CALL = re.compile(r"(?:/v1(?:alpha|beta)?)?/(?:publishers/google/)?(?:models|tunedModels)/(?P<model>.+):(?P<verb>\w+)")
_LISTING = re.compile(r"/v1(?:alpha|beta)?/models(?:/(?P<model>.+))?")


class Google:
    """The dialect of Gemini CLI and of pi's Google provider."""

    name = "google"

    def route(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route | None:
        if method == "POST" and (call := _CALL.fullmatch(path)) is not None:
            return self._call(call["model"], call["verb"], query)
        if method == "GET" and (not path.startswith("/v1/") or "x-goog-api-key" in headers or "key" in query):
            return self._listing(path)
        return None

    def _listing(self, path: str) -> Route | None:
        listing = _LISTING.fullmatch(path)
        if listing is None:
            return None
        model = listing["model"] or ""
        return Route(self.name, "get_model" if model else "list_models", model=model)

    def _call(self, model: str, verb: str, query: Mapping[str, str]) -> Route | None:
        if verb == "generateContent":
            return Route(self.name, "generate", model=model)
        if verb == "streamGenerateContent":
            return Route(self.name, "generate", model=model, stream=True, sse=query.get("alt") == "sse")
        if verb == "countTokens":
            return Route(self.name, "count_tokens", model=model)
        return None

    def parse(self, route: Route, headers: Mapping[str, str], body: bytes) -> ChatRequest:
        return request.parse(route, headers, body)

    def encode(self, replies: Sequence[Reply], request: ChatRequest) -> bytes:
        return response.encode(replies, request)

    def encoder(self, request: ChatRequest, minted: Sequence[Minted]) -> Encoder:
        return response.GoogleEncoder(request, minted, sse=request.sse)

    def count(self, tokens: int) -> bytes:
        return orjson.dumps({"totalTokens": tokens})

    def models(self, ids: Sequence[str], context_window: int, route: Route) -> bytes:
        found = response.models(ids, context_window, route.model)
        if found is None:
            raise RequestError(f"models/{route.model} isn't served here", status=404)
        return found

    def error(self, error: PolarError) -> tuple[int, dict[str, str], bytes]:
        what = fault(error)
        return what.status, what.headers(), response.error_body(what)
