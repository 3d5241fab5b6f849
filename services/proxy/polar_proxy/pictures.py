"""Pictures on their way to the engine: named by hash, stored once, shown to an engine that takes them.

Behind this point a request holds no picture's bytes: the session's memory, the event and the comparison of messages all
go by the hash. Nothing is fetched; whether the engine may fetch what came as an address is a setting.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from polar_common.blobs import Blobs
from polar_common.errors import RequestError
from polar_common.packing import BlobRef
from polar_proxy.dialects.base import ChatRequest
from polar_render.messages import Image, Message, Part, Text
from polar_render.records import Ids

__all__ = ["ImageFormat", "Shown", "pictures_of", "references", "refusal", "replaced", "shown"]

_LARGE = 256 << 10
"""Characters of base64 from which on a picture is decoded off the loop."""
_FIELD = {"openai_responses": "input", "google": "contents"}


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """How the model takes pictures: its processor, the hash of that's configuration, the id a picture expands to."""

    processor: str = ""
    processor_hash: str = ""
    image_id: int | None = None

    @classmethod
    def of(cls, model_dir: Path | None) -> ImageFormat:
        """From the model's directory; empty where it says nothing."""
        processor, digest = "", ""
        told, raw = _read(model_dir, "preprocessor_config.json")
        if told:
            processor = str(told.get("image_processor_type") or told.get("processor_class") or "")
            digest = hashlib.sha256(raw).hexdigest()
        config, _ = _read(model_dir, "config.json")
        found = config.get("image_token_id", config.get("image_token_index"))
        return cls(processor, digest, found if type(found) is int else None)


def _read(directory: Path | None, name: str) -> tuple[dict[str, Any], bytes]:
    path = directory / name if directory is not None else None
    if path is None or not path.is_file():
        return {}, b""
    raw = path.read_bytes()
    told = orjson.loads(raw)
    return (told, raw) if isinstance(told, dict) else ({}, b"")


@dataclass(frozen=True, slots=True)
class Shown:
    """A request whose pictures are named by hash, and what the engine is sent for each: hash → data URL."""

    request: ChatRequest
    urls: Mapping[str, str]


def pictures_of(messages: Sequence[Message]) -> Iterator[tuple[int, int, Image]]:
    """(message, part, picture) in the order of the prompt."""
    for number, message in enumerate(messages):
        for at, part in enumerate(message.parts):
            if isinstance(part, Image):
                yield number, at, part


def refusal(request: ChatRequest, message: str) -> RequestError:
    """A picture that can't be shown, in terms of the provider's own field."""
    return RequestError(message, path=_FIELD.get(request.dialect, "messages"))


def replaced(request: ChatRequest) -> tuple[ChatRequest, tuple[str, ...]]:
    """The request with a placeholder for each picture, and the paths to be recorded as dropped."""
    messages = tuple(_mapped(m, lambda _: Text("[image]")) for m in request.messages)
    at = dict.fromkeys(number for number, _, _ in pictures_of(request.messages))
    return replace(request, messages=messages), tuple(f"messages[{number}].image" for number in at)


async def shown(request: ChatRequest, known: dict[str, BlobRef], store: Blobs, *, addresses: bool) -> Shown:
    """Store what `known` hasn't, and name every picture by its hash. `known` learns what was stored.

    Raises RequestError for an address where the engine may fetch none, BusError if the log doesn't answer.
    """
    urls: dict[str, str] = {}
    names: dict[int, str] = {}
    for _, _, picture in pictures_of(request.messages):
        if picture.url:
            if not addresses:
                raise refusal(request, "images are taken as base64 here: nothing is fetched from an address")
            continue
        if picture.data:
            large = len(picture.data) > _LARGE
            ref, body = await asyncio.to_thread(_blob, picture) if large else _blob(picture)
            names[id(picture)] = ref.sha256
            if ref.sha256 not in known:
                await store.put_as(ref, body)
                known[ref.sha256] = ref
            urls[ref.sha256] = f"data:{picture.mime};base64,{picture.data}"
        elif picture.blob not in urls:
            urls[picture.blob] = await _kept(picture.blob, known, store)
    messages = tuple(_mapped(m, lambda p: _named(p, names.get(id(p), ""))) for m in request.messages)
    return Shown(replace(request, messages=messages), urls)


def _blob(picture: Image) -> tuple[BlobRef, bytes]:
    body = base64.b64decode(picture.data)
    return BlobRef(sha256=hashlib.sha256(body).hexdigest(), size=len(body), media_type=picture.mime), body


async def _kept(name: str, known: Mapping[str, BlobRef], store: Blobs) -> str:
    """The data URL of a picture of an earlier call. Raises BlobError if the log has lost it."""
    ref = known[name]
    return f"data:{ref.media_type};base64,{base64.b64encode(await store.get(ref)).decode()}"


def _named(picture: Image, name: str) -> Image:
    return replace(picture, data="", blob=name) if name else picture


def _mapped(message: Message, by: Callable[[Image], Part]) -> Message:
    if not any(isinstance(p, Image) for p in message.parts):
        return message
    parts: tuple[Part, ...] = tuple(by(p) if isinstance(p, Image) else p for p in message.parts)
    return replace(message, parts=parts)


def references(
    messages: Sequence[Message], known: Mapping[str, BlobRef], prompt: Ids, form: ImageFormat
) -> list[dict[str, Any]]:
    """`ImageRef`s as JSON. `prompt` int32[P]: spans are told where it has one stretch of picture ids per picture."""
    found = list(pictures_of(messages))
    spans = _spans(prompt, form.image_id)
    told: list[dict[str, Any]] = []
    for number, (message, part, picture) in enumerate(found):
        ref: dict[str, Any] = {"message": message, "part": part}
        if picture.blob:
            ref["blob"] = known[picture.blob].model_dump()
        if picture.url:
            ref["url"] = picture.url
        if form.processor_hash:
            ref |= {"processor": form.processor, "processor_hash": form.processor_hash}
        if len(spans) == len(found):
            ref["span"] = spans[number]
        told.append(ref)
    return told


def _spans(prompt: Ids, image_id: int | None) -> list[tuple[int, int]]:
    """(start, length) of each stretch of `image_id`."""
    if image_id is None or not len(prompt):
        return []
    there = np.concatenate(([0], (prompt == image_id).astype(np.int8), [0]))
    edges = np.flatnonzero(np.diff(there)).tolist()
    return [(start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]
