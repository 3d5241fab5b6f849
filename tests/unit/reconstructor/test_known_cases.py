"""Cases that other systems got wrong, each under every rule that meets it: nothing is lost, and the cause is told."""

from __future__ import annotations

import pytest
from reconstruction_kit import built, ids, masks, spans, trained
from tests.scripted_sessions import Script

from polar_reconstructor.publish import outgoing

E = 99
ALL = ("exact", "per_request", "prefix_merging", "tree")
NATIVE = {"context": "native", "chain_class": "native"}


def tool_turns(turns: int, *, broken: bool) -> Script:
    """A tool call a turn; `broken`: the engine shows each one in other ids than were sampled."""
    script, prompt = Script().started(), [1, 2]
    for n in range(turns):
        facts = NATIVE | ({"parent": f"c{n - 1}"} if n else {}) if broken else ({"parent": f"c{n - 1}"} if n else {})
        script.call(f"c{n}", prompt, [10, 20 + n, E], **facts)
        shown = [11, 12, 20 + n, E] if broken else [10, 20 + n, E]
        prompt = [*prompt, *shown, 50, 51]
    return script.ended()


def test_a_session_whose_every_turn_breaks_the_prefix_completes_and_names_the_cause() -> None:
    """T11, T12: 48 of 48. One row a call, none lost; the build's account says how many and why."""
    made = built(tool_turns(48, broken=True))
    fact = outgoing(made, "live").fact
    assert (fact.traces, fact.trained_completions, fact.excluded) == (48, 48, {})
    assert fact.chain_classes == {"native": 1, "retokenised": 47} and fact.drift == {}
    merged = outgoing(built(tool_turns(48, broken=True), "prefix_merging"), "live").fact
    assert (merged.traces, merged.exact_spans, merged.drifted_spans) == (1, 1, 47)
    assert merged.drift == {"retokenised": 47} and merged.chain_classes == {"native": 1}


def test_where_calls_go_on_from_the_sampled_ids_there_is_one_trace_a_session() -> None:
    """T12, T15: the prefix is all of the earlier prompt and sample."""
    made = built(tool_turns(48, broken=False))
    assert len(made.traces) == 1 and made.spans == made.exact_spans == 48
    assert outgoing(made, "live").fact.chain_classes == {"root": 1}
    assert masks(made) == ["111" + "00111" * 47]


@pytest.mark.parametrize("rules", ["exact", "tree", "prefix_merging"])
def test_a_retried_request_whose_second_answer_is_gone_on_with_is_one_trace_through_it(rules: str) -> None:
    """B: the original keeps the first attempt alone and loses three of four."""
    script = Script().call("first", [1, 2], [10, E], request_hash="q").call("again", [1, 2], [11, E], request_hash="q")
    script.call("c3", [1, 2, 11, E, 5], [12, E], parent="again").call(
        "c4", [1, 2, 11, E, 5, 12, E, 6], [13, E], parent="c3"
    )
    made = built(script.ended(), rules)
    assert trained(made) == [["again", "c3", "c4"]] and made.excluded == {"first": "superseded_retry"}
    assert ids(made) == [([1, 2], [11, E, 5, 12, E, 6, 13, E])] and masks(made) == ["11011011"]


def test_an_empty_think_block_of_the_generation_prompt_is_one_trace_where_the_context_keeps_it() -> None:
    """C, T03: [7, 8] is the block. The template's history drops it, the exact context doesn't."""
    exact = Script().call("c1", [1, 7, 8], [10, E]).call("c2", [1, 7, 8, 10, E, 5, 7, 8], [11, E], parent="c1").ended()
    assert masks(built(exact)) == ["1100011"] and ids(built(exact))[0][0] == [1, 7, 8]
    native = Script().call("c1", [1, 7, 8], [10, E], **NATIVE)
    native.call("c2", [1, 10, E, 5, 7, 8], [11, E], parent="c1", **NATIVE).ended()
    for rules in ("exact", "prefix_merging"):
        made = built(native, rules)
        assert len(made.traces) == 2 and made.trained == 2


