"""Sessions as no proxy should write them: they end, they conserve, and damage is told with its place."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
import pytest
from reconstruction_kit import built, ids, trained
from tests.scripted_sessions import Script

from polar_common.bus import Stored
from polar_common.errors import Misplaced, PolarError
from polar_common.events import ImageRef
from polar_common.packing import BlobRef
from polar_reconstructor.build import build_session, prepare
from polar_reconstructor.contexts import Contexts
from polar_reconstructor.domain import select
from polar_reconstructor.images import check_places
from polar_reconstructor.rules import BUILT_IN, RuleSet

E = 99
NATIVE = {"context": "native", "chain_class": "native"}
PICTURE = BlobRef(sha256="a" * 64, size=9, media_type="image/png")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("rules", BUILT_IN)
def test_recorded_parents_that_name_each_other_end(rules: str) -> None:
    """Empty answers to one prompt: each one's context begins the other's."""
    script = Script().call("a", [1], [], parent="b").call("b", [1], [], parent="a")
    made = built(script.call("c", [1, 5], [10, E], parent="b").ended(), rules)
    assert trained(made) == [["c"]] and made.excluded == {"a": "empty", "b": "empty"}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("rules", BUILT_IN)
def test_a_parent_that_comes_later_is_one_where_the_ids_say_so(rules: str) -> None:
    script = Script().call("b", [1, 10, E, 5], [20, E], parent="a").call("a", [1], [10, E], parent="a").ended()
    made = built(script, rules)
    assert made.trained == 2 and made.excluded == {} and made.exact_spans == 2
    if rules == "exact":
        assert trained(made) == [["a", "b"]]


def shown_after_a_partial() -> Script:
    """A cut answer [10, 11, 12] of which [10, 11] came back; pictures before it and behind it."""
    script = Script().call("c1", [1, 7, 7], [20, E], images=(ImageRef(message=0, part=0, blob=PICTURE, span=(1, 2)),))
    script.cut("p", prompt_tokens=6, sampled=[10, 11, 12])
    both = (
        ImageRef(message=0, part=0, blob=PICTURE, span=(1, 2)),
        ImageRef(message=3, part=0, blob=PICTURE, span=(10, 2)),
    )
    return script.call(
        "c2", [1, 7, 7, 20, E, 5, 10, 11, E, 6, 7, 7], [30, E], parent="p", parent_by="adopted",
        additions=("adopted_partial",), images=both,
    ).ended()  # fmt: skip


@pytest.mark.parametrize("rules", BUILT_IN)
@pytest.mark.parametrize(("bound", "whole"), [(0, True), (10, False)])
def test_a_trained_partial_shows_the_pictures_of_its_own_prompt_alone(rules: str, bound: int, whole: bool) -> None:
    made = built(shown_after_a_partial(), rules, adopted_partial="train", max_trace_tokens=bound)
    for trace in made.traces:
        draft = trace.draft
        if trace.place is None:
            check_places(trace.trace_id, draft.images, len(draft.prompt) + len(draft.response))
        if draft.calls[-1].id == "p" and rules != "tree":
            assert [i["span"] for i in draft.images] == [[1, 2]]
    shown = [i["span"] for t in made.traces for i in t.draft.images]
    assert ([10, 2] in shown) == whole


Edit = Callable[[dict[str, Any]], Any]


def edited(script: Script, name: str, edit: Edit) -> list[Stored]:
    """What a script stored, with one completion's body changed."""
    stored = []
    for message in script.stored():
        body = orjson.loads(message.body)
        if body.get("completion") == name:
            edit(body)
        stored.append(Stored(message.subject, message.sequence, message.time, orjson.dumps(body), ""))
    return stored


def build(script: Script, stored: list[Stored], rules: RuleSet = BUILT_IN["exact"]) -> None:
    selection = select(script.session, stored)
    assert selection is not None
    build_session(prepare(selection), script.blobs, rules)


