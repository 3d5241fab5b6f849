"""Which completions aren't trained, and why: siblings, sides, sub-agents, partials, dead attempts, late ones."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from reconstruction_kit import built, masks, spans, trained
from tests.scripted_sessions import Script

from polar_common.traces import Trace
from polar_reconstructor.domain import select
from polar_reconstructor.publish import outgoing

E = 99
Overlap = dict[str, float]
PARALLEL, SEQUENTIAL = ({"at": 1.0, "took": 9.0}, {"at": 2.0, "took": 9.0}), ({"at": 1.0}, {"at": 5.0})


def siblings(times: tuple[Overlap, Overlap], extended: str) -> Script:
    """Two answers to one request; those named in `extended` are continued."""
    script = Script()
    for name, when, first in (("a", times[0], 10), ("b", times[1], 11)):
        script.call(name, [1], [first, E], request_hash="same", **when)  # type: ignore[arg-type]
    for name in extended:
        script.call(f"{name}2", [1, {"a": 10, "b": 11}[name], E, 5], [20, E], parent=name)
    return script.ended()


@pytest.mark.parametrize(
    ("times", "extended", "expected"),
    [
        (PARALLEL, "", {"a": "unused_parallel", "b": "unused_parallel"}),
        (PARALLEL, "a", {"b": "unused_parallel"}),
        (PARALLEL, "b", {"a": "unused_parallel"}),
        (PARALLEL, "ab", {}),
        (SEQUENTIAL, "", {}),
        (SEQUENTIAL, "a", {"b": "superseded_retry"}),
        (SEQUENTIAL, "b", {"a": "superseded_retry"}),
        (SEQUENTIAL, "ab", {}),
    ],
)
def test_the_sibling_table(times: tuple[Overlap, Overlap], extended: str, expected: dict[str, str]) -> None:
    assert built(siblings(times, extended)).excluded == expected


def test_siblings_are_told_by_their_ids_where_identities_differ() -> None:
    script = Script().call("a", [1, 2], [10, E], at=1).call("b", [1, 2], [11, E], at=5)
    script.call("c", [1, 2, 11, E, 5], [20, E], parent="b").ended()
    assert built(script).excluded == {"a": "superseded_retry"}


def test_choices_of_one_request_are_parallel_without_overlapping_clocks() -> None:
    script = Script().call("a", [1], [10, E], request_hash="r", took=0)
    script.call("b", [1], [11, E], request_hash="r", took=0, parallel_of="a", choice=1)
    script.call("c", [1, 11, E, 5], [20, E], parent="b").ended()
    made = built(script)
    assert made.excluded == {"a": "unused_parallel"} and trained(made) == [["b", "c"]]


def test_aborted_and_undelivered_siblings_are_aborted() -> None:
    script = Script().cut("x", request_hash="r").call("a", [1], [10, E], request_hash="r", at=1).undelivered("a")
    script.call("b", [1], [11, E], request_hash="r", at=5).ended()
    made = built(script)
    assert made.excluded == {"a": "aborted", "x": "aborted"} and trained(made) == [["b"]]


def test_an_answer_that_never_arrived_is_not_trained_and_one_that_did_after_all_is() -> None:
    script = Script().call("a", [1], [10, E]).undelivered("a").ended()
    assert built(script).excluded == {"a": "undelivered"}
    assert trained(built(script, undelivered="train")) == [["a"]]
    script = Script().call("a", [1], [10, E]).undelivered("a").call("b", [1, 10, E, 5], [20, E], parent="a").ended()
    assert trained(built(script)) == [["a", "b"]]
    script = Script().call("a", [1], [10, E]).undelivered("a").call("b", [2], [20, E], delivered=("a",)).ended()
    assert built(script).excluded == {}


def test_a_replayed_answer_is_the_earlier_sample_again() -> None:
    script = Script().call("a", [1], [10, E], request_hash="r").undelivered("a")
    script.call("r", [1], [10, E], request_hash="r", replay_of="a")
    script.call("b", [1, 10, E, 5], [20, E], parent="r").ended()
    made = built(script)
    assert made.excluded == {"r": "replay"} and trained(made) == [["a", "b"]]


def test_a_title_call_is_a_side_and_the_reward_does_not_reach_it() -> None:
    script = Script().call("title", [7, 8], [9, 10, E], tools=False).call("c1", [1], [10, E]).ended()
    made = built(script)
    assert made.excluded == {"title": "side"} and trained(made) == [["c1"]]
    assert trained(built(script, side="train")) == [["title"], ["c1"]]


@pytest.mark.parametrize("stored", ["whole", "by reference"])
def test_it_does_not_matter_for_reuse_how_prompts_are_stored(stored: str) -> None:
    """c2's prompt shows the title's words where c1 had sampled them itself; c3's where the harness says them."""
    title = [41, 42, 43, 44]
    refs: dict[str, Any] = {"base": "c1", "shared": 7} if stored == "by reference" else {}
    script = Script().started().call("title", [8, 9], [*title, E], tools=False)
    script.call("c1", [1], [40, *title, 7, E]).call("c2", [1, 40, *title, 7, E, 5], [20, E], parent="c1", **refs)
    assert built(deepcopy(script).ended()).excluded == {"title": "side"}
    refs = {"base": "c2", "shared": 9} if stored == "by reference" else {}
    script.call("c3", [1, 40, *title, 7, E, 5, 20, 77, *title], [30, E], **refs).ended()
    assert built(script).excluded == {}


