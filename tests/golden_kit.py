"""Sessions of real agent CLIs as `tests/golden/<cli>-<variant>.json` holds them, and the traces that they have to give.

A file has the log's facts of one session with names and times made plain: calls `c1`, `c2`, … with their prompts by
reference, sampled ids and log-probs. What a harness said is shortened (a few ids in place of the middle of each long
message), what the model said is whole; how prompts hang together is as it was. `tests/golden/capture.py` writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson
from tests.scripted_sessions import stored

from polar_common.bus import Stored
from polar_common.events import (
    CompletionAborted,
    CompletionCaptured,
    CompletionUndelivered,
    Event,
    SessionArtifacts,
    SessionExited,
    SessionInitialized,
    SessionSealed,
)
from polar_common.packing import pack
from polar_reconstructor.build import Built, build_session, prepare
from polar_reconstructor.domain import select
from polar_reconstructor.rules import BUILT_IN

__all__ = ["FOLDER", "Golden", "golden_files", "told"]

FOLDER = Path(__file__).parent / "golden"
TASK = "s1-abcdefghij0123456789"
_COMMON: dict[str, Any] = {"run": "golden", "task": TASK, "session": f"{TASK}-0", "attempt": 1}
_KINDS: dict[str, type[Event]] = {
    "captured": CompletionCaptured, "aborted": CompletionAborted, "undelivered": CompletionUndelivered,
    "initialized": SessionInitialized, "sealed": SessionSealed, "exited": SessionExited, "artifacts": SessionArtifacts,
}  # fmt: skip


@dataclass(frozen=True)
class Golden:
    """One session. `facts`: its events' fields, in order; `expected`: rules → what `told` says of their build."""

    name: str
    cli: str
    version: str
    facts: list[dict[str, Any]]
    engine: dict[str, Any]
    expected: dict[str, Any]

    @classmethod
    def load(cls, path: Path) -> Golden:
        return cls(path.stem, **orjson.loads(path.read_bytes()))

    def stored(self) -> list[Stored]:
        """The session's messages, as the log has them."""
        return [stored(n, self._event(dict(fact))) for n, fact in enumerate(self.facts, 1)]

    def built(self, rules: str) -> Built:
        selection = select(_COMMON["session"], self.stored())
        assert selection is not None
        return build_session(prepare(selection), {}, BUILT_IN[rules])

    def _event(self, fact: dict[str, Any]) -> Event:
        kind = fact.pop("kind")
        for name, column in (("sampled", "i32"), ("logprobs", "f32")):
            if fact.get(name) is not None:
                fact[name] = pack(fact[name], column)[0]  # type: ignore[arg-type]
        if kind == "captured":
            prompt = fact["prompt"]
            fact["prompt"] = prompt | {"new": pack(prompt["new"], "i32")[0]}
            fact["engine"] = self.engine
        return _KINDS[kind].model_validate(_COMMON | fact)


def golden_files() -> list[Path]:
    return sorted(FOLDER.glob("*.json"))


def told(built: Built) -> dict[str, Any]:
    """What a build made of a session, in plain values: ids by trace, masks as runs, spans with their labels."""
    traces = []
    for trace in built.traces:
        draft = trace.draft
        traces.append(
            {
                "trace_id": trace.trace_id,
                "status": trace.status,
                "role": draft.role,
                "depth": trace.depth,
                "parent_call": trace.parent_call,
                "chain_class": draft.chain_class,
                "prompt": len(draft.prompt),
                "mask": [[int(value), len(list(run))] for value, run in groupby(draft.mask.tolist())],
                "spans": [
                    [
                        s["completion"],
                        s["start"],
                        s["length"],
                        s["trained"],
                        s["reason"],
                        s["context_exact"],
                        s["context_faithful"],
                        s["drift_class"],
                        s["drift_at"],
                    ]
                    for s in draft.spans
                ],
            }
        )
    return {"traces": traces, "excluded": built.excluded}
