"""Turns a GGUF file into an ordinary fp32 Hugging Face directory. Needs torch and `gguf`."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

__all__ = ["gguf_to_directory"]


def gguf_to_directory(gguf: Path, target: Path) -> None:
    """De-quantise `gguf` and write weights (fp32 safetensors), configuration and tokenizer into `target`."""
    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # save_pretrained refuses a model that still claims to be quantised, though its weights are plain floats by now.
    for owner in (model, model.config):
        for mark in ("quantization_config", "hf_quantizer", "is_quantized", "quantization_method"):
            if mark in vars(owner):
                delattr(owner, mark)
    model.config._name_or_path = ""
    model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
