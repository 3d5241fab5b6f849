"""Rule sets: their options, their hash, files with mistakes, and rules of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reconstruction_kit import built, ids, masks, spans, trained
from tests.scripted_sessions import Script

from polar_common.errors import ConfigError, TraceError, Unavailable
from polar_reconstructor.handlers import _decoder
from polar_reconstructor.rules import BUILT_IN, Chain, Link, RuleSet, View, load, parse, rule_named

E = 99


def three_turns(**facts: int) -> Script:
    """Contexts of 3, 6 and 9 ids."""
    seqs = [facts.get(f"v{n}", 0) for n in (1, 2, 3)]
    script = Script().call("c1", [1], [10, E], policy_seq=seqs[0])
    script.call("c2", [1, 10, E, 5], [20, E], parent="c1", policy_seq=seqs[1])
    return script.call("c3", [1, 10, E, 5, 20, E, 6], [30, E], parent="c2", policy_seq=seqs[2]).ended()


@pytest.mark.parametrize(("bound", "kept"), [(0, 3), (9, 3), (8, 2), (6, 2), (5, 1), (3, 1), (2, 0)])
def test_long_traces_are_cut_at_a_spans_end_keeping_the_causal_prefix(bound: int, kept: int) -> None:
    made = built(three_turns(), max_trace_tokens=bound)
    names = ["c1", "c2", "c3"]
    assert trained(made) == ([names[:kept]] if kept else [])
    assert made.excluded == dict.fromkeys(names[kept:], "max_length")
    for prompt, response in ids(made):
        assert bound == 0 or len(prompt) + len(response) <= bound
    assert all(t.status == ("complete" if kept == 3 else "truncated") for t in made.traces)


def test_short_traces_are_left_out() -> None:
    script = Script().call("c1", [1], [10, 11, E]).call("c2", [2], [E]).ended()
    made = built(script, min_action_tokens=2)
    assert trained(made) == [["c1"]] and made.excluded == {"c2": "min_tokens"}


def test_mixed_policies_are_kept_split_or_masked() -> None:
    script = three_turns(v1=1, v2=1, v3=2)
    assert trained(built(script)) == [["c1", "c2", "c3"]]
    split = built(script, mixed_policy="split")
    assert trained(split) == [["c1", "c2"], ["c3"]] and split.excluded == {}
    assert masks(split) == ["11011", "00000011"]
    assert spans(split, 1)[0]["reason"] == "other_policy"
    masked = built(script, mixed_policy="mask")
    assert trained(masked) == [["c3"]] and masks(masked) == ["00000011"]
    assert masked.excluded == {"c1": "mixed_policy", "c2": "mixed_policy"}
    assert trained(built(three_turns(v1=1, v2=2, v3=1), mixed_policy="split")) == [["c1", "c3"], ["c2"]]


def test_per_request_merges_nothing() -> None:
    made = built(three_turns(), "per_request")
    assert ids(made)[2] == ([1, 10, E, 5, 20, E, 6], [30, E])
    assert trained(made) == [["c1"], ["c2"], ["c3"]] and all(s["context_exact"] for s in spans(made))


def test_the_hash_is_of_the_content_and_not_of_the_name() -> None:
    exact = BUILT_IN["exact"]
    assert parse({"name": "mine", "rule": "exact"}).hash == exact.hash
    hashes = {r.hash for r in BUILT_IN.values()} | {parse({"name": "exact", "side": "train"}).hash}
    assert len(hashes) == 5
    assert exact.hash == RuleSet(name="exact").hash


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rule: exact\nsides: train\n", "sides: unknown field"),
        ("rule: exact\nside: maybe\n", "side: "),
        ("max_trace_tokens: -1\n", "max_trace_tokens: "),
        ("end_of_turn: [1, x]\n", r"end_of_turn\.1: "),
        ("rule: tree\nmixed_policy: split\n", "stores each span once"),
        ("- exact\n", "mapping"),
        ("rule: [\n", "YAML"),
        ("max_trace_tokens: yes\n", "max_trace_tokens: .*integer"),
        ("max_trace_tokens: '12'\n", "max_trace_tokens: .*integer"),
        ("end_of_turn: [true]\n", r"end_of_turn\.0: .*integer"),
        ("end_of_turn: [99999999999999999999999]\n", r"end_of_turn\.0: "),
        ("side: train\nside: exclude\n", "side stands here twice"),
        ("options: {a: 2026-01-01}\n", r"options\.a"),
        ("options: {a: !!set {x, y}}\n", r"options\.a"),
        ("options: {a: 99999999999999999999999}\n", "options: .*64-bit"),
        ("options: &a {b: *a}\n", r"options\.b.*cyclic"),
        ("options: {a: .nan}\n", r"r\.yaml: options\.a.*finite"),
        ("options: {a: [1, {b: -.inf}]}\n", r"r\.yaml: options\.a.*\.b.*finite"),
        ("rule: exakt\n", r"r\.yaml: rule: no rule of that name: 'exakt'"),
        ("rule: 'os:nothing'\n", r"r\.yaml: rule: os:nothing can't be loaded"),
    ],
)
def test_a_rules_file_with_a_mistake_names_it(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        load(str(path))


def test_rules_are_loaded_by_name_and_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("rule: per_request\nside: train\n")
    assert load("exact") is BUILT_IN["exact"]
    assert load(str(path)) == RuleSet(name="mine", rule="per_request", side="train")
    with pytest.raises(ConfigError, match="no rule set and no file"):
        load("exactly")


def tokenizer(directory: Path) -> Path:
    """Byte-level pieces in which " Pantom" can be written in two ways."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["Ġ", "P", "a", "n", "t", "o", "m", "ĠP", "an", "ĠPan", "to", "tom", "ĠPant", "om"]
    merges = [("Ġ", "P"), ("a", "n"), ("ĠP", "an"), ("t", "o"), ("to", "m"), ("o", "m"), ("ĠPan", "t")]
    model = models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges)
    made = Tokenizer(model)
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(directory / "tokenizer.json"))
    return directory