@pytest.mark.parametrize("stored", ["whole", "by reference"])
def test_a_copy_of_another_calls_sample_is_no_reuse_where_the_engine_renders(stored: str) -> None:
    """c2 continues c1 by record alone: its prompt shows c1's sample in other ids around the same words."""
    title = [41, 42, 43, 44]
    refs: dict[str, Any] = {"base": "c1", "shared": 1} if stored == "by reference" else {}
    script = Script().started().call("title", [8, 9], [*title, E], tools=False)
    script.call("c1", [1], [40, *title, 7, E], context="native", chain_class="native")
    native = {"parent": "c1", "context": "native", "chain_class": "native"}
    script.call("c2", [1, 60, *title, 7, E, 5], [20, E], **native, **refs).ended()
    assert built(script).excluded == {"title": "side"}


def test_a_call_without_tools_is_no_side_where_no_root_has_any() -> None:
    script = Script().call("a", [1], [10, E], tools=False).call("b", [2], [20, E], tools=False).ended()
    assert built(script).excluded == {}


def test_an_extended_call_without_tools_is_no_side() -> None:
    script = Script().call("a", [1], [10, E], tools=False).call("a2", [1, 10, E, 5], [11, E], tools=False, parent="a")
    assert built(script.call("b", [2], [20, E]).ended()).excluded == {}


def test_a_summary_that_appears_in_a_later_prompt_is_an_action() -> None:
    summary = list(range(40, 60))
    script = Script().call("c1", [1], [10, E]).call("sum", [5, 1, 10, 6], [*summary, E], tools=False)
    script.call("c2", [1, 2, *summary, 3], [20, E], chain_class="compaction").ended()
    assert built(script).excluded == {}


def test_an_answer_that_the_harness_sent_back_as_such_is_an_action_however_short() -> None:
    script = Script().started().call("short", [5], [40, E], tools=False).call("c1", [1], [10, E])
    assert built(deepcopy(script).ended()).excluded == {"short": "side"}
    script.call("c2", [1, 2, 40, 3], [20, E], chain_class="compaction", echoes=("short",)).ended()
    assert built(script).excluded == {}


def test_words_that_only_repeat_the_calls_own_prompt_are_no_reuse() -> None:
    quoted = list(range(40, 60))
    script = Script().call("c1", [1, *quoted], [10, E]).call("title", [5, *quoted], [*quoted, E], tools=False)
    script.call("c2", [1, *quoted, 10, E, *quoted], [20, E], parent="c1", base="c1", shared=23).ended()
    assert built(script).excluded == {"title": "side"}


