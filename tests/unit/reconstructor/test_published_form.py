"""What is published equals the models that trainers read, hash for hash, and is the same in every process."""

from __future__ import annotations

import subprocess
import sys
from typing import cast

import numpy as np
import pytest
from reconstruction_kit import built
from tests.scripted_sessions import Script

from polar_common.packing import unpack
from polar_common.traces import Span, Trace, trace_hash
from polar_reconstructor.build import Built
from polar_reconstructor.publish import outgoing

E = 99


def script() -> Script:
    made = Script().started()
    made.call("c1", [1], [10, E], versions=[("v3", 0), ("v4", 1)], policy_seq=3, sampling={"temperature": 0.7})
    made.call("c2", [1, 10, E, 5], [20, E], parent="c1", additions=("kept_thinking",), native_equal=False, kv_salt="s")
    made.call("c3", [1, 10, E, 6], [30, E], parent="c1", policy_seq=5)
    made.call("big", list(range(1, 9000)), [7, E], policy_seq=4)
    return made.ended()


def messages(made: Built) -> list[Trace]:
    return [Trace.model_validate_json(body) for _, body, _ in outgoing(made, "live").traces]


@pytest.mark.parametrize("rules", ["exact", "per_request", "prefix_merging", "tree"])
def test_bodies_are_the_models_and_ids_are_their_hashes(rules: str) -> None:
    made = built(script(), rules)
    out = outgoing(made, "live")
    blobs = {ref.sha256: body for ref, body in out.blobs}
    found = messages(made)
    assert len(found) == len(made.traces) > 0
    for trace, own in zip(found, made.traces, strict=True):
        columns = [
            unpack(c, blobs[c.blob.sha256] if c.blob else None)
            for c in (trace.prompt_ids, trace.response_ids, trace.loss_mask, trace.logprobs)
        ]
        assert trace.trace_id == own.trace_id
        assert trace.trace_id == trace_hash(*columns, trace.spans, trace.rules_hash)  # type: ignore[arg-type]
        assert trace.action_tokens == int(columns[2].sum())
        assert trace.session_traces == len(found)
        assert trace.session_action_tokens == sum(t.action_tokens for t in found)
        for span in own.draft.spans:
            assert Span.model_validate(span).model_dump(mode="json") == span
    assert out.manifest.traces == tuple(t.trace_id for t in found)
    assert out.fact.manifest_hash == out.manifest.hash()


def test_version_spans_and_policy_ages_reach_the_trace() -> None:
    """T28: the oldest version counts for staleness, the spans tell where weights changed."""
    first = messages(built(script()))[0]
    assert [(v.version, v.start) for v in first.spans[0].versions] == [("v3", 0), ("v4", 1)]
    assert (first.policy_seq_min, first.policy_seq_max) == (0, 3)
    assert first.spans[0].temperature == 0.7 and first.spans[1].additions == ("kept_thinking",)
    second = messages(built(script()))[1]
    assert (second.policy_seq_min, second.policy_seq_max) == (5, 5)


def test_provenance_tells_harness_engine_and_log_range() -> None:
    trace = messages(built(script()))[0]
    told = trace.provenance
    assert (told.harness, told.engine, told.model, told.logprob_kind) == ("command", "scripted", "tiny", "processed")
    assert (told.log_first, told.log_last) == (2, 6)


def test_the_same_log_gives_the_same_bytes_in_another_process() -> None:
    """Another hash seed orders sets otherwise; nothing published may depend on it."""
    code = (
        "import sys; sys.path[:0] = ['tests/unit/reconstructor', '.'];"
        "from test_published_form import script, built, outgoing; import hashlib;"
        "out = [outgoing(built(script(), r), 'live') for r in ('exact', 'prefix_merging', 'tree', 'per_request')];"
        "text = repr([(o.traces, o.manifest.hash()) for o in out]); print(hashlib.sha256(text.encode()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2", "77")
    }
    assert len(found) == 1 and len(found.pop()) == 65


def test_ids_cover_ids_masks_log_probs_spans_and_rules() -> None:
    def one(**facts: object) -> str:
        return built(Script().call("c1", [1], [10, E], **facts).ended()).traces[0].trace_id  # type: ignore[arg-type]

    base = one()
    assert base == one()
    others = [
        one(logprobs=[-0.5, -0.502]),
        one(constrained=True, logprobs=[-0.5, 0.0]),
        one(policy_seq=1),
        one(kv_mixed=True),
        built(Script().call("c1", [1], [11, E]).ended()).traces[0].trace_id,
        built(Script().call("c1", [2], [10, E]).ended()).traces[0].trace_id,
        built(Script().call("c1", [1], [10, E]).ended(), side="train").traces[0].trace_id,
    ]
    assert len({base, *others}) == 8


def test_arrays_are_those_of_the_contract() -> None:
    draft = built(script()).traces[0].draft
    kinds = [a.dtype for a in (draft.prompt, draft.response, draft.mask, draft.logprobs)]
    assert kinds == [np.dtype("<i4"), np.dtype("<i4"), np.dtype("u1"), np.dtype("<f4")]
    assert cast(int, draft.mask.max()) == 1