def test_a_tokenizer_in_the_rules_tells_retokenised_from_edited_and_belongs_to_the_hash(tmp_path: Path) -> None:
    """T01: " Pant" + "om" came back as " Pan" + "tom"."""
    path = tmp_path / "r.yaml"
    path.write_text(f"rule: prefix_merging\ntokenizer: {tokenizer(tmp_path)}\n")
    rules = load(str(path))
    assert rules.tokenizer_hash and rules.hash != BUILT_IN["prefix_merging"].hash
    assert rules.hash == rules.model_copy(update={"tokenizer": "elsewhere", "name": "x"}).hash
    engine = {"tokenizer_hash": rules.tokenizer_hash}
    facts = {"context": "native", "chain_class": "native", "engine": engine}
    for copy, told in (([9, 11], "retokenised"), ([9, 3], "edited")):
        script = Script().call("c1", [1], [12, 13, E], **facts)
        script.call("c2", [1, *copy, E, 5], [2, E], **facts).ended()
        made = built(script, rules, decode=_decoder(rules))
        assert spans(made)[1]["drift_class"] == told
    path.write_text(f"rule: exact\ntokenizer: {tmp_path}\ntokenizer_hash: {'a' * 64}\n")
    with pytest.raises(ConfigError, match="another tokenizer"):
        load(str(path))


class Backwards:
    """A rule of one's own that puts calls in the wrong order, trains one twice and leaves one out."""

    def chains(self, view: View) -> list[Chain]:
        return [Chain((Link(2), Link(0))), Chain((Link(0),))]


class Broken:
    error: BaseException = KeyError("oops")

    def chains(self, view: View) -> list[Chain]:
        raise self.error


class Strange(BaseException):
    """No `Exception`: what catches those alone lets it through."""


class Beyond:
    def chains(self, view: View) -> list[Chain]:
        return [Chain((Link(7),))]


def test_a_rule_of_ones_own_cannot_break_conservation_nor_exactness() -> None:
    name = f"{__name__}:Backwards"
    made = built(three_turns(), RuleSet(name="mine", rule=name))
    # c1 doesn't go on from c3: it begins a chain of its own; c2, left out, gets one.
    assert sorted(trained(made)) == [["c1"], ["c2"], ["c3"]]
    assert made.excluded == {} and all(s["context_exact"] for n in range(3) for s in spans(made, n))