def test_reuse_is_found_at_the_border_of_an_id_alone() -> None:
    """The bytes of [256, 0, 0, 0] shifted by one are those of [1, 0, 0]: not the same ids."""
    script = Script().call("c1", [1], [10, E]).call("side", [5], [1, 0, 0, 0, E], tools=False)
    script.call("c2", [1, 256, 0, 0, 0, 2], [20, E]).ended()
    assert built(script).excluded == {"side": "side"}


def test_sub_agents_are_trained_by_default_with_role_depth_and_parent_call() -> None:
    script = Script().call("c1", [1], [10, E], agent="root")
    child = {"agent": "x1", "agent_role": "explore", "parent_agent": "root"}
    script.call("s1", [7], [70, E], chain_class="subagent", tools=False, **child)
    script.call("d1", [8], [80, E], agent="deep", parent_agent="x1", chain_class="subagent").ended()
    made = built(script)
    assert [(t.draft.role, t.depth, t.parent_call) for t in made.traces] == [
        ("main", 0, ""),
        ("explore", 1, "c1"),
        ("subagent", 2, "s1"),
    ]
    assert built(script, subagents="exclude").excluded == {"d1": "subagent", "s1": "subagent"}


def adopted() -> Script:
    """A cut answer [10, 11, 12] of which [10, 11] came back, with a close E."""
    script = Script().call("c1", [1], [20, E]).cut("p", prompt_tokens=4, sampled=[10, 11, 12])
    return script.call(
        "c2", [1, 20, E, 5, 10, 11, E, 6], [30, E], parent="p", parent_by="adopted", additions=("adopted_partial",)
    ).ended()


def test_an_adopted_partial_is_context_by_default_and_the_chain_goes_on() -> None:
    made = built(adopted())
    assert made.excluded == {"p": "adopted_partial"}
    assert trained(made) == [["c1", "c2"]] and masks(made) == ["110000011"]
    assert spans(made)[1]["additions"] == ["adopted_partial"]


def test_an_adopted_partial_can_be_trained() -> None:
    made = built(adopted(), adopted_partial="train")
    assert made.excluded == {}
    assert trained(made) == [["c1", "p", "c2"]] and masks(made) == ["110110011"]
    assert made.traces[0].draft.logprobs[3:5].tolist() == [-0.25, -0.25]


def adopted_of_captured() -> Script:
    """A whole answer [10, 11, 12, 13, E], recorded, whose stream broke behind [10, 11]."""
    script = Script().call("c1", [1], [20, E]).call("b", [1, 20, E, 5], [10, 11, 12, 13, E], parent="c1")
    script.undelivered("b")
    return script.call(
        "c2", [1, 20, E, 5, 10, 11, E, 6], [30, E], parent="b", parent_by="adopted", base="b", shared=6,
        additions=("synthesised_close", "adopted_partial"), chain_class="continued",
    ).ended()  # fmt: skip


def test_a_recorded_answer_of_which_the_harness_had_the_beginning_is_adopted_alike() -> None:
    made = built(adopted_of_captured())
    assert made.excluded == {"b": "adopted_partial"}
    assert trained(made) == [["c1", "c2"]] and masks(made) == ["110000011"]
    made = built(adopted_of_captured(), adopted_partial="train")
    assert made.excluded == {}
    assert trained(made) == [["c1", "b", "c2"]] and masks(made) == ["110110011"]
    assert spans(made)[1]["additions"] == ["adopted_partial"] and spans(made)[1]["length"] == 2


