"""The paper's rule: its hand-computed reference, labels, unsafe boundaries, and an independent statement of it."""

from __future__ import annotations

import itertools
import random
from copy import deepcopy

import pytest
from reconstruction_kit import built, ids, masks, spans, trained
from tests.scripted_sessions import Script

E = 99
TEXT = {8: "a", 9: "b", 7: "ab", 6: "c", 60: "<think>", 61: "</think>", 12: "hm", 10: "x", 70: "y", E: ""}


def decode(some: object) -> str:
    return "".join(TEXT[int(i)] for i in some)  # type: ignore[attr-defined]


def reference(parent: str = "c1", **facts: object) -> Script:
    script = Script().call("c1", [1], [8, 9], closed=False)
    return script.call("c2", [1, 7, E, 5], [6, E], parent=parent, context="native", chain_class="native").ended()


@pytest.mark.parametrize("parent", ["c1", ""])
def test_the_hand_computed_reference(parent: str) -> None:
    made = built(reference(parent), "prefix_merging", decode=decode)
    assert ids(made) == [([1], [8, 9, E, 5, 6, E])]
    assert masks(made) == ["110011"]
    first, second = spans(made)
    assert first["context_exact"] and first["drift_at"] is None
    assert not second["context_exact"]
    assert (second["drift_class"], second["drift_at"]) == ("retokenised", 1)
    assert (made.exact_spans, made.spans) == (1, 2)


def test_the_reference_under_exact_gives_two_traces() -> None:
    assert len(built(reference(), "exact").traces) == 2


def test_where_samples_are_canonical_everything_is_exact() -> None:
    script = Script().call("c1", [1, 2, 3], [10, 11, E])
    script.call("c2", [1, 2, 3, 10, 11, E, 50, 51], [20, 21, E], parent="c1").ended()
    made = built(script, "prefix_merging")
    assert ids(made) == [([1, 2, 3], [10, 11, E, 50, 51, 20, 21, E])]
    assert masks(made) == ["11100111"]
    assert all(s["context_exact"] for s in spans(made))


def test_drift_is_inherited_by_what_follows_and_named_by_its_cause() -> None:
    script = Script().call("c1", [1], [60, 12, 61, 10, E])
    script.call("c2", [1, 10, E, 5], [20, E], parent="c1", chain_class="native", context="native")
    script.call("c3", [1, 10, E, 5, 20, E, 6], [30, E], parent="c2", chain_class="native", context="native").ended()
    made = built(script, "prefix_merging")
    assert ids(made) == [([1], [60, 12, 61, 10, E, 5, 20, E, 6, 30, E])]
    assert [s["drift_class"] for s in spans(made)] == ["", "template", "template"]
    assert [s["drift_at"] for s in spans(made)] == [None, 1, 1]
    assert not spans(made)[2]["context_faithful"]


def test_the_first_difference_keeps_its_cause_and_an_edit_stays_unfaithful() -> None:
    native = {"chain_class": "native", "context": "native"}
    script = Script().call("c1", [1], [10, E])
    script.call("c2", [1, 70, E, 5], [8, 9, E], parent="c1", chain_class="edited", context="native")
    script.call("c3", [1, 70, E, 5, 7, E, 6], [30, E], parent="c2", **native)
    script.call("c4", [1, 70, E, 5, 7, E, 6, 30, E, 4], [40, E], parent="c3", **native).ended()
    made = built(script, "prefix_merging", decode=decode)
    assert [(s["drift_class"], s["drift_at"]) for s in spans(made)] == [("", None), *[("edited", 1)] * 3]
    assert [s["context_faithful"] for s in spans(made)] == [True, False, False, False]
    script = Script().call("c1", [1], [8, 9, E])
    script.call("c2", [1, 7, E, 5], [60, 12, 61, 10, E], parent="c1", **native)
    script.call("c3", [1, 7, E, 5, 10, E, 6], [30, E], parent="c2", **native).ended()
    made = built(script, "prefix_merging", decode=decode)
    assert [(s["drift_class"], s["drift_at"]) for s in spans(made)] == [("", None), *[("retokenised", 1)] * 2]
    assert [s["context_faithful"] for s in spans(made)] == [True, True, False]


def test_another_copy_behind_a_prompt_that_the_engine_changed_is_not_the_engines() -> None:
    script = Script().call("c1", [1], [10, E], untrainable="engine_retokenised", context_exact=False)
    script.call("c2", [1, 70, E, 5], [20, E], parent="c1", chain_class="edited").ended()
    made = built(script, "prefix_merging")
    assert [s["drift_class"] for s in spans(made)] == ["engine", "edited"]
    assert [s["context_faithful"] for s in spans(made)] == [True, False]


