"""What `/metrics` tells, in Prometheus's text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .capture import Captured

__all__ = ["METRICS", "Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters of one instance."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.completions = Counter(
            "polar_proxy_completions", "Captured completions", ["dialect", "chain", "untrainable"], registry=r
        )
        self.tokens = Counter("polar_proxy_tokens", "Tokens", ["kind"], registry=r)
        self._children: dict[tuple[str, ...], Counter] = {}
        self._prompt, self._sampled = self.tokens.labels("prompt"), self.tokens.labels("sampled")
        self.aborted = Counter("polar_proxy_aborted", "Calls that came to nothing", ["reason"], registry=r)
        self.undelivered = Counter("polar_proxy_undelivered", "Captured answers nobody received", registry=r)
        self.rejected = Counter("polar_proxy_rejected", "Refused calls", ["reason"], registry=r)
        self.replayed = Counter("polar_proxy_replayed", "Retries that got a recorded answer", registry=r)
        self.errors = Counter("polar_proxy_errors", "Errors by boundary", ["boundary"], registry=r)
        self.running = Gauge("polar_proxy_running", "Calls under way", registry=r)
        self.sessions = Gauge("polar_proxy_sessions", "Attempts in memory", registry=r)
        self.first_token = Histogram(
            "polar_proxy_first_token_seconds", "To the first token", buckets=_SECONDS, registry=r
        )
        self.duration = Histogram("polar_proxy_call_seconds", "Whole calls", buckets=_SECONDS, registry=r)

    def captured(self, item: Captured) -> None:
        """Count a completion."""
        self._child(item.plan.request.dialect, item.plan.chain, item.verdict.untrainable or "no").inc()
        usage = item.node.usage
        self._prompt.inc(usage.prompt_tokens)
        self._sampled.inc(usage.completion_tokens)
        self.duration.observe(item.facts.duration)

    def _child(self, *labels: str) -> Counter:
        """`labels` checks and locks; the few combinations there are needn't be looked up that way every time."""
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self.completions.labels(*labels)
        return child

    def text(self) -> bytes:
        return generate_latest(self.registry)


METRICS = Metrics()
"""Of this process."""
