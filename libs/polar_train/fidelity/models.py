"""Finding models on this machine: the one given, the one that is served, those in the model cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import orjson

from polar_common.errors import ConfigError
from polar_common.house import House
from polar_common.settings import cache_dir
from polar_common.traces import Provenance
from polar_render import load_renderer, profile_for
from polar_render.base import Renderer
from polar_render.vocabulary import Vocabulary

from .policies import is_model, known_models

__all__ = ["Models", "find_models", "served_root"]


@dataclass(slots=True)
class Models:
    """`base`: the first weights. `directories`: everything that may hold a tokenizer, the likeliest first."""

    base: Path | None
    directories: list[Path]
    _vocabularies: dict[str, Vocabulary | None] = field(default_factory=dict)
    _renderers: dict[tuple[str, str], Renderer | None] = field(default_factory=dict)

    @property
    def by_hash(self) -> dict[str, Path]:
        return known_models(self.directories)

    def vocabulary(self, tokenizer_hash: str) -> Vocabulary | None:
        """The tokenizer with this hash; the likeliest where the trace names none."""
        if tokenizer_hash not in self._vocabularies:
            directory = self._with_tokenizer(tokenizer_hash)
            self._vocabularies[tokenizer_hash] = None if directory is None else Vocabulary.load(directory)
        return self._vocabularies[tokenizer_hash]

    def renderer(self, provenance: Provenance) -> Renderer | None:
        """The format of a trace's model, thinking shown as its template wants it."""
        key = (provenance.tokenizer_hash, provenance.model)
        if key not in self._renderers:
            directory = self._with_tokenizer(provenance.tokenizer_hash)
            found = None
            if directory is not None:
                found = load_renderer(replace(profile_for(directory, model=provenance.model), thinking="follow"))
            self._renderers[key] = found
        return self._renderers[key]

    def _with_tokenizer(self, tokenizer_hash: str) -> Path | None:
        for directory in self.directories:
            if not (directory / "tokenizer.json").is_file():
                continue
            if not tokenizer_hash or Vocabulary.load(directory).fingerprint == tokenizer_hash:
                return directory
        return None


def find_models(given: str = "", served: Path | None = None) -> Models:
    """`given`: a directory or a name of the model cache. Raises ConfigError where it is neither."""
    cached = sorted(p for p in (cache_dir() / "models").glob("*") if p.is_dir())
    base = _given(given, cached) if given else served
    first = [p for p in (base, served) if p is not None]
    return Models(base, list(dict.fromkeys([*first, *cached])))


def _given(given: str, cached: Sequence[Path]) -> Path:
    path = Path(given).expanduser()
    if is_model(path):
        return path.absolute()
    for directory in cached:
        try:
            if orjson.loads((directory / "polar_model.json").read_bytes())["name"] == given:
                return directory
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
            continue
    raise ConfigError(f"`{given}` is neither a model directory nor a name in the model cache", "model")


def served_root(data: Path) -> Path | None:
    """Where the model lies that a running house serves; None where no house runs or its engine doesn't say."""
    house = House(data).read()
    if house is None or not house.engine:
        return None
    try:
        root = Path(httpx.get(f"{house.engine}/v1/models", timeout=5).json()["data"][0]["root"])
    except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError):
        return None
    return root if is_model(root) else None
