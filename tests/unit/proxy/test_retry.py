"""The retry table: request identity, retry mark, the earlier caller's state, delivery → what is done (EXACT §3)."""

from __future__ import annotations

import pytest

from polar_proxy.context.retry import Decision, Earlier, decide

RUNNING = Earlier("c", "running")
RUNNING_GONE = Earlier("c", "running", gone=True)
COMMITTING = Earlier("c", "committing")
COMMITTING_GONE = Earlier("c", "committing", gone=True)
DELIVERED = Earlier("c", "captured", delivery="delivered")
PENDING = Earlier("c", "captured", delivery="pending")
PENDING_GONE = Earlier("c", "captured", gone=True, delivery="pending")
UNDELIVERED = Earlier("c", "captured", gone=True, delivery="undelivered")
UNKNOWN = Earlier("c", "captured", delivery="unknown")
EXTENDED = Earlier("c", "captured", delivery="unknown", extended=True)
REPLAYED = Earlier("c", "captured", delivery="unknown", replays=1)
UNDELIVERED_TWICE = Earlier("c", "captured", gone=True, delivery="undelivered", replays=1)
BEING_REPLAYED = Earlier("c", "captured", delivery="pending", replays=1)
ABORTED = Earlier("c", "aborted", gone=True)


@pytest.mark.parametrize(
    ("earlier", "unmarked", "marked"),
    [
        ([], "new", "new"),
        ([RUNNING], "new", "new"),
        ([RUNNING_GONE], "resample", "resample"),
        ([COMMITTING], "new", "new"),
        ([COMMITTING_GONE], "wait", "wait"),
        ([PENDING], "new", "new"),
        ([PENDING_GONE], "replay", "replay"),
        ([DELIVERED], "new", "replay"),
        ([UNDELIVERED], "replay", "replay"),
        ([UNKNOWN], "replay", "replay"),
        ([EXTENDED], "new", "new"),
        ([REPLAYED], "new", "replay"),
        ([ABORTED], "resample", "resample"),
        ([ABORTED, DELIVERED], "resample", "replay"),
        ([DELIVERED, ABORTED], "resample", "resample"),
        ([DELIVERED, RUNNING_GONE], "resample", "resample"),
        ([UNDELIVERED_TWICE], "replay", "replay"),
        ([BEING_REPLAYED], "new", "new"),
        ([RUNNING, RUNNING], "new", "new"),
        ([UNDELIVERED, RUNNING], "replay", "replay"),
        ([DELIVERED, RUNNING], "new", "replay"),
        ([COMMITTING_GONE, UNDELIVERED], "replay", "replay"),
    ],
)
def test_the_table(earlier: list[Earlier], unmarked: str, marked: str) -> None:
    assert decide(earlier, marked=False).action == unmarked
    assert decide(earlier, marked=True).action == marked


def test_the_latest_answer_is_the_one_that_is_replayed() -> None:
    two = [Earlier("first", "captured", delivery="delivered"), Earlier("second", "captured", delivery="delivered")]
    assert decide(two, marked=True) == Decision("replay", "second")


def test_a_mark_belongs_to_a_refusal_before_it_belongs_to_a_sibling() -> None:
    """Of two parallel identical calls one was refused with 429; its retry must not get the other's answer."""
    assert decide([DELIVERED], marked=True, rejected=1) == Decision("new", consumed=True)
    assert decide([DELIVERED], marked=True, rejected=0).action == "replay"
    assert decide([DELIVERED], marked=False, rejected=1) == Decision("new")
