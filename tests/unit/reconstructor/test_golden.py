"""Sessions of real agent CLIs, stored: under every rule they give the traces that are stored beside them.

The stored traces are this code's own, read by a person when they were captured; what has to hold whatever they say is
checked from the stored calls alone.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.golden_kit import FOLDER, Golden, golden_files, told

from polar_reconstructor import tree
from polar_reconstructor.rules import BUILT_IN

FILES = golden_files()
NATIVE = [p for p in FILES if p.stem.endswith("-native")]
EXACT = [p for p in FILES if p not in NATIVE]


def name_of(path: Path) -> str:
    return path.stem


@cache
def golden(path: Path) -> Golden:
    return Golden.load(path)


def calls(found: Golden) -> dict[str, tuple[list[int], list[int]]]:
    """(whole prompt, sampled) by completion, from the references alone."""
    contexts: dict[str, tuple[list[int], list[int]]] = {}
    for fact in found.facts:
        if fact["kind"] == "captured":
            prompt = fact["prompt"]
            before = [i for part in contexts.get(prompt["base"], ([], [])) for i in part]
            contexts[fact["completion"]] = (before[: prompt["shared"]] + prompt["new"], fact["sampled"])
    return contexts


def agents(found: Golden) -> set[str]:
    return {fact.get("agent", "") for fact in found.facts if fact["kind"] == "captured"}


def test_every_kind_of_session_is_here() -> None:
    told_of = {p.stem for p in FILES}
    assert {"pi-chat-plain", "pi-chat-think", "claude-plain", "claude-faults", "codex-twotools"} <= told_of
    assert {f"{cli}-subagents" for cli in ("claude", "codex", "gemini", "qwen")} <= told_of
    assert {f"{cli}-native" for cli in ("pi-chat", "claude", "codex")} <= told_of
    assert sum(p.stat().st_size for p in FILES) < 400_000


@pytest.mark.parametrize("rules", BUILT_IN)
@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_traces_are_those_that_are_stored(path: Path, rules: str) -> None:
    assert told(golden(path).built(rules)) == golden(path).expected[rules]


@pytest.mark.parametrize("rules", BUILT_IN)
@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_call_is_trained_once_with_its_own_ids_and_log_probs_or_left_out(path: Path, rules: str) -> None:
    found, built = golden(path), golden(path).built(rules)
    sampled = {f["completion"]: f for f in found.facts if f["kind"] == "captured"}
    trained: list[str] = []
    for trace in built.traces:
        draft = trace.draft
        for span in draft.spans:
            fact = sampled[span["completion"]]
            at = slice(span["start"], span["start"] + span["length"])
            assert draft.response[at].tolist() == fact["sampled"]
            if span["trained"]:
                trained.append(span["completion"])
                assert draft.logprobs[at].tolist() == pytest.approx(fact["logprobs"]) and draft.mask[at].all()
            else:
                assert not draft.mask[at].any()
        assert int(draft.mask.sum()) == sum(s["length"] for s in draft.spans if s["trained"])
    assert len(trained) == len(set(trained))
    names = {f["completion"] for f in found.facts if f["kind"] in ("captured", "aborted")}
    assert set(trained) | built.excluded.keys() == names and not set(trained) & built.excluded.keys()


@pytest.mark.parametrize("path", EXACT, ids=name_of)
def test_a_conversation_is_one_exact_trace_of_just_the_ids_that_the_engine_saw(path: Path) -> None:
    found, built = golden(path), golden(path).built("exact")
    contexts = calls(found)
    assert len(built.traces) == len(agents(found))
    for trace in built.traces:
        draft = trace.draft
        whole = [*draft.prompt.tolist(), *draft.response.tolist()]
        for span in draft.spans:
            prompt, sampled = contexts[span["completion"]]
            end = len(draft.prompt) + span["start"]
            assert whole[:end] == prompt and whole[end : end + len(sampled)] == sampled
            assert span["context_exact"] and span["context_faithful"] and span["drift_class"] == ""
    merged = told(found.built("prefix_merging"))["traces"]
    assert [t["spans"] for t in merged] == [t["spans"] for t in told(built)["traces"]]


@pytest.mark.parametrize("path", NATIVE, ids=name_of)
def test_where_the_engine_renders_the_papers_rule_drifts_and_the_exact_one_keeps_apart(path: Path) -> None:
    found = golden(path)
    contexts, apart, merged = calls(found), found.built("exact"), found.built("prefix_merging")
    assert len(merged.traces) < len(apart.traces) and merged.trained == apart.trained
    for built in (apart, merged):
        for trace in built.traces:
            whole = [*trace.draft.prompt.tolist(), *trace.draft.response.tolist()]
            for span in trace.draft.spans:
                before = whole[: len(trace.draft.prompt) + span["start"]]
                prompt = contexts[span["completion"]][0]
                assert span["context_exact"] == (before == prompt)
                if not span["context_exact"]:
                    first = next(i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b)
                    assert span["drift_at"] == first and span["drift_class"] in ("retokenised", "template", "edited")
    assert apart.exact_spans == apart.spans and merged.exact_spans < merged.spans


@pytest.mark.parametrize("path", EXACT, ids=name_of)
def test_walks_of_the_tree_are_the_exact_traces(path: Path) -> None:
    exact, nodes = golden(path).built("exact"), golden(path).built("tree")
    by_tree: dict[str, list[Any]] = {}
    for trace in nodes.traces:
        assert trace.place is not None
        by_tree.setdefault(trace.place["tree"], []).append((trace.draft, trace.place))
    walked = []
    for members in by_tree.values():
        inner = {place["parent"] for _, place in members}
        walked += [tree.walk(members, p["node"]) for _, p in members if p["node"] not in inner]
    assert sorted(w.response.tolist() for w in walked) == sorted(t.draft.response.tolist() for t in exact.traces)


@pytest.mark.parametrize("path", [p for p in FILES if p.stem.endswith("-subagents")], ids=name_of)
def test_sub_agents_have_one_role_in_all_sessions_and_the_call_that_started_them(path: Path) -> None:
    traces = told(golden(path).built("exact"))["traces"]
    assert [t["role"] for t in traces].count("main") == 1 and len({t["role"] for t in traces}) == 2
    main = next(t for t in traces if t["role"] == "main")
    children = [t for t in traces if t["role"] != "main"]
    assert len(children) == 2 and all(t["depth"] == 1 for t in children)
    assert {t["parent_call"] for t in children} <= {span[0] for span in main["spans"]}


def test_a_title_is_left_out_and_the_conversation_is_not() -> None:
    """opencode asks for one beside the first turn; its words turn up again in what the model itself says."""
    (path,) = (p for p in FILES if p.stem == "opencode-plain")
    for rules in BUILT_IN:
        built = golden(path).built(rules)
        assert list(built.excluded.values()) == ["side"] and built.trained == 2


def test_what_harnesses_say_is_not_kept_whole() -> None:
    """Files are small, and hold no program's own texts."""
    for path in FILES:
        prompts = [f["prompt"]["new"] for f in golden(path).facts if f["kind"] == "captured"]
        assert max(map(len, prompts)) < 1_500, path.name
        assert FOLDER in path.parents
