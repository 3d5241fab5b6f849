"""One forward pass over any mixture of prompt chunks and single decode tokens.

The rows of all requests are laid end to end, so the linear layers see one dense batch without padding; attention alone
goes request by request, over that request's own keys and values. The transformer itself is the model class of
`transformers`: only its attention function is replaced, through the interface that library has for it. Needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface

from polar_common.errors import ConfigError
from polar_engine.attention import Segment, attend, batch_of
from polar_engine.kv import KvBuffer, KvShape
from polar_engine.packed import pack_linears, packing_available

__all__ = ["Chunk", "Model", "Weights", "load_weights"]

_ATTENTION = "polar_ragged"
# A step with fewer rows is filled up: the packed kernels need 40 ms of SmolLM2's weights for one row, 32 ms for four.
_LEAST_ROWS = 4


@dataclass
class Chunk:
    """`tokens` of one request, to be appended to `buffer`; logits are wanted for the last `wanted` of them."""

    buffer: KvBuffer
    tokens: Sequence[int]
    wanted: int


AttentionInterface.register(_ATTENTION, attend)


@dataclass(frozen=True)
class Weights:
    """A loaded network with the limits that its configuration states; `ends` are the end-of-answer ids."""

    network: Any
    kv: KvShape
    group: int
    vocab: int
    max_positions: int
    dtype: Any
    ends: frozenset[int]


def load_weights(path: Path, dtype: str = "float32") -> Weights:
    """Load a directory. Raises ConfigError where it isn't a causal language model with full attention in each layer."""
    kind = getattr(torch, dtype)
    try:
        network = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=kind, attn_implementation=_ATTENTION, local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"`{path}` can't be loaded: {error}", "model") from error
    config = network.config
    odd = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    if odd or getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"`{path}` has layers without full causal attention: {sorted(odd)}", "model")
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    network.eval().requires_grad_(False)
    if kind is torch.float32 and packing_available():
        pack_linears(network)
    return Weights(
        network=network,
        kv=KvShape(int(config.num_hidden_layers), kv_heads, dim, kind),
        group=heads // kv_heads,
        vocab=int(config.vocab_size),
        max_positions=int(config.max_position_embeddings),
        dtype=kind,
        ends=_ends(network),
    )


def _ends(network: Any) -> frozenset[int]:
    """The ids that end an answer: those of the generation configuration, else of the model's own."""
    for owner in (network.generation_config, network.config):
        ends = getattr(owner, "eos_token_id", None)
        if ends is not None:
            return frozenset([ends] if isinstance(ends, int) else ends)
    return frozenset()


class Model:
    """The network in use. Not thread-safe: one thread steps and swaps."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def new_buffer(self, capacity: int) -> KvBuffer:
        """An empty buffer for this model's keys and values."""
        return KvBuffer(self.weights.kv, capacity)

    def swap(self, weights: Weights) -> None:
        """Use other weights from the next step on. Raises ConfigError where their shapes differ."""
        old = self.weights
        if (old.kv, old.group, old.vocab) != (weights.kv, weights.group, weights.vocab):
            raise ConfigError("the new weights are of another shape than the model in use", "path")
        self.weights = weights

    def step(self, chunks: Sequence[Chunk]) -> npt.NDArray[np.float32]:
        """Append every chunk to its buffer; the logits [sum of wanted, vocab] of the wanted rows, in chunk order."""
        segments: list[Segment] = []
        rows = 0
        wanted: list[int] = []
        for chunk in chunks:
            count = len(chunk.tokens)
            chunk.buffer.reserve(chunk.buffer.length + count)
            segments.append(Segment(chunk.buffer, rows, count, self._mask(chunk.buffer.own, count)))
            wanted.extend(range(rows + count - chunk.wanted, rows + count))
            rows += count
        with torch.inference_mode():
            filler = [0] * max(0, _LEAST_ROWS - rows)
            ids = [t for chunk in chunks for t in chunk.tokens]
            positions = [s.buffer.length + i for s in segments for i in range(s.count)]
            output = self.weights.network(
                input_ids=torch.tensor([ids + filler], dtype=torch.long),
                position_ids=torch.tensor([positions + filler], dtype=torch.long),
                use_cache=False,
                logits_to_keep=torch.tensor(wanted, dtype=torch.long),
                ragged=batch_of(segments),
            )
        for seg in segments:
            seg.buffer.length += seg.count
        logits: npt.NDArray[np.float32] = output.logits[0].float().numpy()
        return logits

    def _mask(self, offset: int, count: int) -> Any:
        """Causal mask of a chunk behind `offset` own positions, once per query head of a group; none for one row."""
        if count == 1:
            return None
        future = torch.arange(offset + count)[None] > torch.arange(offset, offset + count)[:, None]
        mask = torch.zeros(future.shape, dtype=self.weights.dtype).masked_fill_(future, float("-inf"))
        return mask.repeat(self.weights.group, 1)[None, None]