def test_an_edited_turn_is_merged_as_the_paper_does_and_labelled_edited() -> None:
    script = Script().call("c1", [1], [10, E])
    script.call("c2", [1, 70, E, 5], [20, E], parent="c1", chain_class="edited").ended()
    made = built(script, "prefix_merging")
    assert ids(made) == [([1], [10, E, 5, 20, E])]
    assert spans(made)[1]["drift_class"] == "edited" and not spans(made)[1]["context_faithful"]


def test_a_stop_strings_cut_is_an_unsafe_boundary() -> None:
    """G."""
    script = Script().call("c1", [1], [10, 11], closed=False, finish="stop_string")
    script.call("c2", [1, 10, E, 5], [20, E], parent="c1", context="native", chain_class="native").ended()
    assert trained(built(script, "prefix_merging")) == [["c1"], ["c2"]]


def test_without_an_end_of_turn_id_a_boundary_is_unsafe_and_nothing_is_lost() -> None:
    """F: every turn was cut by length. The engine's facts know the id; without them the calls stay separate."""
    for known, expected in (((E,), [["c1", "c2"]]), ((), [["c1"], ["c2"]])):
        script = Script().call("c1", [1], [8, 9], closed=False, engine={"end_of_turn": known})
        facts = {"parent": "c1", "context": "native", "chain_class": "native", "engine": {"end_of_turn": known}}
        script.call("c2", [1, 7, E, 5], [6], closed=False, **facts).ended()
        assert trained(built(script, "prefix_merging")) == expected
        assert trained(built(script, "prefix_merging", end_of_turn=(E,))) == [["c1", "c2"]]


def test_an_end_of_turn_id_inside_a_sample_is_an_unsafe_boundary() -> None:
    script = Script().call("c1", [1], [10, E, 11, E])
    script.call("c2", [1, 12, E, 5], [20, E], parent="c1", context="native", chain_class="native").ended()
    assert trained(built(script, "prefix_merging")) == [["c1"], ["c2"]]


def test_a_sibling_that_shares_only_the_prompt_does_not_take_the_chain() -> None:
    """K, in both orders, without recorded parents."""
    for order in (("k", "c2"), ("c2", "k")):
        script = Script().call("c1", [1, 2, 3], [10, 11, E], context="native", chain_class="native")
        for name in order:
            prompt, sampled = {"k": ([1, 2, 3, 70, E, 5], [72, E]), "c2": ([1, 2, 3, 10, 11, E, 5], [20, E])}[name]
            script.call(name, prompt, sampled, context="native", chain_class="native")
        assert trained(built(script.ended(), "prefix_merging")) == [["c1", "c2"], ["k"]]


@pytest.mark.parametrize("order", [("k", "c2"), ("c2", "k")])
def test_nor_from_a_continuation_that_is_recorded(order: tuple[str, str]) -> None:
    native = {"context": "native", "chain_class": "native"}
    script = Script().call("c1", [1, 2, 3], [10, 11, E], **native)
    for name in order:
        if name == "k":
            script.call("k", [1, 2, 3, 70, E, 5], [72, E], **native)
        else:
            script.call("c2", [1, 2, 3, 12, E, 5], [20, E], parent="c1", **native)
    assert sorted(trained(built(script.ended(), "prefix_merging"))) == [["c1", "c2"], ["k"]]


def test_what_others_went_on_with_leaves_a_branch_no_shorter_prompt_to_go_on_from() -> None:
    """k begins like c1, which c2 continues; that `other` begins like both doesn't make it k's."""
    native = {"context": "native", "chain_class": "native"}
    script = Script().call("other", [1], [15, E], **native).call("c1", [1, 2, 3], [10, 11, E], **native)
    script.call("c2", [1, 2, 3, 10, 11, E, 5], [20, E], parent="c1", **native)
    script.call("k", [1, 2, 3, 70, E, 5], [72, E], **native).ended()
    assert trained(built(script, "prefix_merging")) == [["other"], ["c1", "c2"], ["k"]]


def test_an_answer_that_nobody_had_leaves_no_shorter_prompt_either_and_its_retry_is_gone_on_with() -> None:
    native = {"context": "native", "chain_class": "native"}
    script = Script().started().call("other", [1], [15, E], **native).call("c1", [1, 2, 3], [10, E], at=3, **native)
    script.undelivered("c1")
    lost = deepcopy(script).call("c2", [1, 2, 3, 70, E, 5], [72, E], **native).ended()
    assert trained(built(lost, "prefix_merging")) == [["other"], ["c2"]]
    script.call("again", [1, 2, 3], [11, E], at=9, **native)
    script.call("c2", [1, 2, 3, 70, E, 5], [72, E], **native).ended()
    made = built(script, "prefix_merging")
    assert trained(made) == [["other"], ["again", "c2"]] and made.ambiguous == 0


