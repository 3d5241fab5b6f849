"""Sub-agents that begin in their parent's own context: their chains, roles and masks under every rule."""

from __future__ import annotations

import pytest
from reconstruction_kit import built, ids, masks, spans, trained
from tests.scripted_sessions import Script

from polar_reconstructor import tree
from polar_reconstructor.build import name_trace

E = 99


def forked(*, main_first: bool = False, goes_on: bool = True) -> Script:
    """A sub-agent that begins in its parent's whole context, as a fork does; its parent goes on, or doesn't."""
    child = {"agent": "x1", "agent_role": "fork", "parent_agent": "main"}
    script = Script().call("m1", [1], [10, E])

    def main() -> None:
        script.call("m2", [1, 10, E, 5], [20, E], parent="m1")

    if main_first:
        main()
    script.call("s1", [1, 10, E, 7], [30, E], parent="m1", **child)
    script.call("s2", [1, 10, E, 7, 30, E, 8], [31, E], parent="s1", **child)
    if goes_on and not main_first:
        main()
    return script.ended()


@pytest.mark.parametrize("rules", ["exact", "tree", "prefix_merging"])
@pytest.mark.parametrize("options", [{}, {"main_first": True}, {"goes_on": False}])
def test_a_sub_agent_in_its_parents_context_has_a_chain_of_its_own(rules: str, options: dict[str, bool]) -> None:
    """Its parent's samples are context there and trained in its parent's chain, whoever comes first (EXACT §6, §8)."""
    made = built(forked(**options), rules)
    by_role = {t.draft.role: sorted(c.id for c in t.draft.trained) for t in made.traces if t.draft.trained}
    mine = ["m1", "m2"] if options.get("goes_on", True) else ["m1"]
    if rules == "tree":
        assert {c.id: t.draft.role for t in made.traces for c in t.draft.trained} == {
            **dict.fromkeys(mine, "main"), "s1": "fork", "s2": "fork",
        }  # fmt: skip
    else:
        assert by_role == {"main": mine, "fork": ["s1", "s2"]}
    assert made.excluded == {} and all(s["context_exact"] for n in range(len(made.traces)) for s in spans(made, n))
    for t in made.traces:
        told = ("subagent", 1) if t.draft.role == "fork" else ("root", 0)
        assert rules == "tree" or (t.draft.chain_class, t.depth) == told
        assert (t.depth, t.parent_call) == (told[1], "m1" if told[1] else "")
    assert made.ambiguous == 0


def test_a_forks_parent_is_context_in_its_chain() -> None:
    made = built(forked())
    assert ids(made)[0] == ([1], [10, E, 7, 30, E, 8, 31, E]) and masks(made) == ["00011011", "11011"]
    assert [(s["completion"], s["reason"], s["agent_role"]) for s in spans(made, 0)] == [
        ("m1", "sampled_elsewhere", "main"),
        ("s1", "", "fork"),
        ("s2", "", "fork"),
    ]


def test_a_call_of_a_nameless_agent_belongs_to_whom_it_goes_on_from() -> None:
    script = Script().call("m1", [1], [10, E]).call("s1", [7], [70, E], chain_class="subagent")
    made = built(script.call("s2", [7, 70, E, 8], [71, E], parent="s1").ended())
    assert trained(made) == [["m1"], ["s1", "s2"]]


@pytest.mark.parametrize("options", [{}, {"main_first": True}, {"goes_on": False}])
def test_a_tree_of_forks_walked_back_gives_the_exact_chains(options: dict[str, bool]) -> None:
    exact, placed = built(forked(**options)), built(forked(**options), "tree")
    nodes = [(t.draft, t.place) for t in placed.traces if t.place is not None]
    ends = {d.calls[-1].id: place["node"] for d, place in nodes}
    for t in exact.traces:
        walked = tree.walk(nodes, ends[t.draft.calls[-1].id])
        assert name_trace(walked, "") == name_trace(t.draft, "")
        assert walked.role == t.draft.role


@pytest.mark.parametrize("rules", ["exact", "tree"])
def test_a_sub_agent_whose_first_call_isnt_trained_was_started_by_the_same_call(rules: str) -> None:
    child = {"agent": "x1", "parent_agent": "main"}
    script = Script().call("m1", [1], [10, E]).call("m2", [1, 10, E, 5], [20, E], parent="m1")
    script.call("s1", [7], [70, E], chain_class="subagent", spawned_by="m1", untrainable="greedy", **child)
    script.call("s2", [7, 70, E, 8], [71, E], parent="s1", **child).ended()
    made = built(script, rules)
    assert {c.id: (t.depth, t.parent_call) for t in made.traces for c in t.draft.trained}["s2"] == (1, "m1")
