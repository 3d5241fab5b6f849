"""Headers of answers. The request id is the completion's: clients show it, and take it for a sign of a real provider.

Under two names, since OpenAI's and Anthropic's clients read different ones.
"""

from __future__ import annotations

from polar_proxy.dialects.base import ChatRequest

__all__ = ["stream_headers", "whole_headers"]


def whole_headers(completion: str) -> dict[str, str]:
    """Of an answer in one piece."""
    return {"content-type": "application/json", "x-request-id": completion, "request-id": completion}


def stream_headers(request: ChatRequest, completion: str) -> dict[str, str]:
    """Of a streamed answer: events, or (Google without `alt=sse`) one JSON array."""
    kind = "text/event-stream; charset=utf-8" if request.sse else "application/json"
    return {**whole_headers(completion), "content-type": kind, "cache-control": "no-cache"}