@pytest.mark.parametrize("rules", ALL)
def test_a_rewritten_turn_is_never_shown_as_what_the_model_saw(rules: str) -> None:
    """D."""
    script = Script().call("c1", [1], [10, E]).call("c2", [1, 60, E, 5], [11, E], parent="c1", chain_class="edited")
    made = built(script.ended(), rules)
    assert made.trained == 2
    for trace in made.traces:
        shown = [*trace.draft.prompt.tolist(), *trace.draft.response.tolist()]
        for span in trace.draft.spans:
            before = shown[: len(trace.draft.prompt) + span["start"]]
            saw = {"c1": [1], "c2": [1, 60, E, 5]}[span["completion"]]
            assert span["context_exact"] == (before == saw) and (span["drift_class"] == "edited") != (before == saw)


def test_turns_cut_by_length_go_on_without_any_end_of_turn_id_having_been_sampled() -> None:
    """F: E is the proxy's close, context."""
    script = Script().call("c1", [1], [10, 11], engine={"end_of_turn": ()})
    script.call("c2", [1, 10, 11, E, 5], [12, 13], parent="c1", engine={"end_of_turn": ()})
    script.call("c3", [1, 10, 11, E, 5, 12, 13, E, 6], [14, 15], parent="c2", engine={"end_of_turn": ()}).ended()
    made = built(script)
    assert masks(made) == ["1100110011"] and all(s["context_exact"] for s in spans(made))
    assert made.traces[0].status == "truncated"


@pytest.mark.parametrize(("rules", "traces"), [("exact", 1), ("tree", 1), ("prefix_merging", 1), ("per_request", 2)])
def test_a_stop_strings_close_is_context(rules: str, traces: int) -> None:
    """G: the stream isn't corrupt, whatever the last token was."""
    script = (
        Script().call("c1", [1], [10, 11], finish="stop_string").call("c2", [1, 10, 11, E, 5], [12, E], parent="c1")
    )
    made = built(script.ended(), rules)
    assert len(made.traces) == traces and made.trained == 2 and made.exact_spans == 2
    if traces == 1:
        assert masks(made) == ["110011"]


@pytest.mark.parametrize("rules", ALL)
def test_a_prefilled_turn_trains_the_sampled_ids_alone(rules: str) -> None:
    """J: [20, 21] was put into the assistant's mouth."""
    script = Script().call("c1", [1], [10, E])
    script.call("c2", [1, 10, E, 5, 20, 21], [22, E], parent="c1", prefill_tokens=2)
    made = built(script.call("c3", [1, 10, E, 5, 20, 21, 22, E, 6], [23, E], parent="c2").ended(), rules)
    assert made.trained == 3
    shown = [int(i) for t in made.traces for i in t.draft.response[t.draft.mask == 1]]
    assert sorted(shown) == sorted([10, E, 22, E, 23, E])


@pytest.mark.parametrize("rules", ["exact", "prefix_merging"])
def test_a_sibling_with_the_same_prompt_does_not_take_the_chain(rules: str) -> None:
    """K."""
    script = Script().call("a", [1], [10, E]).call("b", [1, 5], [20, E])
    made = built(script.call("c", [1, 10, E, 6], [11, E], parent="a").ended(), rules)
    assert sorted(trained(made)) == [["a", "c"], ["b"]]


def test_mismatched_lengths_mask_their_own_span_alone() -> None:
    """T26: the proxy says so; the conversation goes on over the sampled ids."""
    script = Script().call("c1", [1], [10, 11, E], logprobs=[-0.5, -0.5], untrainable="length_mismatch")
    made = built(script.call("c2", [1, 10, 11, E, 5], [12, E], parent="c1").ended())
    assert made.excluded == {"c1": "length_mismatch"} and trained(made) == [["c2"]]
    (trace,) = made.traces
    assert [*trace.draft.prompt, *trace.draft.response] == [1, 10, 11, E, 5, 12, E] and trace.draft.action_tokens == 2


@pytest.mark.parametrize("reason", ["no_token_ids", "no_logprobs", "invalid_logprobs", "greedy", "penalties"])
def test_what_cannot_be_trained_is_listed_with_its_reason(reason: str) -> None:
    """T20, T21, T25."""
    script = Script().call("c1", [1], [10, E], untrainable=reason).call("c2", [1, 10, E, 5], [12, E], parent="c1")
    made = built(script.ended())
    assert made.excluded == {"c1": reason} and trained(made) == [["c2"]]
