"""What a gateway counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

__all__ = ["attempts", "bypasses", "occupancy", "reaped", "stage_s", "taken_over"]

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 1800, 3600)

occupancy = Gauge("polar_gateway_occupancy", "Attempts in a stage", ["stage"])
stage_s = Histogram("polar_gateway_stage_seconds", "Time spent in a stage", ["stage"], buckets=_SECONDS)
attempts = Counter("polar_gateway_attempts", "Attempts that ended here", ["fault", "cause"])
taken_over = Counter("polar_gateway_taken_over", "Attempts of lost owners that were settled here", ["how"])
reaped = Counter("polar_gateway_reaped", "Leftovers of dead attempts that were removed")
bypasses = Counter("polar_gateway_bypasses", "Attempts whose harness was connected to a model past the proxy")
