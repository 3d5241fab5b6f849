"""The tokenizer that benchmarks render with: the small real model's where it is installed, else one made here."""

from __future__ import annotations

import tempfile
from pathlib import Path

import orjson
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from polar_common.settings import cache_dir

__all__ = ["model_directory"]

_TEXT = [
    "The quick brown fox jumps over the lazy dog and writes a file named notes.txt; then it runs all the tests again.",
    '{"name": "write", "arguments": {"path": "a.txt", "content": "hello", "command": "ls -la"}}',
    "user assistant system tool function arguments name description parameters object string question answer",
] * 8


def model_directory() -> Path:
    """A directory with a ChatML tokenizer."""
    for name in ("smollm2-135m-b1", "smollm2-135m"):
        found = cache_dir() / "models" / name
        if (found / "tokenizer.json").is_file():
            return found
    target = Path(tempfile.mkdtemp(prefix="polar-bench-model-"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t in ("<tool_call>", "</tool_call>", "<think>", "</think>")]
    )
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_bytes(orjson.dumps({"eos_token": "<|im_end|>"}))
    (target / "config.json").write_bytes(orjson.dumps({"max_position_embeddings": 32768, "eos_token_id": 2}))
    return target
