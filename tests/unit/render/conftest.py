"""Tokenizers made on the spot: byte-level BPE with the special tokens that ChatML and Qwen3 formats need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from polar_render import ModelProfile, load_renderer
from polar_render.base import Renderer
from polar_render.vocabulary import Vocabulary

CORPUS = [
    "The quick brown fox jumps over the lazy dog and writes a file named notes.txt.",
    '<tool_call>\n{"name": "write", "arguments": {"path": "a.txt", "content": "hello"}}\n</tool_call>',
    "user assistant system tool developer\n\nfunction arguments name description parameters object string",
    "größer naïve café 日本語 emoji 🙂 and more: é ü ñ",
    "def main():\n    return {'key': [1, 2, 3]}\n",
] * 8

CHATML_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def make_tokenizer(directory: Path, plain: list[str], special: list[str] = CHATML_SPECIAL, size: int = 440) -> Path:
    """Writes a tokenizer directory. `plain` are added tokens that aren't special, as Qwen3 has them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, "eos_token_id": 2}))
    return directory


@pytest.fixture(scope="session")
def chatml_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tags are ordinary text here, as in SmolLM2."""
    return make_tokenizer(tmp_path_factory.mktemp("chatml"), [])


@pytest.fixture(scope="session")
def qwen_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tags are tokens of their own, as in Qwen3."""
    return make_tokenizer(tmp_path_factory.mktemp("qwen"), QWEN_ADDED)


@pytest.fixture(scope="session")
def chatml(chatml_dir: Path) -> Renderer:
    return load_renderer(ModelProfile("tiny-chatml", chatml_dir, template="chatml_tools"))


@pytest.fixture(scope="session")
def qwen_bridge(qwen_dir: Path) -> Renderer:
    return load_renderer(ModelProfile("tiny-qwen", qwen_dir, template="chatml_tools"))


@pytest.fixture(scope="session")
def qwen3(qwen_dir: Path) -> Renderer:
    return load_renderer(ModelProfile("tiny-qwen", qwen_dir, renderer="qwen3"))


@pytest.fixture(scope="session")
def vocabulary(chatml_dir: Path) -> Vocabulary:
    return Vocabulary.load(chatml_dir)
