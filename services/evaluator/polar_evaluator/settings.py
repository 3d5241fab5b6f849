"""What an evaluator can be told. Environment: `POLAR_EVALUATOR_*` beside the house's own `POLAR_*`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from polar_common.settings import HouseSettings

__all__ = ["EvaluatorSettings"]


class EvaluatorSettings(HouseSettings):
    """Sizes of memory and disk in MiB, times in seconds."""

    evaluator_slots: Annotated[int, Field(ge=1)] = 4
    """Evaluations at once; each may hold a runtime."""
    evaluator_prewarmed: Annotated[int, Field(ge=0)] = 4
    """Clean copies made ahead, for tasks that ask for it; each waits as long as its agent runs."""
    evaluator_root: Path | None = None
    """Where clean copies are; by default `DATA/run/evaluations`."""
    evaluator_isolation: Literal["auto", "bubblewrap", "none"] = "auto"
    evaluator_log_mb: Annotated[float, Field(gt=0)] = 2
    """Output kept per evaluation; the rest is counted and dropped."""
    evaluator_reap_s: Annotated[float, Field(gt=0)] = 60
    """Between two looks for leftovers."""
    evaluator_drain_s: Annotated[float, Field(ge=0)] = 10
    """After SIGTERM: how long running evaluations may still finish; others do them again."""
    evaluator_memory_mb: Annotated[int, Field(ge=16)] = 2048
    evaluator_pids: Annotated[int, Field(ge=8)] = 512
    evaluator_disk_mb: Annotated[int, Field(ge=1)] = 4096

    @property
    def root(self) -> Path:
        return (self.evaluator_root or self.data / "run" / "evaluations").absolute()
