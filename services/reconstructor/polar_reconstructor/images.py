"""Pictures of a trace, by reference: which bodies the engine was shown, and where each stands in prompt + response.

A completion lists the pictures of its whole request with their place in its own prompt. Along a chain each picture is
told once; where a rule put something else in place of a part of a prompt, places behind it move with their ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from polar_common.errors import TraceError
from polar_common.events import ImageRef
from polar_common.traces import span_inside

from .calls import Call, Document

__all__ = ["Image", "Place", "check_images", "check_places", "exact_images", "images_of", "moved"]

Image = dict[str, Any]
"""JSON of `polar_common.traces.TraceImage`."""


@dataclass(frozen=True, slots=True)
class Place:
    """A call in a trace: its sample begins at `start` of prompt + response."""

    call: Call
    start: int


def check_images(doc: Document, length: int) -> None:
    """Raises TraceError where a completion's pictures are damaged or stand outside its prompt of `length` ids."""
    for number, image in enumerate(doc["images"]):
        where = f"completion {doc['completion']}, images[{number}]"
        try:
            ref = ImageRef.model_validate(image)
        except ValidationError as error:
            first = error.errors()[0]
            raise TraceError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        if ref.span is not None and not span_inside(ref.span, length):
            raise TraceError(f"{where}: span {ref.span} in a prompt of {length} ids")


def images_of(places: Iterable[Place]) -> list[Image]:
    """The pictures of a trace's calls, in order. A place that isn't known, or isn't in the trace, is None."""
    found: list[Image] = []
    told: set[tuple[int, int]] = set()
    end = 0
    for place in places:
        call = place.call
        for image in call.images:
            name = (image["message"], image["part"])
            if name not in told:
                told.add(name)
                found.append(_trace_image(image, place.start - call.length, end))
        end = place.start + len(call.sampled)
    return found


def _trace_image(image: Mapping[str, Any], by: int, begins: int) -> Image:
    """`by`: how far prompt positions have to move; `begins`: where in the trace this call's own context begins."""
    span, blob = image.get("span"), image.get("blob")
    if span is not None:
        span = [span[0] + by, span[1]] if span[0] + by >= begins or not by else None
    return {
        "blob": blob,
        "mime": blob["media_type"] if blob else "",
        "url": image.get("url", ""),
        "processor": image.get("processor", ""),
        "processor_hash": image.get("processor_hash", ""),
        "span": span,
        "grid": image.get("grid"),
    }


def exact_images(calls: Sequence[Call]) -> list[Image]:
    """The pictures of calls that continue each other exactly: their prompts' places are the trace's."""
    return images_of(Place(c, c.length) for c in calls)


def moved(images: Iterable[Image], by: int) -> list[Image]:
    """The same with places counted from `by` ids further on."""
    return [i if i["span"] is None else i | {"span": [i["span"][0] - by, i["span"][1]]} for i in images]


def check_places(name: str, images: Iterable[Mapping[str, Any]], length: int) -> None:
    """Raises TraceError where a picture stands outside the `length` ids of trace `name`."""
    for number, image in enumerate(images):
        span = image["span"]
        if span is not None and not span_inside(span, length):
            raise TraceError(f"trace {name}: images[{number}] stands at {list(span)} of {length} ids")