def test_an_answer_of_which_only_the_beginning_was_used_is_gone_on_with_by_nobody_else() -> None:
    script = Script().call("c1", [1], [10, 11, 12, E]).undelivered("c1")
    script.call("c2", [1, 10, 11, E, 5], [20, E], parent="c1", parent_by="adopted", chain_class="continued")
    script.call("k", [1, 13, E, 5], [30, E], context="native", chain_class="native").ended()
    made = built(script, "prefix_merging")
    assert trained(made) == [["c2"], ["k"]] and made.excluded == {"c1": "adopted_partial"}


def test_of_several_answers_of_which_none_is_known_to_be_used_none_is_guessed() -> None:
    """Two parallel answers are left out as unused; the third isn't the only one that can have been meant."""
    native = {"context": "native", "chain_class": "native"}
    script = Script().call("c1", [1], [10, E], at=1, took=1, request_hash="r", **native)
    script.call("c2", [1], [11, E], at=1, took=1, request_hash="r", parallel_of="c1", **native)
    script.call("c3", [1], [12, E], at=5, took=1, request_hash="r", **native)
    script.call("c4", [1, 13, E, 5], [20, E], at=9, **native).ended()
    made = built(script, "prefix_merging")
    assert trained(made) == [["c3"], ["c4"]] and made.ambiguous == 1


def test_several_unrecorded_parents_with_one_prompt_are_kept_separate_and_counted() -> None:
    native = {"context": "native", "chain_class": "native"}
    script = Script().call("c1", [1], [10, E], at=1, took=9, request_hash="r", **native)
    script.call("c2", [1], [11, E], at=2, took=9, request_hash="r", **native)
    script.call("c3", [1, 12, E, 5], [20, E], **native).ended()
    made = built(script, "prefix_merging", unused_parallel="train")
    assert trained(made) == [["c1"], ["c2"], ["c3"]]
    assert made.ambiguous == 1


def test_a_retry_keeps_the_chain_that_was_gone_on_with() -> None:
    """B: one trace through the second answer, the first listed."""
    script = Script().call("c1", [1], [10, E], request_hash="r", at=1)
    script.call("c2", [1], [11, E], request_hash="r", at=5)
    script.call("c3", [1, 11, E, 5], [20, E], parent="c2").call("c4", [1, 11, E, 5, 20, E, 6], [30, E], parent="c3")
    for rules in ("prefix_merging", "exact"):
        made = built(script.ended() if rules == "prefix_merging" else script, rules)
        assert trained(made) == [["c2", "c3", "c4"]]
        assert made.excluded == {"c1": "superseded_retry"}


def independent(prompts: list[list[int]], samples: list[list[int]]) -> list[tuple[list[int], list[int], list[int]]]:
    """The rule as the paper states it, in lists: (prompt, response, mask) per chain."""
    chains: list[list[int]] = []
    for k, prompt in enumerate(prompts):
        for chain in chains:
            before = prompts[chain[-1]]
            if len(before) < len(prompt) and prompt[: len(before)] == before:
                chain.append(k)
                break
        else:
            chains.append([k])
    found = []
    for chain in chains:
        response, mask = list(samples[chain[0]]), [1] * len(samples[chain[0]])
        for a, b in itertools.pairwise(chain):
            tail = prompts[b][len(prompts[a]) :]
            j = tail.index(E)
            gap = tail[j + 1 :] if samples[a][-1] == E else tail[j:]
            response += gap + samples[b]
            mask += [0] * len(gap) + [1] * len(samples[b])
        found.append((prompts[chain[0]], response, mask))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_it_agrees_with_an_independent_statement_where_every_sample_is_canonical(seed: int) -> None:
    """There the rule is sound: several conversations that share no prompt, turns closed or cut by length."""
    rng = random.Random(seed)
    lines = [[100 + n, *(rng.randrange(1, 90) for _ in range(rng.randrange(4)))] for n in range(rng.randrange(1, 4))]
    prompts, samples, script = [], [], Script()
    for k in range(rng.randrange(1, 14)):
        n = rng.randrange(len(lines))
        closed = rng.random() < 0.7
        sample = [rng.randrange(1, 90) for _ in range(rng.randrange(1, 5))] + [E] * closed
        prompts.append(list(lines[n]))
        samples.append(sample)
        script.call(f"c{k}", lines[n], sample, context="native", chain_class="native", closed=closed)
        lines[n] += sample + [E] * (not closed) + [rng.randrange(1, 90) for _ in range(rng.randrange(1, 4))]
    made = built(script.ended(), "prefix_merging")
    got = [(t.draft.prompt.tolist(), t.draft.response.tolist(), t.draft.mask.tolist()) for t in made.traces]
    assert sorted(got) == sorted(independent(prompts, samples))
    assert made.exact_spans == made.spans == len(prompts)
