"""Damage in a session's log: that session fails alone, with a reason that names the place."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
import pytest
from reconstruction_kit import built
from tests.scripted_sessions import Script

from polar_common.bus import Stored
from polar_common.errors import BlobError, FromTheFuture, Poison, PolarError, TraceError
from polar_reconstructor.build import build_session, prepare
from polar_reconstructor.domain import select
from polar_reconstructor.rules import BUILT_IN

E = 99
Edit = Callable[[dict[str, Any]], Any]


def two() -> Script:
    script = Script().call("c1", [1, 2], [10, E])
    return script.call("c2", [1, 2, 10, E, 5], [20, E], base="c1", shared=4, parent="c1").ended()


def damaged(script: Script, edits: dict[str, Edit]) -> None:
    """Build a script whose stored bodies were edited, by completion."""
    stored = []
    for message in script.stored():
        body = orjson.loads(message.body)
        edit = edits.get(body.get("completion", ""))
        if edit is not None:
            edit(body)
        stored.append(Stored(message.subject, message.sequence, message.time, orjson.dumps(body), ""))
    selection = select(script.session, stored)
    assert selection is not None
    build_session(prepare(selection), script.blobs, BUILT_IN["exact"])


def setting(path: str, value: object) -> Edit:
    def edit(body: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for name in parents:
            body = body[name]
        body[last] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (setting("prompt.length", 6), r"c2: its prompt has 4 \+ 1 ids and says 6"),
        (setting("prompt.shared", 5), "c2: its prompt shares 5 ids with c1, which has 4"),
        (setting("prompt.shared", -1), "c2: damaged event.*-1 is no count"),
        (setting("prompt.base", "gone"), "c2: its prompt refers to gone, which isn't in this attempt"),
        (setting("prompt.base", "c2"), "c2: its prompt refers to c2, which isn't earlier: a cycle"),
        (setting("prompt.base", ""), "c2: its prompt shares 4 ids with nothing"),
        (setting("prompt.new.n", 2), "c2, prompt: the column says 2 numbers, holds 1"),
        (setting("prompt.new.n", 0), "c2, prompt: the column says 0 numbers and holds more"),
        (setting("prompt.new.n", 1 << 40), "c2, prompt: a column of 1099511627776 numbers"),
        (setting("prompt.new.type", "f32"), "c2, prompt: no column of i32"),
        (setting("sampled.data", "%%%"), "c2, sampled: damaged column"),
        (setting("sampled.data", "AAAA"), "c2, sampled: damaged column"),
        (setting("sampled", None), "c2, sampled: no column of i32"),
        (setting("logprobs", None), "c2: no log-probs and no reason for it"),
        (setting("versions", [{"version": "v", "start": 1}]), r"c2: version spans start at \[1\]"),
        (setting("versions", [{"version": "v", "start": 0}, {"version": "w", "start": 9}]), r"c2: version spans"),
        (lambda body: body.pop("finish"), "c2: damaged event: finish is 'missing'"),
        (lambda body: body.pop("engine"), "c2: damaged event"),
    ],
)
def test_damage_is_named(edit: Edit, told: str) -> None:
    with pytest.raises((TraceError, BlobError), match=told):
        damaged(two(), {"c2": edit})


def test_a_cycle_is_named() -> None:
    def both(body: dict[str, Any]) -> None:
        body["prompt"]["base"], body["prompt"]["shared"] = "c2", 1

    with pytest.raises(TraceError, match="c1: its prompt refers to c2, which isn't earlier: a cycle"):
        damaged(two(), {"c1": both})


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (Script().call("c1", [1], [10, E], logprobs=[-0.5]), "c1: 2 sampled ids, 1 log-probs"),
        (Script().call("c1", [1], [10, E], logprobs=[-0.5, float("nan")]), r"c1: logprobs\[1\] is nan"),
        (Script().call("c1", [1], [10, E], logprobs=[float("-inf"), -1.0]), r"c1: logprobs\[0\] is -inf"),
        (Script().call("c1", [1, -2], [10, E]), r"c1: prompt\[1\] is a negative id"),
        (Script().call("c1", [1], [-10, E]), r"c1: sampled\[0\] is a negative id"),
        (Script().call("c1", [1], [10, 500], engine={"vocab_size": 500}), r"c1: sampled\[1\] is id 500 beyond"),
        (Script().call("c1", [1], [10, E]).cut("c1"), "c1 is on the log 2 times"),
    ],
)
def test_impossible_numbers_are_named(script: Script, told: str) -> None:
    with pytest.raises(TraceError, match=told):
        built(script.ended())


def test_two_completions_with_one_number_are_named() -> None:
    script = Script().call("c1", [1], [10, E])
    script.next -= 1
    script.call("c2", [2], [10, E]).ended()
    with pytest.raises(TraceError, match=r"c1 and c2 have one number \(1\)"):
        built(script)


def test_what_the_proxy_marked_untrainable_is_no_damage() -> None:
    for facts in ({"logprobs": [-0.5], "untrainable": "length_mismatch"}, {"untrainable": "no_logprobs"}):
        script = Script().call("c1", [1], [10, E], **facts).call("c2", [1, 10, E, 5], [20, E], parent="c1").ended()
        assert built(script).excluded == {"c1": facts["untrainable"]}


def test_an_attempt_without_a_seal_is_named() -> None:
    script = Script().call("c1", [1], [10, E]).exited().artifacts()
    with pytest.raises(TraceError, match="never sealed"):
        select(script.session, script.stored())


def test_a_body_that_cannot_be_read_is_poison_and_a_newer_one_is_from_the_future() -> None:
    script = two()
    stored = script.stored()
    for body, error in ((b"{", Poison), (b'{"schema_version": 99, "kind": "completion.captured"}', FromTheFuture)):
        stored[1] = Stored(stored[1].subject, 2, stored[1].time, body, "")
        selection = select(script.session, stored)
        assert selection is not None
        with pytest.raises(error):
            prepare(selection)


@pytest.mark.parametrize("seed", range(300))
def test_random_damage_fails_with_a_reason_or_changes_nothing_it_should_not(seed: int) -> None:
    """Any value of any field replaced by anything: a PolarError, or a build that conserves."""
    rng = random.Random(seed)
    script = two()
    values: list[object] = [None, -1, 0, 3, 1 << 33, "", "c1", [], {}, True, 1.5, "x" * 10]

    def edit(body: dict[str, Any]) -> None:
        places: list[tuple[dict[str, Any], str]] = []

        def walk(node: dict[str, Any]) -> None:
            for key, value in node.items():
                places.append((node, key))
                if isinstance(value, dict):
                    walk(value)

        walk(body)
        node, key = rng.choice([p for p in places if p[1] not in ("completion", "kind", "schema_version")])
        node[key] = rng.choice(values)

    # Anything but a PolarError fails the test.
    with suppress(PolarError):
        damaged(script, {rng.choice(["c1", "c2"]): edit})
