"""The rule `exact`: what goes on a chain, who owns a shared span, and what becomes of the rest."""

from __future__ import annotations

import numpy as np
import pytest
from reconstruction_kit import built, ids, masks, spans, trained

from scripted_sessions import Script

E = 99


def test_the_hand_computed_reference() -> None:
    script = Script().call("c1", [1, 2, 3], [10, 11, E])
    script.call("c2", [1, 2, 3, 10, 11, E, 50, 51], [20, 21, E], parent="c1", chain_class="continued").ended()
    made = built(script)
    assert ids(made) == [([1, 2, 3], [10, 11, E, 50, 51, 20, 21, E])]
    assert masks(made) == ["11100111"]
    logprobs = made.traces[0].draft.logprobs
    assert logprobs[3] == logprobs[4] == 0.0
    np.testing.assert_allclose(logprobs[[0, 1, 2, 5, 6, 7]], [-0.5, -0.501, -0.502] * 2, rtol=1e-6)
    assert made.excluded == {}
    assert [s["context_exact"] for s in spans(made)] == [True, True]
    assert [(s["start"], s["length"]) for s in spans(made)] == [(0, 3), (5, 3)]


def test_a_raw_sample_that_differs_from_its_canonical_copy_is_not_merged() -> None:
    script = Script().call("c1", [1], [8, 9], closed=False)
    script.call("c2", [1, 7, E, 5], [6, E], parent="c1", chain_class="continued", context="native").ended()
    made = built(script)
    assert ids(made) == [([1], [8, 9]), ([1, 7, E, 5], [6, E])]
    assert all(s["context_exact"] for n in (0, 1) for s in spans(made, n))
    assert made.traces[1].draft.chain_class == "retokenised"


@pytest.mark.parametrize("recorded", [True, False])
def test_chains_are_found_with_and_without_recorded_parents(recorded: bool) -> None:
    """Three turns and a sub-agent in between: prefix of the last prompt is the whole of what came before."""
    parent = (lambda name: {"parent": name}) if recorded else (lambda name: {})
    script = Script().call("c1", [1, 2], [10, E])
    script.call("a1", [70, 71], [72, E], chain_class="subagent", agent="x1", agent_role="explore", parent_agent="main")
    script.call("c2", [1, 2, 10, E, 5], [20, E], **parent("c1"))
    script.call(
        "a2", [70, 71, 72, E, 6], [73, E], agent="x1", agent_role="explore", parent_agent="main", **parent("a1")
    )
    script.call("c3", [1, 2, 10, E, 5, 20, E, 6], [30, E], **parent("c2")).ended()
    made = built(script)
    assert trained(made) == [["c1", "c2", "c3"], ["a1", "a2"]]
    assert [t.draft.role for t in made.traces] == ["main", "explore"]
    assert made.traces[1].depth == 1 and made.traces[0].depth == 0


def test_arrival_order_does_not_change_the_chains() -> None:
    calls = {
        "c1": ([1], [10, E]),
        "c2": ([1, 10, E, 5], [20, E]),
        "c3": ([1, 10, E, 5, 20, E, 6], [30, E]),
        "d1": ([2], [40, E]),
        "d2": ([2, 40, E, 7], [50, E]),
    }
    results = set()
    for order in (["c1", "d1", "c2", "d2", "c3"], ["d2", "c3", "d1", "c2", "c1"], ["c2", "c1", "c3", "d1", "d2"]):
        script = Script()
        for name in order:
            script.call(name, *calls[name])
        made = built(script.ended())
        assert made.excluded == {}
        results.add(tuple(sorted(tuple(p + r) for p, r in ids(made))))
        assert sorted(masks(made)) == ["11011", "11011011"]
    assert len(results) == 1


def test_the_longest_exact_prefix_is_the_parent() -> None:
    script = Script().call("c1", [1], [10, E]).call("c2", [1, 10, E, 5], [20, E])
    script.call("c3", [1, 10, E, 5, 20, E, 6], [30, E]).ended()
    assert trained(built(script)) == [["c1", "c2", "c3"]]


