"""What a user submits: one problem, its harness, runtime, evaluator and limits. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = ["EvaluatorSpec", "HarnessSpec", "Limits", "RuntimeChoice", "SamplingSpec", "Step", "TaskSpec"]

MAX_INSTRUCTION = 1_000_000


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HarnessSpec(_Strict):
    """Which agent CLI runs, and its own arguments (see the adapter's docstring)."""

    name: Annotated[str, Field(min_length=1)]
    args: dict[str, Any] = {}


class Step(_Strict):
    """One preparation step in the runtime before the harness starts: a shell command line."""

    exec: Annotated[str, Field(min_length=1)]
    timeout_s: Annotated[float, Field(gt=0)] = 300


class RuntimeChoice(_Strict):
    """Where the harness runs. `work_class` names the requirement set gateways serve; by default it is `kind`."""

    kind: str = "local"
    image: str = ""
    work_class: str = ""
    env: dict[str, str] = {}
    prepare: tuple[Step, ...] = ()
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    cpus: Annotated[float, Field(gt=0)] | None = None
    pids: Annotated[int, Field(gt=0)] | None = None
    disk_mb: Annotated[int, Field(gt=0)] | None = None
    network: bool = False

    @property
    def queue_class(self) -> str:
        return self.work_class or self.kind


class EvaluatorSpec(_Strict):
    """How an artifact becomes an outcome and a reward.

    `command`: exit code 0 passes; `reward_file` (a JSON number, or `{"reward": x}`), where given, sets the reward.
    `files` are the evaluator's own, added after the agent has finished; the agent never sees them.
    The agent's standard output is in `$POLAR_ANSWER`.
    """

    kind: str = "command"
    command: str = ""
    files: dict[str, str] = {}
    reward_file: str = ""
    timeout_s: Annotated[float, Field(gt=0)] = 120
    prepare: tuple[Step, ...] = ()
    """Steps in the evaluator's own clean copy, after the task's and before the agent's patch."""
    prewarm: bool = False
    """Make that copy while the agent still runs; worth it where preparing takes long."""
    args: dict[str, Any] = {}


class Limits(_Strict):
    """Bounds in seconds, calls and tokens. `queue_s` counts from acceptance, `session_s` from the first claim."""

    queue_s: Annotated[float, Field(gt=0)] = 3600
    session_s: Annotated[float, Field(gt=0)] = 1800
    attempt_s: Annotated[float, Field(gt=0)] = 900
    attempt_min_s: Annotated[float, Field(ge=0)] = 10
    postrun_reserve_s: Annotated[float, Field(ge=0)] = 60
    group_s: Annotated[float, Field(gt=0)] = 86_400
    attempts: Annotated[int, Field(ge=1, le=100)] = 3
    calls: Annotated[int, Field(ge=1)] = 500
    max_tokens_per_call: Annotated[int, Field(ge=1)] | None = None
    total_tokens: Annotated[int, Field(ge=1)] | None = None


class SamplingSpec(_Strict):
    """`pin` (training): these values override the harness's. `follow`: the harness's own win where it gives any."""

    mode: Literal["pin", "follow"] = "pin"
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: int | None = None
    context: Literal["exact", "native"] = "exact"
    thinking: Literal["keep", "follow"] = "keep"


class TaskSpec(_Strict):
    """One task. `files` are written into the agent's working directory before it starts."""

    id: Annotated[str, Field(min_length=1, max_length=512)]
    instruction: Annotated[str, Field(min_length=1, max_length=MAX_INSTRUCTION)]
    samples: Annotated[int, Field(ge=1, le=1024)] = 1
    files: dict[str, str] = {}
    harness: HarnessSpec
    runtime: RuntimeChoice = RuntimeChoice()
    evaluator: EvaluatorSpec = EvaluatorSpec()
    artifacts: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Files or folders to keep beside the patch: relative to the working directory, or absolute in HOME or `/tmp`."""
    limits: Limits = Limits()
    model: str = "policy"
    sampling: SamplingSpec = SamplingSpec()
    callback: str = ""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    metadata: dict[str, str] = {}

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            if name.startswith("/") or ".." in name.split("/") or "\0" in name or not name:
                raise ValueError(f"{name!r} must be a relative path inside the working directory")
        return files
