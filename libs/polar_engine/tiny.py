"""A tiny Qwen3-architecture model with its own byte-level BPE: the policy for tests, built in seconds from a seed.

It carries Qwen3's special tokens, so that everything that renders and parses for Qwen3 drives it unchanged. Its weights
are random: it says nothing sensible, but every number it reports is exact. Needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

__all__ = ["SEED", "build_tokenizer", "write_tiny_model"]

SEED = 20
_CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

# Words that agent sessions are full of, so that a few hundred merges already shorten such prompts.
_CORPUS = """
system user assistant tool function name arguments parameters type object string number integer boolean required
{"name": "bash", "arguments": {"command": "ls -la"}} {"type": "object", "properties": {"path": {"type": "string"}}}
You are a coding agent. You have access to the following tools. Answer the question, then stop.
Read the file, edit the file, run the tests, and write the result. The command ended with exit code 0.
def main() -> None: return value for each line in the file; import json; print(result); if not found: raise ValueError
What is one plus two? One plus two is three. The answer is 42. Please count from 1 to 10: 1 2 3 4 5 6 7 8 9 10.
# Tools. For each function call return a json object with function name and arguments.
The quick brown fox jumps over the lazy dog. the of and to in is that it was for on are with as this be at by not
"""


def build_tokenizer() -> Any:
    """The tiny model's tokenizer: byte-level BPE (any text round-trips), 512 tokens, Qwen3's control tokens added."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    size = 512 - len(_CONTROL) - len(_MARKUP)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(_CORPUS.strip().splitlines() * 4, trainer)
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _CONTROL])
    inner.add_tokens([AddedToken(t, special=False, normalized=False) for t in _MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )


def write_tiny_model(target: Path) -> None:
    """Write weights, configuration and tokenizer into `target`; the same bytes every time for one torch version."""
    tokenizer = build_tokenizer()
    ends = [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        # Wide enough that the random distribution isn't flat: tests want tokens of unlike probability.
        initializer_range=0.2,
        eos_token_id=ends[0],
        pad_token_id=ends[1],
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = ends
    model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
