"""Settings of the local engine: `POLAR_ENGINE_MAX_MODEL_LEN=4096` or `--max-model-len 4096`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from polar_engine.models import default_cache

__all__ = ["EngineSettings"]


class EngineSettings(BaseSettings):
    """One engine process serves one model."""

    model_config = SettingsConfigDict(
        env_prefix="POLAR_ENGINE_",
        extra="ignore",
        use_attribute_docstrings=True,
        cli_implicit_flags=True,
        cli_kebab_case=True,
        cli_prog_name="polar-engine",
    )

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    """0: any free port, told in `ready_file`."""
    model: str = "smollm2-135m"
    """A known name (`smollm2-135m`, `tiny`) or a Hugging Face directory."""
    served_name: str = ""
    """The name clients use; by default the model's own."""
    cache: Path = Field(default_factory=default_cache)
    """Where models with a known name are built once."""
    max_model_len: int = Field(0, ge=0)
    """Prompt and answer together; 0 takes what the model's positions allow."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """fp32, so that recomputed log-probs agree within 1e-4; bf16 differs from it by 0.2."""
    threads: int = Field(1, ge=1)
    """One: with other processes on the same cores, spinning threads slow each other down tenfold."""
    max_batch: int = Field(16, ge=1)
    """Choices that are generated at the same time; more wait."""
    max_waiting: int = Field(512, ge=1)
    """Requests under way or waiting; beyond it a client is told 429."""
    kv_cache_mb: int = Field(4096, ge=16)
    """Keys and values of running requests and of prefixes kept for later ones."""
    chunk_alone: int = Field(256, ge=1)
    """Prompt tokens read in one step when nobody decodes."""
    chunk_beside_decodes: int = Field(64, ge=1)
    """Prompt tokens read in one step beside decoding requests: 0.2 s of SmolLM2, so that others keep moving."""
    model_version: str = "v0"
    """What the weights are called until an update names others."""
    no_logprobs: bool = False
    """Leave log-probs out of every answer: a test engine whose completions can't be trained."""
    script: str = ""
    """Follow this script (flags of `polar_engine.script`) instead of sampling: for smoke, load and crash tests."""
    script_token_ms: float = Field(0.0, ge=0)
    """Milliseconds per token of a scripted answer."""
    script_split: bool = False
    """Scripted answers are tokenised in ways their tokenizer wouldn't choose, as samples sometimes are."""
    faults: str = ""
    """Scripted faults by call number: `500@2,429@3,cut@5,late@6` (an answer that breaks off soon, or near its end)."""
    journal: Path | None = None
    """A scripted engine writes here what it was asked and what it said, one JSON object a line."""
    ready_file: Path | None = None
    """Written (JSON: port, pid, model) when the engine answers."""
    log_level: str = "info"
