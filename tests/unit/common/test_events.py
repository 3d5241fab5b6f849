"""The vocabulary: subjects, ownership, upcasters, hashes."""

from __future__ import annotations

import re

import orjson
import pytest

from polar_common import ids, subjects
from polar_common.errors import ConfigError, FromTheFuture, Poison
from polar_common.events import EVENT_TYPES, SessionCompleted, SessionReady, SessionSealed, decode, encode
from polar_common.ownership import OWNERS

TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


def test_every_kind_has_an_owner_and_a_literal_discriminator() -> None:
    assert set(OWNERS) == set(EVENT_TYPES)
    for kind, cls in EVENT_TYPES.items():
        assert cls.model_fields["kind"].default == kind


def test_an_event_round_trips() -> None:
    event = SessionSealed(session="s1-abc-0", attempt=2, reason="timeout", run="r", task="s1-abc")
    assert decode(encode(event)) == event
    assert event.subject() == "polar.events.s1.session.s1-abc-0.2.sealed"


def test_the_body_hash_ignores_who_said_it_and_when() -> None:
    one, two = (SessionReady(session="s1-abc-0", attempt=1, producer=p) for p in "ab")
    assert one.event_id != two.event_id
    assert one.body_hash() == two.body_hash()
    assert one.body_hash() != SessionReady(session="s1-abc-0", attempt=2).body_hash()


def test_older_versions_are_upcast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionSealed, "VERSION", 3)
    steps = {1: lambda v: {**v, "reason": "exited"}, 2: lambda v: {**v, "run": "from-two"}}
    monkeypatch.setattr(SessionSealed, "UPCASTERS", steps)
    old = {"kind": "session.sealed", "schema_version": 1, "session": "s1-a-0", "attempt": 1}
    event = decode(orjson.dumps(old))
    assert isinstance(event, SessionSealed)
    assert (event.reason, event.run) == ("exited", "from-two")
    with pytest.raises(Poison):
        decode(orjson.dumps({**old, "schema_version": 3}))
    with pytest.raises(FromTheFuture):
        decode(orjson.dumps({**old, "schema_version": 4}))


def test_ends_of_logs_in_which_every_end_had_a_reward_are_read() -> None:
    new = SessionCompleted(
        session="s1-a-0", attempt=0, last_attempt=1, outcome="failed", reward=0.5, evaluation="live", run="r"
    )
    old = {**orjson.loads(encode(new)), "schema_version": 1}
    assert decode(orjson.dumps(old)) == new and new.schema_version == 2
    none = new.model_copy(update={"outcome": "infra_error", "reward": None})
    assert decode(encode(none)) == none


@pytest.mark.parametrize("user_id", ["plain-id_1", "with space", "a.b", "ü", "x" * 65, "", "*", ">"])
def test_any_user_id_becomes_one_token(user_id: str) -> None:
    assert TOKEN.match(ids.token(user_id))
    assert ids.token(user_id) == ids.token(user_id)


def test_ids_carry_their_segment_and_differ_by_run() -> None:
    one, two = ids.task_id("s1", "run", "t"), ids.task_id("s1", "run2", "t")
    assert one != two
    assert ids.task_id("s1", "ab", "c") != ids.task_id("s1", "a", "bc")
    assert ids.segment_of(ids.session_id(one, 3)) == "s1"
    assert ids.task_of(ids.session_id(one, 3)) == one
    for wrong in ("", "nodash", "s1-", "s1-a.b"):
        with pytest.raises(ConfigError):
            ids.segment_of(wrong)


def test_a_subject_token_never_breaks_the_grammar() -> None:
    subject = subjects.session("s1-abc-0", 1, "queued", "weird.class *")
    assert subject.count(".") == 7 - 0
    assert all(TOKEN.match(t) for t in subject.split("."))
