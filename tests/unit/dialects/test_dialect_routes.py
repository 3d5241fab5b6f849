"""Request lines: who is addressed, and what is asked."""

from __future__ import annotations

import pytest

from polar_proxy.dialects import ALL, BY_NAME, route
from polar_proxy.dialects.base import Route

A = {"anthropic-version": "2023-06-01"}
G = {"x-goog-api-key": "k"}


@pytest.mark.parametrize(
    ("line", "headers", "wanted"),
    [
        ("POST /v1/chat/completions", {}, Route("openai_chat", "generate")),
        ("POST /chat/completions", {}, Route("openai_chat", "generate")),
        ("POST /v1/chat/completions/", {}, Route("openai_chat", "generate")),
        ("POST //v1//chat/completions", {}, Route("openai_chat", "generate")),
        ("GET /v1/chat/completions", {}, Route("openai_chat", "unknown")),
        ("POST /v1/completions", {}, Route("openai_chat", "unknown")),
        ("POST /v1/embeddings", {}, Route("openai_chat", "unknown")),
        ("GET /v1/models", {}, Route("openai_chat", "list_models")),
        ("GET /models", {}, Route("openai_chat", "list_models")),
        ("GET /v1/models/org/name", {}, Route("openai_chat", "get_model", model="org/name")),
        ("GET /v1/models", A, Route("anthropic", "list_models")),
        ("GET /v1/models/m", A, Route("anthropic", "get_model", model="m")),
        ("GET /v1/models", G, Route("google", "list_models")),
        ("GET /v1beta/models", {}, Route("google", "list_models")),
        ("GET /v1beta/models/m", {}, Route("google", "get_model", model="m")),
        ("POST /v1/messages", {}, Route("anthropic", "generate")),
        ("POST /v1/messages/count_tokens", {}, Route("anthropic", "count_tokens")),
        ("POST /v1/messages/batches", {}, Route("anthropic", "unknown")),
        ("HEAD /api/hello", {}, Route("anthropic", "hello")),
        ("POST /v1/responses", {}, Route("openai_responses", "generate")),
        ("GET /v1/responses", {"upgrade": "websocket"}, Route("openai_responses", "upgrade")),
        ("POST /v1/responses/compact", {}, Route("openai_responses", "unknown")),
        ("GET /v1/responses/resp_1", {}, Route("openai_responses", "unknown")),
        ("POST /v1/responses/input_tokens", {}, Route("openai_responses", "count_tokens")),
        ("POST /v1beta/models/a:b:generateContent", {}, Route("google", "generate", model="a:b")),
        ("POST /v1/models/org/m:generateContent", {}, Route("google", "generate", model="org/m")),
        ("POST /v1beta/models/m:countTokens", {}, Route("google", "count_tokens", model="m")),
        ("POST /v1beta/models/m:embedContent", {}, Route("google", "unknown")),
        ("POST /v1beta/cachedContents", {}, Route("google", "unknown")),
        ("DELETE /v1/files/f", {"x-api-key": "k"}, Route("anthropic", "unknown")),
        ("GET /", {}, Route("openai_chat", "unknown")),
    ],
)
def test_lines(line: str, headers: dict[str, str], wanted: Route) -> None:
    method, path = line.split(" ")
    dialect, found = route(method, path, {}, headers)
    assert found == wanted
    assert dialect is BY_NAME[wanted.dialect]


@pytest.mark.parametrize(("query", "sse"), [({"alt": "sse"}, True), ({}, False), ({"alt": "json"}, False)])
def test_google_streams_are_events_only_with_alt_sse(query: dict[str, str], sse: bool) -> None:
    found = route("POST", "/v1beta/models/m:streamGenerateContent", query, {})[1]
    assert (found.stream, found.sse) == (True, sse)


def test_names_are_unique() -> None:
    assert [dialect.name for dialect in ALL] == ["anthropic", "google", "openai_responses", "openai_chat"]


def test_counting_is_never_generating() -> None:
    for path in ("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1beta/models/m:countTokens"):
        assert route("POST", path, {}, {})[1].kind == "count_tokens"