def test_an_answer_that_was_also_gone_on_with_in_full_is_trained_in_full() -> None:
    script = adopted_of_captured()
    del script.events[-3:]
    script.call("c3", [1, 20, E, 5, 10, 11, 12, 13, E, 7], [31, E], parent="b").ended()
    for option in ("mask", "train"):
        made = built(script, adopted_partial=option)
        assert made.excluded == {}
        assert sorted(trained(made)) == [["b", "c3"], ["c1", "c2"]]


def test_dead_attempts_and_late_calls_are_excluded_with_reasons() -> None:
    script = Script().call("d1", [1], [10, E]).cut("d2").sealed("lost").lost()
    script.attempt = 2
    script.call("c1", [1], [11, E]).sealed().call("late", [1, 11, E, 5], [20, E], parent="c1").exited().artifacts()
    made = built(script)
    assert trained(made) == [["c1"]]
    assert made.excluded == {"d1": "dead_attempt", "d2": "dead_attempt", "late": "late"}


def test_what_comes_after_the_deciding_message_changes_nothing() -> None:
    script = Script().call("c1", [1], [10, E]).ended()
    before = built(script)
    script.call("late", [2], [20, E]).undelivered("c1").cancelled()
    after = built(script)
    assert [t.trace_id for t in before.traces] == [t.trace_id for t in after.traces]
    assert before.excluded == after.excluded == {}


@pytest.mark.parametrize(("fault", "decided"), [("none", True), ("agent", True), ("harness", False), ("infra", False)])
def test_faults_that_are_the_agents_are_reconstructed(fault: str, decided: bool) -> None:
    script = Script().call("c1", [1], [10, E]).ended(fault=fault)
    assert (select(script.session, script.stored()) is not None) == decided


@pytest.mark.parametrize("outcome", ["harness_error", "infra_error"])
def test_a_session_that_failed_yields_no_traces_and_lists_its_completions(outcome: str) -> None:
    made = built(Script().call("c1", [1], [10, E]).cut("x").ended(fault="infra").failed(outcome))
    assert made.traces == [] and made.excluded == {"c1": outcome, "x": outcome}


def test_a_session_cancelled_before_it_began_yields_an_empty_build() -> None:
    made = built(Script().cancelled())
    assert made.traces == [] and made.excluded == {}


def test_a_timeout_yields_all_captured_completions_and_says_that_it_was_cut() -> None:
    script = Script().call("c1", [1], [10, E]).call("c2", [1, 10, E, 5], [20, E], parent="c1")
    made = built(script.ended(reason="timeout", timed_out=True, fault="agent", cause="timeout"))
    assert trained(made) == [["c1", "c2"]] and made.traces[0].status == "truncated"
    made = built(Script().call("c1", [1], [10, E]).ended(reason="cancelled", cancelled=True))
    assert made.traces[0].status == "aborted"


def test_no_completions_is_an_empty_build() -> None:
    made = built(Script().ended())
    assert (made.traces, made.excluded, made.trained) == ([], {}, 0)


def test_a_sub_agent_of_a_nameless_agent_belongs_to_the_call_that_started_it() -> None:
    """The main agent had gone on before the sub-agent's first call arrived."""
    script = Script().call("m1", [1], [10, E]).call("m2", [1, 10, E, 5], [20, E], parent="m1")
    child = {"agent": "call_m1_0", "parent_agent": "main"}
    script.call("s1", [7], [70, E], chain_class="subagent", spawned_by="m1", **child)
    script.call("s2", [7, 70, E, 6], [71, E], parent="s1", **child)
    script.call("t1", [8], [80, E], chain_class="subagent", agent="other", parent_agent="main").ended()
    made = built(script)
    assert [(t.draft.role, t.depth, t.parent_call) for t in made.traces] == [
        ("main", 0, ""),
        ("subagent", 1, "m1"),
        ("subagent", 1, "m2"),
    ]
    assert {s["agent_role"] for s in made.traces[1].draft.spans} == {"subagent"}
    assert [Trace.model_validate_json(body).agent for _, body, _ in outgoing(made, "live").traces] == [
        "", "call_m1_0", "other",
    ]  # fmt: skip
