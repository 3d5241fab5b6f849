"""What `polar run` says of sessions that didn't pass."""

from __future__ import annotations

from typing import Any

import pytest

from polar_common.cli.tasks import _why

FULL = {"cause": "limit", "detail": "the context window is full", "log_tail": "bye\n"}
CRASHED = {"cause": "crashed", "detail": "it died", "log_tail": ""}


def session(cause: str, detail: str, attempt: dict[str, Any] | None, judged: str = "") -> dict[str, Any]:
    return {
        "session": "s", "outcome": "failed", "phase": "completed", "cause": cause, "detail": detail,
        "attempts": [attempt] if attempt else [], "evaluation": {"detail": judged} if judged else None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shown", "cause", "detail"),
    [
        (session("", "", FULL, "no such file"), "limit", "the context window is full"),
        (session("", "no such file", FULL, "no such file"), "limit", "the context window is full"),
        (session("evaluation", "it hung", FULL), "evaluation", "it hung"),
        (session("crashed", "it died", CRASHED), "crashed", "it died"),
        (session("", "", {"cause": "", "detail": "", "log_tail": "a\nbye\n"}, "no file"), "", "no file"),
        (session("", "", {"cause": "", "detail": "", "log_tail": "a\nbye\n"}), "", "bye"),
        (session("expired", "waited too long", None), "expired", "waited too long"),
    ],
)
def test_the_cause_and_its_own_words(shown: dict[str, Any], cause: str, detail: str) -> None:
    told = _why(shown)
    assert (told["cause"], told["detail"]) == (cause, detail)
