"""Settings of the reconstructor, beside the house's. Environment: `POLAR_RECONSTRUCTOR_RULES`."""

from __future__ import annotations

from polar_common.settings import HouseSettings

__all__ = ["ReconstructorSettings"]


class ReconstructorSettings(HouseSettings):
    """`build` (of the house) names the build that is made as sessions end."""

    reconstructor_rules: str = "exact"
    """A built-in rule set or a YAML file. Exact merges lose nothing and change no token, so it is the default."""
