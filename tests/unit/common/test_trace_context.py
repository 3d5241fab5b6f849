"""Trace context goes with messages and into logs, and is absent where nobody traces."""

from __future__ import annotations

from opentelemetry import context, trace

from polar_common.context import log_trace, trace_of, with_trace

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_without_a_span_nothing_is_added() -> None:
    headers = {"a": "b"}
    assert with_trace(headers) is headers
    assert log_trace(None, "info", {"event": "x"}) == {"event": "x"}


def test_a_received_context_goes_on_to_what_is_sent_and_logged() -> None:
    token = context.attach(trace_of({"traceparent": TRACEPARENT}))
    try:
        assert with_trace({"a": "b"}) == {"a": "b", "traceparent": TRACEPARENT}
        logged = log_trace(None, "info", {})
        assert logged == {"trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331"}
    finally:
        context.detach(token)
    assert not trace.get_current_span().get_span_context().is_valid


def test_garbage_is_no_context() -> None:
    token = context.attach(trace_of({"traceparent": "nonsense"}))
    assert with_trace({}) == {}
    context.detach(token)
