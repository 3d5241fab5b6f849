"""Where each policy version's weights lie: as published on the log, else the model the house began with.

Weights that can't be had are a reason, never an exception: their spans are counted under it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

import orjson

from polar_common import subjects
from polar_common.bus import Bus, scan
from polar_common.events import PolicyPublished

__all__ = ["Place", "Policies", "is_model", "known_models", "published", "weights_hash"]

_MANIFEST = "polar_model.json"
_FIRST = ("", "v0", "default")
"""What engines call the weights that they were started with."""


@dataclass(frozen=True, slots=True)
class Place:
    """A version's directory, or why there is none.

    `reason`: `weights_gone` (the directory isn't there any more), `weights_changed` (it holds others now),
    `weights_remote` (an address that isn't a path), `weights_unknown` (never published, and not the first ones).
    """

    path: Path | None
    reason: str = ""


class Policies:
    """Version → weights. `base` are the first weights, given by the user or served; `known` are others, by hash."""

    def __init__(
        self,
        published: Mapping[str, PolicyPublished],
        base: Path | None = None,
        known: Mapping[str, Path] | None = None,
    ) -> None:
        self._published = published
        self._base = base
        self._known = known or {}
        self._hashes: dict[Path, str] = {}
        self.used: dict[str, Place] = {}
        """Every version that was asked for."""

    def find(self, version: str, weights_hash: str = "") -> Place:
        """The weights called `version`. `weights_hash`: what the trace's provenance says of its engine's weights,
        which tells nothing about published versions, since they may have come after it was asked."""
        place = self._find(version, weights_hash)
        self.used[version] = place
        return place

    def _find(self, version: str, recorded: str) -> Place:
        event = self._published.get(version)
        if event is not None:
            return self._checked(event)
        if self._base is not None and version in _FIRST:
            if recorded and self._hash(self._base) != recorded:
                return Place(None, "weights_changed")
            return Place(self._base)
        path = self._known.get(recorded)
        if path is not None and self._hash(path) == recorded:
            return Place(path)
        return Place(None, "weights_gone" if version in _FIRST and recorded else "weights_unknown")

    def _checked(self, event: PolicyPublished) -> Place:
        url = urlparse(event.weights)
        if url.scheme not in ("", "file"):
            return Place(None, "weights_remote")
        path = Path(unquote(url.path) if url.scheme else event.weights)
        if not is_model(path):
            return Place(None, "weights_gone")
        if event.weights_hash and self._hash(path) != event.weights_hash:
            return Place(None, "weights_changed")
        return Place(path)

    def _hash(self, path: Path) -> str:
        found = self._hashes.get(path)
        if found is None:
            found = self._hashes[path] = weights_hash(path)
        return found


def is_model(path: Path) -> bool:
    """Whether a directory holds a configuration and safetensors."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def weights_hash(path: Path) -> str:
    """SHA-256 over names and bytes of all safetensors files in name order: what the local engine reports."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as body:
            while block := body.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def known_models(directories: Iterable[Path]) -> dict[str, Path]:
    """Weights hash → directory, for those with a manifest of the model cache."""
    found: dict[str, Path] = {}
    for directory in directories:
        try:
            manifest = orjson.loads((directory / _MANIFEST).read_bytes())
            found[str(manifest["weights_sha256"])] = directory
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
            continue
    return found


async def published(bus: Bus, streams: Iterable[str]) -> dict[str, PolicyPublished]:
    """Version → its publication, from event streams in their order; the last one where they repeat a name."""
    found: dict[str, PolicyPublished] = {}
    for stream in streams:
        async for stored in scan(bus, stream, [subjects.ANY_POLICY_PUBLISHED]):
            event = stored.event
            if isinstance(event, PolicyPublished):
                found[event.version] = event
    return found
