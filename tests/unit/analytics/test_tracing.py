"""The trace viewer's entries: one per token, with source, mask, log-prob, version and drift."""

from __future__ import annotations

from polar_analytics.tracing import token_entries
from polar_common.events import VersionSpan
from polar_common.packing import Column
from polar_common.traces import Provenance, Span, Trace

EMPTY = Column(type="i32", n=0, data="")


def trace(*spans: Span) -> Trace:
    return Trace(
        trace_id="t", run="r", build="live", task="s1-a", session="s1-a-0", attempt=1, number=0, rules="exact",
        rules_hash="h", status="complete", prompt_ids=EMPTY, response_ids=EMPTY, loss_mask=EMPTY, logprobs=EMPTY,
        spans=spans, action_tokens=3, session_traces=1, session_action_tokens=3, policy_seq_min=0, policy_seq_max=1,
        provenance=Provenance(code_version="x", log_first=1, log_last=2),
    )  # fmt: skip


def test_every_token_says_where_it_comes_from() -> None:
    spans = (
        Span(completion="a", start=0, length=2, versions=(VersionSpan(version="v1", start=0),)),
        Span(
            completion="b",
            start=3,
            length=2,
            context_exact=False,
            versions=(VersionSpan(version="v1", start=0), VersionSpan(version="v2", start=1)),
        ),
    )
    text = list("PQabxcd")
    found = token_entries(trace(*spans), [1, 2], [3, 4, 5, 6, 7], [1, 1, 0, 1, 0], [-1, -2, 0, -3, 0], text)
    assert [e["text"] for e in found] == text
    assert [e["source"] for e in found] == ["prompt"] * 2 + ["sampled"] * 2 + ["context"] + ["sampled"] * 2
    assert [e["mask"] for e in found] == [0, 0, 1, 1, 0, 1, 0]
    assert [e.get("version") for e in found[2:]] == ["v1", "v1", None, "v1", "v2"]
    assert [e.get("drifted") for e in found[2:]] == [False, False, None, True, True]
    assert [e.get("logprob") for e in found[2:]] == [-1, -2, None, -3, 0]
