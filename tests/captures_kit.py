"""Requests as real harnesses and SDKs sent them, texts taken out: `tests/captures/<harness>.json`.

A body's larger pieces are shared among a file's requests (`{"$same": n}` stands for the n-th of `shared`). Names are
`<scenario>/<number>`; a scenario's requests belong to one run of the harness, in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import orjson

_FOLDER = Path(__file__).parent / "captures"


@dataclass(frozen=True)
class Capture:
    """One request. `path` has no session prefix, header names are lower case, secrets aren't kept."""

    harness: str
    name: str
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: Any

    @property
    def label(self) -> str:
        return f"{self.harness}/{self.name}"

    @property
    def scenario(self) -> str:
        return f"{self.harness}/{self.name.rpartition('/')[0]}"

    @property
    def params(self) -> dict[str, str]:
        return dict(parse_qsl(self.query, keep_blank_values=True))

    def written(self) -> bytes:
        return b"" if self.body is None else orjson.dumps(self.body)


def _whole(value: Any, shared: list[Any]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"$same"}:
            return _whole(shared[value["$same"]], shared)
        return {k: _whole(v, shared) for k, v in value.items()}
    return [_whole(v, shared) for v in value] if isinstance(value, list) else value


def _read() -> Iterator[Capture]:
    for file in sorted(_FOLDER.glob("*.json")):
        told = orjson.loads(file.read_bytes())
        for request in told["requests"]:
            yield Capture(file.stem, **request | {"body": _whole(request["body"], told["shared"])})


@cache
def captures() -> tuple[Capture, ...]:
    """All of them, by harness, then in the order in which they were sent."""
    return tuple(_read())
