"""Settings of analytics (`POLAR_…`)."""

from __future__ import annotations

from pathlib import Path

from polar_common.settings import HouseSettings

__all__ = ["AnalyticsSettings"]


class AnalyticsSettings(HouseSettings):
    analytics_chdb: Path | None = None
    """Directory of the embedded engine; by default `<data>/chdb`. Only this process may open it."""
    analytics_clickhouse: str = ""
    """DSN of a server instead, e.g. clickhouse://user:password@host:8123/polar."""
    analytics_model_dir: Path | None = None
    """Directory of the model's tokenizer, to show traces as text; without it, as ids."""
    analytics_batch: int = 2000
    """Messages per insert at most."""
    analytics_linger_s: float = 0.5
    """Longest wait before a smaller batch is inserted."""
    analytics_max_rows: int = 10_000
    """Rows a query may return."""
    analytics_query_s: int = 30
    """Seconds a query may take."""
