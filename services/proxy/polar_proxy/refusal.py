"""How an error reaches a harness: as a status; inside a stream where one has begun, or where clients do better."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from polar_common.errors import EngineOverflow, PolarError, RenderError
from polar_common.ids import new_id
from polar_proxy.dialects.base import ChatRequest, Dialect, Encoder, Minted, Usage
from polar_proxy.dialects.faults import fault

from .exchange import Exchange
from .headers import stream_headers

__all__ = ["reason_of", "tell"]

_APART_S = 0.05


async def tell(
    exchange: Exchange, dialect: Dialect, error: PolarError, request: ChatRequest | None = None,
    minted: Sequence[Minted] = (), begun: Encoder | None = None,
) -> None:  # fmt: skip
    """Answer with an error. `begun`: the encoder of the stream that was begun; the caller hasn't ended it.

    Some clients give up on a status that they'd survive inside a stream: those get it there.
    """
    if begun is not None:
        # Google's clients see an error only where it arrives in a piece of its own.
        await asyncio.sleep(_APART_S)
        await exchange.send(b"".join(f.data for f in begun.fail(error)), more=False)
    elif exchange.started:
        await exchange.send(b"", more=False)
    elif request is not None and request.stream and _survives(request, error):
        minted = minted or [Minted(new_id(), int(time.time()))]
        encoder = dialect.encoder(request, minted)
        await exchange.start(200, stream_headers(request, minted[0].completion))
        frames = [*encoder.start(Usage()), *encoder.fail(error)]
        await exchange.send(b"".join(f.data for f in frames), more=False)
    else:
        status, headers, body = dialect.error(error)
        await exchange.answer(status, headers, body)


def _survives(request: ChatRequest, error: PolarError) -> bool:
    what = fault(error)
    return request.hints.errors_in_stream and (what.overflow or what.status == 429)


def reason_of(error: PolarError, status: int) -> str:
    """In a word, as it is counted and recorded."""
    names = {
        401: "unauthorised", 404: "not_found", 408: "too_slow", 409: "sealed", 413: "too_large", 429: "busy",
        503: "unavailable",
    }  # fmt: skip
    if isinstance(error, EngineOverflow):
        return "context_full"
    if isinstance(error, RenderError):
        return "unrenderable"
    return names.get(status, "malformed" if status < 500 else "error")
