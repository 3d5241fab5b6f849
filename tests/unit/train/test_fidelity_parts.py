"""Scope, sums and where weights are found: the parts of the fidelity check that need neither a log nor torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_common.events import PolicyPublished, VersionSpan
from polar_common.traces import Span
from polar_train.fidelity import OUTSIDE, TOLERANCE, Place, Policies, Report, Stats, Worst
from polar_train.fidelity.policies import known_models, weights_hash
from polar_train.fidelity.scope import Stretch, Want, context_label, outside, stretches, want_of


def span(**facts: Any) -> Span:
    return Span.model_validate({"completion": "c", "start": 4, "length": 10, **facts})


def versions(*starts: tuple[str, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=v, start=s) for v, s in starts)


@pytest.mark.parametrize(
    ("facts", "dtype", "reason"),
    [
        ({}, "float32", ""),
        ({"temperature": 0.7}, "float32", ""),
        ({"versions": versions(("a", 0), ("a", 5))}, "float32", ""),
        ({"context_exact": False, "drift_class": "template"}, "float32", ""),
        ({"versions": versions(("a", 0), ("b", 5))}, "float32", "several_versions"),
        ({"kv_mixed": True}, "float32", "kv_mixed"),
        ({}, "bfloat16", "dtype"),
        ({}, "", "dtype_unknown"),
        ({"temperature": 0.0}, "float32", "greedy"),
        ({"logprob_kind": "raw"}, "float32", "raw_logprobs"),
        ({"top_p": 0.95}, "float32", "truncated_sampling"),
        ({"top_k": 20}, "float32", "truncated_sampling"),
        ({"min_p": 0.1}, "float32", "truncated_sampling"),
        ({"constrained": True}, "float32", "constrained"),
        ({"constrained": True, "top_k": 3, "kv_mixed": True}, "float32", "kv_mixed"),
    ],
)
def test_what_the_bar_covers(facts: dict[str, Any], dtype: str, reason: str) -> None:
    assert outside(span(**facts), dtype) == reason
    assert reason == "" or reason in OUTSIDE


def test_contexts_are_exact_or_drifted_by_class() -> None:
    assert context_label(span()) == "exact"
    assert context_label(span(context_exact=False, drift_class="edited")) == "drifted/edited"
    assert context_label(span(context_exact=False)) == "drifted/unknown"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((), [Stretch("", 0, 10)]),
        ((("a", 0),), [Stretch("a", 0, 10)]),
        ((("a", 0), ("b", 4)), [Stretch("a", 0, 4), Stretch("b", 4, 10)]),
        ((("b", 4), ("a", 0)), [Stretch("a", 0, 4), Stretch("b", 4, 10)]),
        ((("a", 3),), [Stretch("a", 0, 3), Stretch("a", 3, 10)]),
        ((("a", 0), ("b", 10)), [Stretch("a", 0, 10)]),
    ],
)
def test_a_span_by_version(given: tuple[tuple[str, int], ...], found: list[Stretch]) -> None:
    assert stretches(span(versions=versions(*given))) == found


def test_what_is_recomputed_follows_what_was_recorded() -> None:
    part = Stretch("a", 2, 5)
    cut = span(temperature=0.6, top_k=20, top_p=0.9, min_p=0.05)
    assert want_of(cut, part, 100) == Want(102, 105, 0.6, 0.9, 20, 0.05) and want_of(cut, part, 100).truncated
    assert want_of(span(temperature=0.6, logprob_kind="raw"), part, 0) == Want(2, 5)
    assert want_of(span(temperature=0.0, top_k=5), part, 0) == Want(2, 5) and not Want(2, 5).truncated


def test_sums_over_spans() -> None:
    sums = Stats()
    sums.add(np.array([1e-5, -9e-5]))
    sums.add(np.array([0.0, math.log(2)]))
    assert (sums.spans, sums.tokens, sums.within) == (2, 4, 1) and sums.share == 0.5
    assert sums.max_abs == pytest.approx(math.log(2)) and sums.mean_abs == pytest.approx((1e-4 + math.log(2)) / 4)
    assert sums.ratio_max == pytest.approx(2.0) and sums.ratio_min == pytest.approx(math.exp(-8e-5))
    assert sums.ratio_mean == pytest.approx((2 + math.exp(-8e-5)) / 2)
    lost = Stats()
    lost.add(np.array([0.0, -math.inf, 2e-5]))
    assert lost.within == 0 and lost.outside_kept == 1 and lost.max_abs == pytest.approx(2e-5)
    assert lost.ratio_min == lost.ratio_max == 0.0
    sums.merge(lost)
    assert (sums.spans, sums.tokens, sums.outside_kept, sums.ratio_min) == (3, 7, 1, 0.0)
    assert Stats().json()["share"] is None and Stats().json()["max_abs"] is None


def test_the_border_of_the_tolerance() -> None:
    sums = Stats()
    for difference in (TOLERANCE, TOLERANCE * 1.001, -TOLERANCE):
        sums.add(np.array([difference]))
    assert sums.within == 2


def place(difference: float, context: str, at: int) -> Worst:
    none = np.zeros(0, dtype=np.int32)
    return Worst(difference, 0.0, difference, "s", 0, "c", at, at, 1, none, none, context, "")


def test_the_worst_places_are_kept_for_each_context() -> None:
    report = Report("live", keep=2)
    assert report.threshold("exact") == 0.0
    for at, difference in enumerate([0.1, -0.5, 0.3, 0.2]):
        report.consider(place(difference, "exact", at))
    report.consider(place(9.0, "drifted/edited", 7))
    assert [w.place for w in report.worst] == [7, 1, 2]
    assert report.threshold("exact") == pytest.approx(0.3)
    nobody = Report("live", keep=0)
    nobody.consider(place(0.1, "exact", 0))
    assert nobody.worst == [] and nobody.threshold("exact") == math.inf


def test_a_report_is_split_by_scope_and_context() -> None:
    report = Report("live")
    good, bad = np.array([1e-6]), np.array([0.5])
    for scope, context, difference in (
        ("", "exact", good), ("", "drifted/edited", bad), ("kv_mixed", "exact", bad), ("", "exact", good),
    ):  # fmt: skip
        report.add(scope, context, difference)
    assert report.in_scope.spans == 3 and report.in_scope.within == 2 and not report.faultless
    assert report.contexts == ["drifted/edited", "exact"] and report.reasons == ["kv_mixed"]
    assert report.context("exact").spans == 3 and report.scope("kv_mixed").max_abs == 0.5
    found = report.json()
    assert [(r["scope"], r["context"], r["spans"]) for r in found["rows"]] == [
        ("in scope", "drifted/edited", 1), ("in scope", "exact", 2), ("kv_mixed", "exact", 1),
    ]  # fmt: skip
    only = Report("live")
    only.add("", "exact", good)
    assert only.faultless
    only.unreadable["damaged"] += 1
    assert not only.faultless


def model(directory: Path, content: bytes = b"w") -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(content)
    return directory


def publication(version: str, weights: str, digest: str = "") -> PolicyPublished:
    return PolicyPublished(
        segment="s1", version=version, policy_seq=1, model="m", weights=weights, weights_hash=digest
    )  # fmt: skip


def test_where_weights_are_found(tmp_path: Path) -> None:
    base, step = model(tmp_path / "base"), model(tmp_path / "step 1", b"x")
    events = [
        publication("plain", str(step)),
        publication("uri", step.as_uri(), weights_hash(step)),
        publication("changed", str(step), weights_hash(base)),
        publication("gone", str(tmp_path / "nowhere")),
        publication("remote", "s3://b/k"),
    ]
    policies = Policies({e.version: e for e in events}, base)
    expected = {
        "plain": Place(step), "uri": Place(step), "changed": Place(None, "weights_changed"),
        "gone": Place(None, "weights_gone"), "remote": Place(None, "weights_remote"), "v0": Place(base),
        "": Place(base), "step-9": Place(None, "weights_unknown"),
    }  # fmt: skip
    assert {version: policies.find(version) for version in expected} == expected == policies.used
    assert policies.find("v0", weights_hash(base)) == Place(base)
    assert policies.find("v0", "f" * 64) == Place(None, "weights_changed")


def test_the_first_weights_are_found_by_hash(tmp_path: Path) -> None:
    base = model(tmp_path / "a")
    (base / "polar_model.json").write_text(f'{{"weights_sha256": "{weights_hash(base)}"}}')
    other = model(tmp_path / "b")
    (other / "polar_model.json").write_text('{"weights_sha256": "stale"}')
    (tmp_path / "c").mkdir()
    known = known_models([base, other, tmp_path / "c", tmp_path / "d"])
    assert known == {weights_hash(base): base, "stale": other}
    policies = Policies({}, None, known)
    assert policies.find("v0", weights_hash(base)).path == base
    assert policies.find("v0", "stale").reason == "weights_gone"
    assert policies.find("v0").reason == "weights_unknown"
