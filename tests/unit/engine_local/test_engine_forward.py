"""Ragged steps over owned and shared keys and values, against one plain forward pass."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from polar_common.errors import ConfigError  # noqa: E402
from polar_engine.forward import Chunk, Model, load_weights  # noqa: E402
from polar_engine.kv import KvBuffer  # noqa: E402
from polar_engine.models import ensure_model  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(load_weights(ensure_model("tiny").path))


@pytest.fixture(scope="module")
def plain() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(ensure_model("tiny").path), dtype=torch.float32).eval()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def expected(plain: Any, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return log_softmax(plain(torch.tensor([tokens])).logits[0].double().numpy())


def feed(model: Model, buffer: KvBuffer, tokens: list[int]) -> np.ndarray:
    return log_softmax(model.step([Chunk(buffer, tokens, len(tokens))]).astype(np.float64))


def ids(count: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(500) for _ in range(1)] + [
        random.Random(seed * 1000 + i).randrange(500) for i in range(count - 1)
    ]


def test_chunks_of_several_requests_in_one_step(model: Model, plain: Any) -> None:
    sequences = [ids(n, n) for n in (90, 61, 7, 30)]
    buffers = [model.new_buffer(4) for _ in sequences]
    got: list[list[np.ndarray]] = [[] for _ in sequences]
    rng = random.Random(1)
    while any(b.length < len(s) for b, s in zip(buffers, sequences, strict=True)):
        who = [i for i, s in enumerate(sequences) if buffers[i].length < len(s) and rng.random() < 0.7]
        if not who:
            continue
        pieces = [sequences[i][buffers[i].length :][: rng.choice([1, 1, 5, 20])] for i in who]
        rows = model.step([Chunk(buffers[i], p, len(p)) for i, p in zip(who, pieces, strict=True)])
        at = 0
        for i, piece in zip(who, pieces, strict=True):
            got[i].append(rows[at : at + len(piece)].astype(np.float64))
            at += len(piece)
        assert at == len(rows)
    for sequence, parts in zip(sequences, got, strict=True):
        assert np.abs(log_softmax(np.concatenate(parts)) - expected(plain, sequence)).max() < 1e-4


def test_only_the_wanted_rows_come_back(model: Model) -> None:
    whole, last = model.new_buffer(9), model.new_buffer(9)
    rows = model.step([Chunk(whole, [1, 2, 3], 3), Chunk(last, [1, 2, 3], 1), Chunk(model.new_buffer(1), [4], 0)])
    assert rows.shape == (4, 512)
    assert rows[2] == pytest.approx(rows[3], abs=1e-4)


def test_branches_share_their_parents_prompt(model: Model, plain: Any) -> None:
    prompt = ids(300, 3)
    root = model.new_buffer(300)
    feed(model, root, prompt)
    branches = [root.fork(299, 340) for _ in range(3)] + [root.fork(200, 340)]
    assert all(b.parent is root for b in branches)
    assert branches[0].capacity < 60
    tails = [ids(12, 10 + i) for i in range(4)]
    for step in (slice(0, 1), slice(1, 8), slice(8, 12)):
        # The root itself goes on in the same batch, behind what the branches see.
        chunks = [Chunk(b, t[step], len(t[step])) for b, t in zip(branches, tails, strict=True)]
        model.step([Chunk(root, [5], 0), *chunks])
    final = model.step([Chunk(b, [7], 1) for b in branches]).astype(np.float64)
    for row, branch, tail in zip(log_softmax(final), branches, tails, strict=True):
        sequence = prompt[: branch.base] + tail + [7]
        assert np.abs(row - expected(plain, sequence)[-1]).max() < 1e-4


@pytest.mark.parametrize("at", [50, 129, 280, 290, 310])
def test_a_branch_of_a_branch(model: Model, plain: Any, at: int) -> None:
    """Branching off before, at and behind the border between shared and own positions."""
    prompt, tail = ids(280, 4), ids(40, 5)
    root = model.new_buffer(280)
    feed(model, root, prompt)
    branch = root.fork(280, 330)
    feed(model, branch, tail)
    again = branch.fork(at, at + 20)
    assert again.length == at
    assert again.parent in (None, root)
    rows = feed(model, again, [9, 8, 7])
    sequence = [*(prompt + tail)[:at], 9, 8, 7]
    assert np.abs(rows - expected(plain, sequence)[-3:]).max() < 1e-4


def test_a_short_common_part_is_copied(model: Model) -> None:
    root = model.new_buffer(50)
    feed(model, root, ids(50, 6))
    branch = root.fork(40, 60)
    assert branch.parent is None
    assert torch.equal(branch.data[:, :, :, :40], root.data[:, :, :, :40])


def test_a_directory_that_cant_be_loaded_is_a_config_error(tmp_path: Any) -> None:
    with pytest.raises(ConfigError):
        load_weights(tmp_path)


def test_models_without_full_attention_are_refused(tmp_path: Any) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, layer_types=["full_attention", "sliding_attention"], sliding_window=4,
        use_sliding_window=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match="sliding_attention"):
        load_weights(tmp_path)


def test_without_the_packed_kernel_the_plain_layers_serve(monkeypatch: pytest.MonkeyPatch, plain: Any) -> None:
    monkeypatch.setattr("polar_engine.forward.packing_available", lambda: False)
    model = Model(load_weights(ensure_model("tiny").path))
    sequence = ids(30, 8)
    assert np.abs(feed(model, model.new_buffer(30), sequence) - expected(plain, sequence)).max() < 1e-4
