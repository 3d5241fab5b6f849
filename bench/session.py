"""One long session as its stored messages: turns that continue each other, as the proxy would write them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
import orjson

from polar_common.blobs import Blobs
from polar_common.bus import Bus, Stored
from polar_common.events import (
    CompletionCaptured,
    EngineFacts,
    Event,
    HeadRef,
    MessagesRef,
    PromptRef,
    SamplingUsed,
    SessionArtifacts,
    SessionExited,
    SessionInitialized,
    SessionSealed,
    VersionSpan,
    encode,
)
from polar_common.ids import FIRST_SEGMENT, session_id, task_id
from polar_common.packing import BlobRef, Column, ColumnType, pack

__all__ = ["LongSession", "long_session"]

END = 151_645
VOCABULARY = 151_936
_ENGINE = EngineFacts(
    name="vllm", replica="r0", model="policy", weights_hash="w" * 64, dtype="bfloat16", tokenizer_hash="t" * 64,
    template_hash="c" * 64, renderer="qwen", renderer_version="1", vocab_size=VOCABULARY, end_of_turn=(END,),
)  # fmt: skip
_HEAD = {"tools": [{"name": "bash"}]}
_SAMPLING = SamplingUsed(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=4096)


@dataclass
class LongSession:
    """Messages in order, the blobs they need, and the size of what they hold."""

    session: str
    events: list[Event] = field(default_factory=list)
    blobs: dict[str, tuple[BlobRef, bytes]] = field(default_factory=dict)
    tokens: int = 0

    def stored(self) -> list[Stored]:
        return [
            Stored(e.subject(), n, datetime.fromtimestamp(1_700_000_000 + n, UTC), written(e), "")
            for n, e in enumerate(self.events, 1)
        ]

    def bodies(self) -> dict[str, bytes]:
        return {key: body for key, (_, body) in self.blobs.items()}

    async def publish(self, bus: Bus) -> None:
        store = Blobs(bus, FIRST_SEGMENT)
        for ref, body in self.blobs.values():
            await store.put_as(ref, body)
        for event in self.events:
            await bus.once_raw(event.subject(), written(event), event.body_hash())


def written(event: Event) -> bytes:
    """The body as its producer writes it: the proxy leaves defaults out of captured completions."""
    if not isinstance(event, CompletionCaptured):
        return encode(event)
    body = event.model_dump(mode="json", exclude_defaults=True)
    return orjson.dumps({"kind": event.kind, "schema_version": event.schema_version} | body)


def long_session(turns: int, tokens: int, *, index: int = 0, task: str = "bench", seed: int = 0) -> LongSession:
    """`turns` calls whose last context holds about `tokens` ids: a first prompt, then samples and tool results."""
    rng = np.random.default_rng([seed, index])
    task = task_id(FIRST_SEGMENT, "bench", task)
    made = LongSession(session_id(task, index))
    common = {"run": "bench", "task": task, "session": made.session, "attempt": 1}
    first = min(2_000, tokens // 2)
    each = max(8, (tokens - first) // turns)
    start = {"runtime": "local", "isolation": "none", "harness": "pi", "harness_version": "1"}
    made.events.append(SessionInitialized(**common, **start, harness_config_hash="h", init_s=1.0))
    new = rng.integers(0, VOCABULARY, first, dtype=np.int32)
    names: list[str] = []
    for turn in range(turns):
        sampled = rng.integers(0, VOCABULARY, each // 2, dtype=np.int32)
        sampled[-1] = END
        names.append(f"{index:04d}{turn:028d}")
        made.events.append(_call(made, common, names, new, sampled))
        made.tokens += len(new) + len(sampled)
        new = rng.integers(0, VOCABULARY, each - each // 2, dtype=np.int32)
    made.events += [
        SessionSealed(**common, reason="exited"),
        SessionExited(**common, exit_code=0),
        SessionArtifacts(**common),
    ]
    return made


def _column(made: LongSession, values: np.ndarray, kind: ColumnType) -> Column:
    column, blob = pack(values, kind)
    if blob is not None:
        made.blobs[blob[0].sha256] = blob
    return column


def _call(
    made: LongSession, common: dict[str, str | int], names: list[str], new: np.ndarray, sampled: np.ndarray
) -> CompletionCaptured:
    """The newest of `names`. Every 32nd refers to all before it at once, the others to the last."""
    turn, shared = len(names) - 1, made.tokens
    before = names[:-1]
    via = tuple(before) if turn and turn % 32 == 0 else ()
    told: tuple[dict[str, object], ...] = ({"role": "user", "parts": [{"type": "text", "text": "Make it pass."}]},)
    if turn:
        text = {"type": "text", "text": "x" * (4 * len(new))}
        told = ({"echo": before[-1]}, {"role": "tool", "parts": [text], "call_id": f"call_{turn}"})
    logprobs = -np.random.default_rng(turn).exponential(0.4, len(sampled)).astype(np.float32)
    return CompletionCaptured(
        **common,  # type: ignore[arg-type]
        completion=names[-1],
        dialect="openai_chat",
        stream=True,
        model="policy",
        request_hash=f"{turn:064d}",
        head=HeadRef(hash="h" * 64, at=names[0])
        if turn
        else HeadRef(hash="h" * 64, body={"tools": [{"name": "bash"}]}),
        messages=MessagesRef(base=before[-1] if turn else "", shared=max(0, 2 * turn - 1), new=told),
        prompt=PromptRef(
            base=before[-1] if turn and not via else "",
            via=via,
            shared=shared,
            new=_column(made, new, "i32"),
            length=shared + len(new),
        ),
        sampled=_column(made, sampled, "i32"),
        logprobs=_column(made, logprobs, "f32"),
        finish="tool_calls",
        closed=True,
        parent=before[-1] if turn else "",
        parent_by="minted" if turn else "none",
        chain_class="continued" if turn else "root",
        sampling=_SAMPLING,
        sampling_asked={"temperature": 0.7, "max_tokens": 16_384},
        versions=(VersionSpan(version="v3", start=0),),
        policy_seq=3,
        cached_tokens=shared,
        engine=_ENGINE,
        started=1_700_000_000.0 + turn,
        duration_s=0.5,
        usage={"prompt_tokens": shared + len(new), "completion_tokens": len(sampled)},
    )
