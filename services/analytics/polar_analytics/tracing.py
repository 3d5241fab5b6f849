"""A session's traces as the page shows them: one entry a token, with its source, mask, log-prob and policy version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.ids import segment_of, task_of
from polar_common.packing import unpack
from polar_common.subjects import session_traces
from polar_common.topology import TRACES
from polar_common.trace_messages import read_message
from polar_common.traces import Span, Trace

__all__ = ["MOST_TOKENS", "as_numbers", "session_tokens", "token_entries"]

MOST_TOKENS = 20_000
Decode = Callable[[Sequence[int]], list[str]]


def token_entries(
    trace: Trace,
    prompt: Sequence[int],
    response: Sequence[int],
    mask: Sequence[int],
    logprobs: Sequence[float],
    text: list[str],
) -> list[dict[str, Any]]:
    """One entry per token of prompt + response. `source`: prompt, context or sampled."""
    out: list[dict[str, Any]] = [
        {"id": i, "text": t, "source": "prompt", "mask": 0} for i, t in zip(prompt, text, strict=False)
    ]
    owner: list[Span | None] = [None] * len(response)
    for span in trace.spans:
        for place in range(span.start, min(span.start + span.length, len(response))):
            owner[place] = span
    for place, (token, shown) in enumerate(zip(response, text[len(prompt) :], strict=True)):
        span_of = owner[place]
        entry = {"id": token, "text": shown, "source": "sampled" if span_of else "context", "mask": int(mask[place])}
        if span_of is not None:
            version = [v.version for v in span_of.versions if v.start <= place - span_of.start]
            entry |= {
                "logprob": float(logprobs[place]),
                "version": version[-1] if version else "",
                "completion": span_of.completion,
                "drifted": not span_of.context_exact,
            }
        out.append(entry)
    return out


def as_numbers(ids: Sequence[int]) -> list[str]:
    """Ids shown as what they are, where there is no tokenizer that made them."""
    return [f"{i} " for i in ids]


async def session_tokens(
    bus: Bus, session: str, build: str, decode: Decode, tokenizer_hash: str
) -> list[dict[str, Any]]:
    """All traces of a session in a build, at most `MOST_TOKENS` tokens of each; decoded if this tokenizer made them.

    Raises Poison naming a message that can't be read, FromTheFuture for a newer version's.
    """
    blobs = Blobs(bus, segment_of(session))
    found = await bus.read(TRACES, [session_traces(build, task_of(session), session)])
    out = []
    for stored in sorted(found, key=lambda s: s.sequence):
        if not stored.subject.rpartition(".")[2].isdigit():
            continue
        trace = read_message(Trace, stored.body, stored.subject)
        columns = [
            unpack(c, await blobs.column(c)).tolist()[:MOST_TOKENS]
            for c in (trace.prompt_ids, trace.response_ids, trace.loss_mask, trace.logprobs)
        ]
        prompt, response, mask, logprobs = columns
        made_by = trace.provenance.tokenizer_hash
        ours = not (made_by and tokenizer_hash) or made_by == tokenizer_hash
        text = (decode if ours else as_numbers)([*prompt, *response])
        out.append(
            {
                "trace_id": trace.trace_id,
                "number": trace.number,
                "chain_class": trace.chain_class,
                "action_tokens": trace.action_tokens,
                "tokens": token_entries(trace, prompt, response, mask, logprobs, text),
            }
        )
    return out
