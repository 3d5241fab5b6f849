"""Answering a retry from the record: which earlier calls there are, and their answer in the form now asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polar_proxy.dialects.base import ChatRequest, Dialect, Frame, Minted, Reply, Usage, events_of
from polar_render.base import Renderer

from .capture import reply_of
from .context.nodes import Node, SessionIndex
from .context.retry import Earlier
from .exchange import Exchange
from .headers import stream_headers, whole_headers
from .metrics import METRICS
from .sessions import Session

__all__ = ["earlier", "replay"]


def earlier(index: SessionIndex, request_hash: str) -> list[Earlier]:
    """What `retry.decide` has to know of earlier calls with this identity."""
    found = [
        Earlier(
            n.completion, "captured", gone=n.delivery == "undelivered", delivery=n.delivery, extended=n.extended,
            replays=n.replays,
        )
        for n in index.by_hash.get(request_hash, ()) if not n.choice
    ]  # fmt: skip
    found += [Earlier("", "aborted", gone=True)] * index.aborted[request_hash]
    for live in index.live.values():
        if live.request_hash == request_hash:
            found.append(Earlier(live.completion, "committing" if live.committing else "running", gone=live.gone))
    return found


async def replay(
    exchange: Exchange, dialect: Dialect, session: Session, request: ChatRequest, node: Node, renderer: Renderer
) -> None:
    """The recorded answer of `node` and its sibling choices. Counts as delivered if the caller is still there."""
    nodes = session.index.choices(node)
    for one in nodes:
        one.replays += 1
        one.delivery = "pending"
    METRICS.replayed.inc()
    replies = [reply_of(n, None, renderer, tokens=request.sampling.logprobs) for n in nodes]
    if request.stream:
        await exchange.start(200, stream_headers(request, node.completion))
        await exchange.send(_restreamed(dialect, request, nodes, replies), more=False)
    else:
        await exchange.answer(200, whole_headers(node.completion), dialect.encode(replies, request))
    for one in nodes:
        one.delivery = "undelivered" if exchange.gone else "delivered"
        if not exchange.gone:
            session.delivered.append(one.completion)


def _restreamed(dialect: Dialect, request: ChatRequest, nodes: Sequence[Node], replies: Sequence[Reply]) -> bytes:
    minted = [Minted(n.completion, n.created) for n in nodes]
    encoder = dialect.encoder(request, minted)
    frames: list[Frame] = encoder.start(Usage(nodes[0].usage.prompt_tokens))
    for number, reply in enumerate(replies):
        for event in events_of(reply.parts):
            frames += encoder.feed(event, number)
        frames += encoder.finish(reply, number)
    total = replace(
        nodes[0].usage,
        completion_tokens=sum(n.usage.completion_tokens for n in nodes),
        reasoning_tokens=sum(n.usage.reasoning_tokens for n in nodes),
    )
    frames += encoder.end(total)
    return b"".join(f.data for f in frames)