def test_a_shared_span_is_trained_in_the_lowest_numbered_leaf() -> None:
    script = Script().call("c1", [1], [10, E])
    script.call("c2", [1, 10, E, 5], [20, E], parent="c1")
    script.call("c3", [1, 10, E, 6], [30, E], parent="c1").ended()
    made = built(script)
    assert trained(made) == [["c1", "c2"], ["c3"]]
    assert masks(made) == ["11011", "00011"]
    shared = spans(made, 1)[0]
    assert (shared["completion"], shared["trained"], shared["reason"]) == ("c1", False, "sampled_elsewhere")
    assert made.traces[1].draft.logprobs[:3].tolist() == [0.0, 0.0, 0.0]
    assert made.traces[1].draft.chain_class == "branch"


def test_a_sibling_that_shares_only_the_prompt_is_a_chain_of_its_own() -> None:
    """K."""
    script = Script().call("c1", [1, 2, 3], [10, 11, E])
    script.call("k", [1, 2, 3, 70, 71, E, 5], [72, E])
    script.call("c2", [1, 2, 3, 10, 11, E, 5], [20, E], parent="c1").ended()
    assert trained(built(script)) == [["c1", "c2"], ["k"]]


def test_a_close_that_the_proxy_wrote_is_context() -> None:
    """F, G: cut by length or a stop string; the close and the tail follow, mask 0."""
    script = Script().call("c1", [1], [10, 11], closed=False, finish="length")
    script.call("c2", [1, 10, 11, E, 5], [20, 21], parent="c1", closed=False, finish="stop_string")
    script.call("c3", [1, 10, 11, E, 5, 20, 21, E, 6], [30, E], parent="c2").ended()
    made = built(script)
    assert trained(made) == [["c1", "c2", "c3"]]
    assert masks(made) == ["1100110011"]


def test_a_prefill_is_context() -> None:
    """J: the prompt ends inside an assistant message."""
    script = Script().call("c1", [1, 40, 41], [10, E], prefill_tokens=2)
    script.call("c2", [1, 40, 41, 10, E, 5, 42], [20, E], parent="c1", prefill_tokens=1).ended()
    made = built(script)
    assert ids(made) == [([1, 40, 41], [10, E, 5, 42, 20, E])]
    assert masks(made) == ["110011"]


def test_generation_prompt_tokens_that_history_keeps_stay_one_trace() -> None:
    """C in exact mode: the empty think block [60, 61] belongs to the prompt and stays in the context."""
    script = Script().call("c1", [1, 60, 61], [10, E])
    script.call("c2", [1, 60, 61, 10, E, 5, 60, 61], [20, E], parent="c1").ended()
    assert masks(built(script)) == ["1100011"]


@pytest.mark.parametrize("rules", ["exact", "prefix_merging"])
@pytest.mark.parametrize("decoded", [True, False])
def test_generation_prompt_tokens_that_the_template_drops_are_class_template(decoded: bool, rules: str) -> None:
    """C in native mode; T03. c3's prompt differs in c1's turn, which is part of c2's prompt."""
    native = {"chain_class": "native", "context": "native"}
    script = Script().call("c1", [1, 60, 61], [10, E], **native)
    script.call("c2", [1, 10, E, 5, 60, 61], [20, E], parent="c1", **native)
    script.call("c3", [1, 10, E, 5, 20, E, 6, 60, 61], [30, E], parent="c2", **native).ended()
    text = {1: "u", 5: "v", 6: "w", 10: "x", 20: "y", 30: "z", 60: "<think>", 61: "</think>", E: ""}
    made = built(script, rules, decode=(lambda some: "".join(text[int(i)] for i in some)) if decoded else None)
    assert trained(made) == [["c1"], ["c2"], ["c3"]]
    assert made.excluded == {}
    assert [t.draft.chain_class for t in made.traces] == ["native", "template", "template"]


def test_another_tokenisation_in_an_earlier_turn_is_class_retokenised() -> None:
    """c2's prompt has c1's turn in other ids than the ids in which c3's shows it."""
    native = {"chain_class": "native", "context": "native"}
    script = Script().call("c2", [1, 11, 12, E, 5], [20, E], **native)
    script.call("c3", [1, 13, E, 5, 20, E, 6], [30, E], parent="c2", **native).ended()
    made = built(script)
    assert [t.draft.chain_class for t in made.traces] == ["native", "retokenised"]


