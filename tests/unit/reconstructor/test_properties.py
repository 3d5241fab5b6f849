"""Random trees of calls: conservation, exactness, independence of arrival order, idempotence; and trees walked back."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reconstruction_kit import built
from tests.scripted_sessions import Script

from polar_reconstructor import tree
from polar_reconstructor.build import Built, name_trace
from polar_reconstructor.rules import BUILT_IN

E = 99
MANY = settings(max_examples=150, deadline=None)


@dataclass
class Call:
    name: str
    prompt: list[int]
    sampled: list[int]
    facts: dict[str, Any]
    cut: bool = False


def tree_of_calls(seed: int, size: int) -> list[Call]:
    """Calls that go on from earlier ones (exactly, or with a drifted or edited turn), retries, roots, cut calls; some
    begin a sub-agent, in their parent's context or in one of its own.
    """
    rng = random.Random(seed)
    calls: list[Call] = []
    for n in range(size):
        sampled = [rng.randrange(10, 90) for _ in range(rng.randrange(1, 4))] + [E] * (rng.random() < 0.8)
        facts: dict[str, Any] = {"at": float(n), "took": rng.choice([0.1, 3.0]), "policy_seq": rng.randrange(3)}
        whole = [c for c in calls if not c.cut]
        kind = rng.random()
        if not whole or kind < 0.15:
            prompt = [rng.randrange(10) for _ in range(rng.randrange(1, 4))]
            facts["tools"] = rng.random() < 0.7
        elif kind < 0.25:
            again = rng.choice(whole)
            prompt, facts["request_hash"] = again.prompt, f"request of {again.name}"
            facts["tools"] = again.facts.get("tools", True)
            facts |= agent_of(again)
        else:
            parent = rng.choice(whole)
            shown = list(parent.sampled)
            if rng.random() < 0.25:
                shown[rng.randrange(len(shown))] = rng.randrange(10, 90)
            close = [] if shown[-1] == E else [E]
            prompt = parent.prompt + shown + close + [rng.randrange(10) for _ in range(rng.randrange(1, 3))]
            if rng.random() < 0.6:
                facts["parent"] = parent.name
            facts["context"], facts["chain_class"] = "native", "native"
            facts |= agent_of(parent)
        if rng.random() < 0.12:
            facts["agent"], facts["parent_agent"] = f"x{n}", facts.get("agent", "main")
        if rng.random() < 0.1:
            facts["untrainable"] = "greedy"
        calls.append(Call(f"c{n}", prompt, sampled, facts, rng.random() < 0.1))
    return calls


def agent_of(call: Call) -> dict[str, Any]:
    return {k: v for k, v in call.facts.items() if k in ("agent", "parent_agent")}


def script_of(calls: list[Call]) -> Script:
    script = Script().started()
    for c in calls:
        if c.cut:
            script.cut(c.name, request_hash=c.facts.get("request_hash", f"request of {c.name}"))
        else:
            script.call(c.name, c.prompt, c.sampled, **c.facts)
    return script.ended()


def assert_conserved(made: Built, calls: list[Call]) -> None:
    spans = Counter(s["completion"] for t in made.traces for s in t.draft.spans if s["trained"])
    assert set(spans) | set(made.excluded) == {c.name for c in calls}
    assert not set(spans) & set(made.excluded)
    assert set(spans.values()) <= {1}
    for s in (s for t in made.traces for s in t.draft.spans if not s["trained"]):
        assert s["reason"] == made.excluded.get(s["completion"], s["reason"])
        assert (s["reason"] in ("sampled_elsewhere", "other_policy")) == (s["completion"] in spans)


def assert_well_formed(made: Built, calls: list[Call]) -> None:
    by_name = {c.name: c for c in calls}
    for t in made.traces:
        d = t.draft
        whole = d.prompt.tolist() + d.response.tolist()
        assert len(d.response) == len(d.mask) == len(d.logprobs)
        assert not d.logprobs[d.mask == 0].any()
        expected = np.zeros(len(d.response), dtype=np.uint8)
        causes: dict[int, str] = {}
        for s in d.spans:
            call, at = by_name[s["completion"]], len(d.prompt) + s["start"]
            assert whole[at : at + s["length"]] == call.sampled
            assert s["context_exact"] == (whole[:at] == call.prompt)
            if not s["context_exact"]:
                first = next(
                    (i for i, (a, b) in enumerate(zip(whole[:at], call.prompt, strict=False)) if a != b),
                    min(at, len(call.prompt)),
                )
                assert s["drift_at"] == first and s["drift_class"]
                assert causes.setdefault(first, s["drift_class"]) == s["drift_class"]
            if s["trained"]:
                expected[s["start"] : s["start"] + s["length"]] = 1
        assert (d.mask == expected).all()
        assert d.spans[-1]["trained"]
        assert len({by_name[s["completion"]].facts.get("agent", "main") for s in d.spans if s["trained"]}) == 1


@MANY
@given(st.integers(0, 1 << 30), st.integers(1, 24), st.sampled_from(sorted(BUILT_IN)))
def test_conservation_and_labels_hold_for_every_rule(seed: int, size: int, rules: str) -> None:
    calls = tree_of_calls(seed, size)
    made = built(script_of(calls), rules)
    assert_conserved(made, calls)
    if rules != "tree":
        assert_well_formed(made, calls)
    if rules in ("exact", "per_request"):
        assert made.exact_spans == made.spans


@MANY
@given(
    st.integers(0, 1 << 30),
    st.integers(1, 20),
    st.fixed_dictionaries(
        {
            "rule": st.sampled_from(["exact", "prefix_merging", "per_request"]),
            "max_trace_tokens": st.sampled_from([0, 6, 12, 25]),
            "min_action_tokens": st.sampled_from([1, 3]),
            "side": st.sampled_from(["exclude", "train"]),
            "superseded": st.sampled_from(["exclude", "train"]),
            "unused_parallel": st.sampled_from(["exclude", "train"]),
            "mixed_policy": st.sampled_from(["keep", "split", "mask"]),
        }
    ),
)
def test_conservation_holds_under_all_options(seed: int, size: int, options: dict[str, Any]) -> None:
    calls = tree_of_calls(seed, size)
    made = built(script_of(calls), **options)
    assert_conserved(made, calls)
    assert_well_formed(made, calls)
    bound = options["max_trace_tokens"]
    for t in made.traces:
        assert not bound or len(t.draft.prompt) + len(t.draft.response) <= bound
        assert t.draft.action_tokens >= options["min_action_tokens"]
        if options["mixed_policy"] != "keep":
            assert len({c.policy_seq for c in t.draft.trained}) == 1


def chains(made: Built) -> set[tuple[int, ...]]:
    return {tuple(t.draft.prompt.tolist() + t.draft.response.tolist()) for t in made.traces}


@MANY
@given(st.integers(0, 1 << 30), st.integers(1, 14), st.randoms(use_true_random=False))
def test_chains_do_not_depend_on_arrival_order(seed: int, size: int, shuffler: random.Random) -> None:
    """Without siblings (whose table speaks of time), any order of the same calls gives the same sequences."""
    calls, seen = [], set()
    for c in tree_of_calls(seed, size):
        key = tuple(c.prompt)
        if c.cut or key in seen:
            continue
        seen.add(key)
        c.facts.pop("request_hash", None)
        c.facts["tools"] = True
        calls.append(c)
    other = list(calls)
    shuffler.shuffle(other)
    one, two = built(script_of(calls)), built(script_of(other))
    assert chains(one) == chains(two)
    assert one.excluded == two.excluded
    assert sum(t.draft.action_tokens for t in one.traces) == sum(t.draft.action_tokens for t in two.traces)


@MANY
@given(st.integers(0, 1 << 30), st.integers(1, 16), st.sampled_from(sorted(BUILT_IN)))
def test_building_again_gives_the_same_ids(seed: int, size: int, rules: str) -> None:
    calls = tree_of_calls(seed, size)
    first, second = built(script_of(calls), rules), built(script_of(calls), rules)
    assert [t.trace_id for t in first.traces] == [t.trace_id for t in second.traces]


@MANY
@given(st.integers(0, 1 << 30), st.integers(1, 24))
def test_references_and_whole_prompts_mean_the_same(seed: int, size: int) -> None:
    """Prompts stored in full, or as what they share with the context of any earlier call."""
    rng = random.Random(seed)
    calls = [c for c in tree_of_calls(seed, size) if not c.cut]
    whole, shared = Script().started(), Script().started()
    for n, c in enumerate(calls):
        whole.call(c.name, c.prompt, c.sampled, **c.facts)
        refs: dict[str, Any] = {}
        if n and rng.random() < 0.9:
            base = rng.choice(calls[:n])
            context = base.prompt + base.sampled
            common = next((i for i, (a, b) in enumerate(zip(context, c.prompt, strict=False)) if a != b), None)
            refs = {"base": base.name, "shared": min(len(context), len(c.prompt)) if common is None else common}
        shared.call(c.name, c.prompt, c.sampled, **c.facts, **refs)
    for rules in ("exact", "prefix_merging"):
        one, two = built(whole.ended() if rules == "exact" else whole, rules), None
        two = built(shared.ended() if rules == "exact" else shared, rules)
        assert [t.trace_id for t in one.traces] == [t.trace_id for t in two.traces]
        assert one.excluded == two.excluded


@MANY
@given(
    st.integers(0, 1 << 30),
    st.integers(1, 24),
    st.fixed_dictionaries(
        {
            "max_trace_tokens": st.sampled_from([0, 15]),
            "min_action_tokens": st.sampled_from([1, 3]),
            "mixed_policy": st.sampled_from(["keep", "mask"]),
        }
    ),
)
def test_walks_to_the_leaves_of_trees_are_the_exact_traces(seed: int, size: int, options: dict[str, Any]) -> None:
    """Each node names a leaf as its owner, and no leaf is without nodes of its own."""
    script = script_of(tree_of_calls(seed, size))
    exact, nodes = built(script, "exact", **options), built(script, "tree", **options)
    groups: list[list[tuple[Any, Any]]] = []
    for t in nodes.traces:
        assert t.place is not None
        if t.place["parent"] is None:
            groups.append([])
        groups[-1].append((t.draft, t.place))
    walks = [tree.walk(members, leaf) for members in groups for leaf in {place["owner"] for _, place in members}]
    assert sorted(name_trace(d, "r") for d in walks) == sorted(name_trace(t.draft, "r") for t in exact.traces)
    assert nodes.excluded == exact.excluded
    stored = sum(len(t.draft.prompt) + len(t.draft.response) for t in nodes.traces)
    assert stored <= sum(len(t.draft.prompt) + len(t.draft.response) for t in exact.traces)


def test_a_shared_prefix_is_stored_once_in_a_tree() -> None:
    script = Script().call("c1", [1, 2], [10, E])
    script.call("c2", [1, 2, 10, E, 5], [20, E], parent="c1").call("c3", [1, 2, 10, E, 6], [30, E], parent="c1").ended()
    made = built(script, "tree")
    places = [t.place for t in made.traces]
    assert [(p["node"], p["parent"], p["position_start"], p["owner"]) for p in places if p] == [
        (0, None, 0, 1),
        (1, 0, 4, 1),
        (2, 0, 4, 2),
    ]
    assert [t.draft.response.tolist() for t in made.traces] == [[10, E], [5, 20, E], [6, 30, E]]
    assert [t.draft.action_tokens for t in made.traces] == [2, 2, 2]


def test_a_node_of_context_alone_belongs_to_a_leaf_and_ends_nothing() -> None:
    script = Script().call("c1", [1, 2], [10, E], untrainable="greedy", closed=True, finish="length")
    child = {"agent": "x1", "parent_agent": "main", "agent_role": "explore"}
    script.call("c2", [1, 2, 10, E, 5], [20, E], parent="c1", **child)
    script.call("c3", [1, 2, 10, E, 6], [30], parent="c1", closed=False).ended()
    made = built(script, "tree")
    assert [t.place["owner"] for t in made.traces if t.place] == [1, 1, 2]
    assert [t.status for t in made.traces] == ["complete", "complete", "truncated"]
    assert [t.draft.role for t in made.traces] == ["main", "explore", "main"]


@pytest.mark.parametrize("turns", [1, 2, 40])
def test_long_linear_sessions_are_one_trace(turns: int) -> None:
    script, context = Script(), [1, 2, 3]
    for n in range(turns):
        script.call(f"c{n}", context, [10 + n % 50, E], parent=f"c{n - 1}" if n else "")
        context = [*context, 10 + n % 50, E, 5]
    made = built(script.ended())
    assert len(made.traces) == 1 and made.traces[0].draft.action_tokens == 2 * turns
