"""The model directory that benchmarks render with: the quickstart's, built on first use."""

from __future__ import annotations

from pathlib import Path

from polar_engine.models import ensure_model

__all__ = ["model_directory"]


def model_directory() -> Path:
    """Of SmolLM2-135M-Instruct: its tokenizer, template and configuration are what counts here."""
    return ensure_model("smollm2-135m").path