def test_thinking_that_the_template_drops_gives_two_traces_of_class_template() -> None:
    """T02: both responses are trained once."""
    script = Script().call("c1", [1], [60, 12, 61, 10, E])
    script.call("c2", [1, 10, E, 5], [20, E], parent="c1", chain_class="native", context="native").ended()
    made = built(script)
    assert trained(made) == [["c1"], ["c2"]]
    assert made.traces[1].draft.chain_class == "template"


def test_two_tokenisations_of_one_text_are_class_retokenised() -> None:
    """T01, with a decoder."""
    text = {53122: " Pant", 316: "om", 393: " P", 30002: "antom", E: ""}
    script = Script().call("c1", [1], [53122, 316, E])
    script.call("c2", [1, 393, 30002, E, 5], [20, E], parent="c1", chain_class="native", context="native").ended()
    made = built(script, decode=lambda some: "".join(text[int(i)] for i in some))
    assert trained(made) == [["c1"], ["c2"]]
    assert made.traces[1].draft.chain_class == "retokenised"


def test_an_edited_turn_begins_a_chain() -> None:
    """D: what the model never saw isn't merged; what stands before the edit is shared context."""
    script = Script().call("c1", [1], [10, E]).call("c2", [1, 10, E, 5], [20, E], parent="c1")
    script.call("c3", [1, 10, E, 5, 70, E, 6], [30, E], chain_class="edited").ended()
    made = built(script)
    assert trained(made) == [["c1", "c2"], ["c3"]]
    assert made.traces[1].draft.chain_class == "edited"
    assert made.traces[1].draft.response.tolist() == [10, E, 5, 70, E, 6, 30, E]


def test_tokens_decide_against_a_recorded_parent() -> None:
    """T17: messages say parent, ids don't."""
    script = Script().call("c1", [1], [10, 11, E]).call("c2", [1, 11, E, 5], [20, E], parent="c1").ended()
    made = built(script)
    assert len(made.traces) == 2 and made.excluded == {}


def test_equal_contexts_make_an_ambiguous_parent_that_is_reported() -> None:
    script = Script().call("c1", [1], [10, E], at=1, request_hash="r")
    script.call("c2", [1], [10, E], at=5, request_hash="r")
    script.call("c3", [1, 10, E, 5], [20, E]).ended()
    made = built(script)
    assert trained(made) == [["c2", "c3"]]
    assert made.excluded == {"c1": "superseded_retry"}
    assert made.traces[0].draft.ambiguous and made.ambiguous == 1


def test_a_prompt_that_the_engine_changed_is_context_and_masked() -> None:
    """T10."""
    script = Script().call("c1", [1], [10, E], untrainable="engine_retokenised", context_exact=False)
    script.call("c2", [1, 10, E, 5], [20, E], parent="c1").ended()
    made = built(script)
    assert masks(made) == ["00011"]
    assert made.excluded == {"c1": "engine_retokenised"}
    assert spans(made)[0]["drift_class"] == "engine" and not spans(made)[0]["context_exact"]


def test_one_span_without_log_probs_is_untrainable_and_the_rest_lives() -> None:
    script = Script().call("c1", [1], [10, E])
    nan = [-0.5, float("nan")]
    script.call("c2", [1, 10, E, 5], [20, E], parent="c1", untrainable="invalid_logprobs", logprobs=nan)
    script.call("c3", [1, 10, E, 5, 20, E, 6], [30, E], parent="c2").ended()
    made = built(script)
    assert masks(made) == ["11000011"]
    assert made.excluded == {"c2": "invalid_logprobs"}
    assert np.isfinite(made.traces[0].draft.logprobs).all()


def test_forced_tokens_under_a_grammar_are_masked() -> None:
    script = Script().call("c1", [1], [10, 11, E], constrained=True, logprobs=[-0.7, 0.0, -0.1]).ended()
    made = built(script)
    assert masks(made) == ["101"]
    assert made.traces[0].draft.action_tokens == 2


def test_an_untrainable_leaf_ends_no_trace_and_owns_nothing() -> None:
    script = Script().call("c1", [1], [10, E])
    script.call("c2", [1, 10, E, 5], [20, E], parent="c1", untrainable="greedy").ended()
    made = built(script)
    assert ids(made) == [([1], [10, E])]
    assert made.excluded == {"c2": "greedy"}
