"""Completions that a build doesn't train: found by their id, with the reason and what was sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.catalogue import Catalogue
from polar_common.events import BuildReconstructed, CompletionAborted, CompletionCaptured
from polar_common.ids import segment_of
from polar_common.packing import unpack

from .builds import read_build
from .columns import Ids
from .traces import is_called

__all__ = ["Untrained", "find_untrained"]


@dataclass(frozen=True, slots=True, eq=False)
class Untrained:
    """`sampled` is empty where nothing is recorded of it."""

    session: str
    completion: str
    reason: str
    prompt_tokens: int
    sampled: Ids
    tokenizer_hash: str


async def find_untrained(bus: Bus, name: str, build: str) -> list[Untrained]:
    """The excluded completions of a build whose ids begin so."""
    found = []
    for segment in await Catalogue(bus).kept():
        for session, fact in (await read_build(bus, segment, build)).items():
            excluded = fact.excluded if isinstance(fact, BuildReconstructed) else {}
            for completion, reason in excluded.items():
                if is_called(completion, name):
                    found.append(await _read(bus, session, completion, reason))
    return found


async def _read(bus: Bus, session: str, completion: str, reason: str) -> Untrained:
    tokens, sampled, tokenizer = 0, cast(Ids, np.empty(0, np.int32)), ""
    for stored in await bus.read_session(session):
        event = stored.event
        if not isinstance(event, CompletionCaptured | CompletionAborted) or event.completion != completion:
            continue
        if isinstance(event, CompletionCaptured):
            tokens, tokenizer = event.prompt.length, event.engine.tokenizer_hash
        else:
            tokens = event.prompt_tokens
        if event.sampled is not None:
            sampled = cast(Ids, unpack(event.sampled, await Blobs(bus, segment_of(session)).column(event.sampled)))
    return Untrained(session, completion, reason, tokens, sampled, tokenizer)