@pytest.mark.parametrize("error", [SystemExit(3), Strange("odd"), Unavailable("later"), GeneratorExit()])
def test_a_rule_of_ones_own_ends_no_process_and_is_not_tried_again(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "error", error)
    with pytest.raises(TraceError, match=f"rule {__name__}:Broken: {type(error).__name__}"):
        built(three_turns(), RuleSet(name="mine", rule=f"{__name__}:Broken"))
    monkeypatch.setattr(Broken, "error", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        built(three_turns(), RuleSet(name="mine", rule=f"{__name__}:Broken"))


@pytest.mark.parametrize("name", ["Broken", "Beyond"])
def test_a_rule_of_ones_own_that_fails_fails_the_session(name: str) -> None:
    with pytest.raises(TraceError, match="rule"):
        built(three_turns(), RuleSet(name="mine", rule=f"{__name__}:{name}"))


class Says:
    """A rule of one's own that returns what a test put here."""

    found: Any = ()

    def chains(self, view: View) -> list[Chain]:
        return self.found if not callable(self.found) else self.found(view)


def gap(ids: Any, **facts: Any) -> list[Chain]:
    return [Chain((Link(0), Link(1, gap=ids, **facts)))]


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([5], r"chains\[0\] is 5"),
        ([Chain((Link(0),)), Chain((7,))], r"chains\[1\].links\[0\] is 7"),  # type: ignore[arg-type]
        ([Chain((Link(-1),))], r"chains\[0\].links\[0\].call is -1 of 3 calls"),
        ([Chain((Link("c1"),))], r"links\[0\].call is 'c1'"),  # type: ignore[arg-type]
        ([Chain((Link(0),), chain_class=5)], r"chains\[0\].chain_class is 5"),  # type: ignore[arg-type]
        ([Chain((Link(0, False, 7), Link(1)))], r"links\[0\].reason is 7"),  # type: ignore[arg-type]
        (gap([5], drift_class=None), r"links\[1\].drift_class is None"),
        (gap([4, -5]), r"links\[1\].gap\[1\] is -5, ids are below 100"),
        (gap([100]), r"gap\[0\] is 100, ids are below 100"),
        (gap(np.array([1 << 40])), r"gap\[0\] is 1099511627776"),
        (gap("ab"), "gap is no row of ids"),
        (gap([0.5]), "gap is no row of ids"),
        (gap([[5]]), "gap is no row of ids"),
        (lambda view: view.contexts.prompt(view.calls[1]).fill(3), "read-only"),
        (lambda view: view.contexts.context(view.calls[1]).fill(3), "read-only"),
    ],
)
def test_what_a_rule_of_ones_own_cannot_say_is_named(found: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Says, "found", found if not callable(found) else staticmethod(found))
    script = Script().call("c1", [1], [10, E], engine={"vocab_size": 100})
    script.call("c2", [1, 10, E, 5], [20, E], engine={"vocab_size": 100}).call("c3", [2], [30, E]).ended()
    with pytest.raises(TraceError, match=f"rule {__name__}:Says: .*{told}"):
        built(script, RuleSet(name="mine", rule=f"{__name__}:Says"))


def test_a_rule_of_ones_own_may_put_any_ids_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for some in ([], [7] * 5000):
        monkeypatch.setattr(Says, "found", gap(some, drift_class="edited"))
        made = built(three_turns(), RuleSet(name="mine", rule=f"{__name__}:Says"))
        assert ids(made)[0] == ([1], [10, E, *some, 20, E]) and spans(made)[1]["drift_at"] == 3


@pytest.mark.parametrize(
    "name",
    [
        "nowhere",
        "os:nothing",
        "no_module_x:Y",
        "os.path:join",
        f"{__name__}:Script",
        ":",
        ".x:Y",
        "fails_on_import:Y",
        "ends_on_import:Y",
    ],
)
def test_a_rule_that_is_none_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_on_import.py").write_text("raise ValueError('boom')\n")
    (tmp_path / "ends_on_import.py").write_text("raise SystemExit(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="rule"):
        rule_named(name)
