"""Stop strings in a growing text, and characters that arrive in pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_engine.text import TextStream

TEXT = "The answer is 42.\nObservation: né 🙂 done <tool_call>{}</tool_call>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pytest.importorskip("torch")
    from polar_engine.tiny import build_tokenizer

    return build_tokenizer().backend_tokenizer


def play(tokenizer: Any, text: str, stop: tuple[str, ...], *, include: bool = False) -> tuple[str, str | None, int]:
    """The text that was sent, the stop string that was found, and how many tokens it took."""
    stream = TextStream(tokenizer, stop, include_stop=include, skip_special=True)
    sent = ""
    for count, token in enumerate(tokenizer.encode(text).ids, start=1):
        piece = stream.push(token)
        sent += piece.text
        if piece.stop is not None:
            return sent, piece.stop, count
    return sent + stream.flush(), None, count


def test_without_stops_the_whole_text_comes_through(tokenizer: Any) -> None:
    assert play(tokenizer, TEXT, ()) == (TEXT, None, len(tokenizer.encode(TEXT).ids))


@pytest.mark.parametrize("stop", ["\nObservation:", "42", "é", "🙂", "T", ". "])
def test_text_ends_before_the_stop_string(tokenizer: Any, stop: str) -> None:
    sent, found, _ = play(tokenizer, TEXT, (stop,))
    if stop in TEXT:
        assert (sent, found) == (TEXT[: TEXT.index(stop)], stop)
    else:
        assert (sent, found) == (TEXT, None)
    sent, found, _ = play(tokenizer, TEXT, (stop,), include=True)
    assert sent == (TEXT[: TEXT.index(stop) + len(stop)] if stop in TEXT else TEXT)


def test_the_earliest_of_several_stops_wins(tokenizer: Any) -> None:
    assert play(tokenizer, TEXT, ("done", "Obs", "is 42"))[:2] == ("The answer ", "is 42")


@settings(max_examples=80, deadline=None)
@given(text=st.text(min_size=1, max_size=40), stop=st.text(min_size=1, max_size=3))
def test_nothing_of_a_stop_string_is_ever_sent(tokenizer: Any, text: str, stop: str) -> None:
    sent, found, count = play(tokenizer, text, (stop,))
    whole = tokenizer.decode(tokenizer.encode(text).ids[:count])
    if found is None:
        assert sent == whole
        assert stop not in whole
    else:
        assert sent == whole[: whole.index(stop)]


def test_half_a_character_is_flushed_as_a_replacement(tokenizer: Any) -> None:
    ids = tokenizer.encode("a🙂").ids[:-1]
    stream = TextStream(tokenizer, ("zzz",), include_stop=False, skip_special=True)
    sent = "".join(stream.push(t).text for t in ids) + stream.flush()
    assert sent == tokenizer.decode(ids)
    assert sent.startswith("a")
    assert "\ufffd" in sent


def test_a_stop_may_be_ignored_until_the_answer_is_long_enough(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, ("ab",), include_stop=False, skip_special=True)
    pieces = [stream.push(t, may_stop=False) for t in tokenizer.encode("ab").ids]
    assert [p.stop for p in pieces] == [None] * len(pieces)
