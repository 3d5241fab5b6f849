"""Settings of the reconstructor, beside the house's. Environment: `POLAR_RECONSTRUCTOR_RULES`."""

from __future__ import annotations

from pydantic import Field

from polar_common.settings import HouseSettings

__all__ = ["ReconstructorSettings"]


class ReconstructorSettings(HouseSettings):
    """`build` (of the house) names the build that is made as sessions end."""

    reconstructor_rules: str = "exact"
    """A built-in rule set or a YAML file. Exact merges lose nothing and change no token, so it is the default."""
    reconstructor_build_bytes: int = Field(default=0, ge=0)
    """Bytes of traces that a replay's build may have; 0: as many as their stream holds."""
