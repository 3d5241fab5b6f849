"""Is this request a retry (EXACT §3, DESIGN §5.4)? One pure function over what is known of earlier identical requests.

Identity is the request's hash: stream flags, cache and billing fields and metadata don't count. A retry is known by its
mark, or by the earlier caller having gone away; an identical request while the first caller listens is a new sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Decision", "Earlier", "decide"]

Phase = Literal["running", "committing", "captured", "aborted"]
State = Literal["pending", "delivered", "undelivered", "unknown"]


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier call with the same request hash. `gone`: its caller's connection is closed.

    `delivery` matters where it is captured: `pending` while its bytes are on their way. `extended`: a later call
    continued it, so its answer was received.
    """

    completion: str
    phase: Phase
    gone: bool = False
    delivery: State = "pending"
    extended: bool = False
    replays: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """`replay` the answer of `completion`, `resample` because an earlier try came to nothing, `wait` until
    `completion` is settled and decide again, or a `new` sample. `consumed`: the mark belonged to an earlier refusal."""

    action: Literal["replay", "resample", "wait", "new"]
    completion: str = ""
    consumed: bool = False


def decide(earlier: Sequence[Earlier], *, marked: bool, rejected: int = 0) -> Decision:
    """`earlier` by time; `rejected`: refusals of this request, and failures told, that no retry has answered."""
    for call in reversed(earlier):
        if call.phase == "captured" and not call.extended:
            if call.delivery == "undelivered" or (call.delivery == "pending" and call.gone):
                return Decision("replay", call.completion)
            if call.delivery == "unknown" and not call.replays:
                return Decision("replay", call.completion)
    for call in reversed(earlier):
        if call.phase == "committing" and call.gone:
            return Decision("wait", call.completion)
    if marked and rejected:
        return Decision("new", consumed=True)
    if marked:
        for call in reversed(earlier):
            if _lost(call):
                break
            if call.phase == "captured" and call.delivery != "pending" and not call.extended:
                return Decision("replay", call.completion)
    lost = [c for c in earlier if _lost(c)]
    return Decision("resample", lost[-1].completion) if lost else Decision("new")


def _lost(call: Earlier) -> bool:
    return call.phase == "aborted" or (call.phase == "running" and call.gone)