@pytest.mark.parametrize(
    ("key", "value"), [("completion", "other"), ("session", "s1-aaaaaaaaaaaaaaaaaaaa-0"), ("attempt", 2)]
)
@pytest.mark.parametrize("name", ["c1", "x"])
def test_a_completion_that_lies_on_anothers_subject_is_not_believed(name: str, key: str, value: object) -> None:
    script = Script().call("c1", [1], [10, E]).cut("x").ended()
    with pytest.raises(PolarError, match=rf"completion\..*\.{name}\..*belongs"):
        build(script, edited(script, name, lambda body: body.update({key: value})))


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("prompt_tokens", "4", "x: damaged event: .*'4' is no count"),
        ("prompt_tokens", -1, "x: damaged event: .*-1 is no count"),
        ("request_hash", 5, "x: damaged event: .*request_hash"),
        ("sampled", [], "x, sampled: no column of i32"),
    ],
)
def test_damage_of_a_cut_call_is_named(key: str, value: object, told: str) -> None:
    script = Script().call("c1", [1], [10, E]).cut("x", prompt_tokens=4, sampled=[20, 21])
    script.call("c2", [1, 10, E, 5, 20, E, 6], [30, E], parent="x", parent_by="adopted").ended()
    rules = RuleSet(name="train", adopted_partial="train")
    with pytest.raises(PolarError, match=told):
        build(script, edited(script, "x", lambda body: body.update({key: value})), rules)


@pytest.mark.parametrize("seed", range(200))
def test_random_damage_of_a_cut_call_fails_with_a_reason(seed: int) -> None:
    rng = random.Random(seed)
    script = Script().call("c1", [1], [10, E]).cut("x", prompt_tokens=4, sampled=[20, 21])
    script.call("c2", [1, 10, E, 5, 20, E, 6], [30, E], parent="x", parent_by="adopted").ended()
    values: list[object] = [None, -1, 0, 3, 1 << 33, "", "c1", [], {}, True, 1.5, "x" * 10]

    def edit(body: dict[str, Any]) -> None:
        places = [(body, key) for key in body if key not in ("completion", "kind", "schema_version")]
        places += [(body[name], key) for name in ("sampled", "logprobs") for key in body[name]]
        node, key = rng.choice(places)
        node[key] = rng.choice(values)

    # Anything but a PolarError fails the test.
    with suppress(PolarError):
        build(script, edited(script, "x", edit), RuleSet(name="train", adopted_partial="train"))


@pytest.mark.parametrize("lengths", [1, 50])
@pytest.mark.parametrize("rules", ["exact", "prefix_merging"])
def test_where_no_parents_are_recorded_only_likely_ones_are_compared(
    rules: str, lengths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several hundred calls of an engine that renders: comparing each with each took minutes for some thousands."""
    looked = 0

    def counted(name: str) -> None:
        was = getattr(Contexts, name)

        def look(*arguments: Any) -> Any:
            nonlocal looked
            looked += 1
            return was(*arguments)

        monkeypatch.setattr(Contexts, name, look)

    for name in ("extends", "starts_with_prompt", "prompt"):
        counted(name)
    rng, script, size = random.Random(0), Script(), 400
    for n in range(size):
        prompt = [1, *(rng.randrange(100, 1000) for _ in range(20 + n % lengths))]
        refs = {"base": f"c{n - 1}", "shared": 1} if n else {}
        script.call(f"c{n}", prompt, [rng.randrange(100, 1000) for _ in range(3)] + [E], **NATIVE, **refs)
    made = built(script.ended(), rules)
    assert len(ids(made)) == size and looked < 12 * size


def test_a_body_of_another_kind_is_not_believed() -> None:
    script = Script().call("c1", [1], [10, E]).ended()
    with pytest.raises(Misplaced, match=r"c1\.captured holds what belongs to"):
        build(script, edited(script, "c1", lambda body: body.update(kind="completion.aborted", prompt_tokens=0)))
