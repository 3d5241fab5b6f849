"""Trace context (W3C `traceparent`) in message headers and logs. Spans are made where an SDK is set up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

__all__ = ["log_trace", "trace_of", "with_trace"]

_W3C = TraceContextTextMapPropagator()


def with_trace(headers: dict[str, str]) -> dict[str, str]:
    """The headers of a message, with the present trace context where there is one."""
    if not trace.get_current_span().get_span_context().is_valid:
        return headers
    carried = dict(headers)
    _W3C.inject(carried)
    return carried


def trace_of(headers: Mapping[str, str] | None) -> Context:
    """The context under which a delivered message was sent, to go on with in its handler."""
    return _W3C.extract(dict(headers or {}))


def log_trace(_: Any, __: str, event: Any) -> Any:
    """A structlog processor: `trace_id` and `span_id` of the work at hand."""
    found = trace.get_current_span().get_span_context()
    if found.is_valid:
        event["trace_id"] = trace.format_trace_id(found.trace_id)
        event["span_id"] = trace.format_span_id(found.span_id)
    return event
