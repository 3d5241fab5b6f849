"""The prefix cache over buffers that remember which tokens were really written where."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_engine.prefix import PrefixCache, Tokens, common_prefix


@dataclass
class FakeBuffer:
    """A buffer whose "keys and values" are the tokens themselves."""

    content: list[int] = field(default_factory=list)
    claimed: bool = False
    forks: int = 0
    shared: dict[int, int] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.content)

    def parts(self) -> dict[int, int]:
        return {id(self): 10 * len(self.content)} | self.shared

    def fork(self, length: int, capacity: int) -> FakeBuffer:
        return FakeBuffer(self.content[:length], forks=1)


def ids(*tokens: int) -> Tokens:
    return np.asarray(tokens, dtype=np.int32)


def new(_: int) -> FakeBuffer:
    return FakeBuffer()


def serve(cache: PrefixCache[FakeBuffer], prompt: Tokens, answer: list[int], salt: str = "") -> tuple[FakeBuffer, int]:
    """One whole request; the last sampled token is never written, as in the engine."""
    buffer = cache.acquire(prompt, salt, new, len(prompt))
    reused = buffer.length
    buffer.content.extend(prompt[reused:].tolist() + answer[:-1])
    buffer.claimed = False
    cache.insert(np.asarray(buffer.content, dtype=np.int32), salt, buffer)
    return buffer, reused


def test_common_prefix() -> None:
    assert common_prefix(ids(), ids(1)) == 0
    assert common_prefix(ids(1, 2, 3), ids(1, 2, 3)) == 3
    assert common_prefix(ids(1, 2, 3), ids(1, 2)) == 2
    assert common_prefix(ids(1, 9, 3), ids(1, 2, 3)) == 1
    assert common_prefix(ids(4, 2), ids(1, 2)) == 0


def test_a_continued_call_takes_the_buffer_over_in_place() -> None:
    cache: PrefixCache[FakeBuffer] = PrefixCache(10_000)
    first, reused = serve(cache, ids(1, 2, 3), [4, 5])
    assert reused == 0
    second, reused = serve(cache, ids(1, 2, 3, 4, 5, 6, 7), [8])
    assert second is first
    assert reused == 4
    assert len(cache) == 1


def test_a_repeated_prompt_copies_all_but_its_last_token() -> None:
    cache: PrefixCache[FakeBuffer] = PrefixCache(10_000)
    first, _ = serve(cache, ids(1, 2, 3), [4, 5])
    again, reused = serve(cache, ids(1, 2, 3), [9])
    assert again is not first
    assert reused == 2
    assert first.content == [1, 2, 3, 4]


def test_a_claimed_buffer_is_never_appended_to_by_a_second_request() -> None:
    cache: PrefixCache[FakeBuffer] = PrefixCache(10_000)
    serve(cache, ids(1, 2, 3), [4, 5])
    a = cache.acquire(ids(1, 2, 3, 4, 7), "", new, 9)
    b = cache.acquire(ids(1, 2, 3, 4, 8), "", new, 9)
    assert a is not b
    assert b.forks == 1
    assert (a.length, b.length) == (4, 4)


def test_salts_share_nothing() -> None:
    cache: PrefixCache[FakeBuffer] = PrefixCache(10_000)
    serve(cache, ids(1, 2, 3), [4], salt="a")
    assert cache.match(ids(1, 2, 3), "a") == 3
    assert cache.match(ids(1, 2, 3), "b") == 0


def test_least_recently_used_goes_first_and_bytes_are_bounded() -> None:
    cache: PrefixCache[FakeBuffer] = PrefixCache(60)
    serve(cache, ids(1, 1, 1), [0])
    serve(cache, ids(2, 2, 2), [0])
    serve(cache, ids(1, 1, 1, 5), [0])  # a use of the first
    assert cache.used <= 60
    assert cache.match(ids(1, 1, 1), "") == 3
    assert cache.match(ids(2, 2, 2), "") == 0
    cache.clear()
    assert (cache.used, len(cache)) == (0, 0)


def test_what_branches_share_counts_once() -> None:
    cache: PrefixCache[FakeBuffer] = PrefixCache(10_000)
    root = FakeBuffer([1, 2, 3])
    cache.insert(ids(1, 2, 3), "", root)
    for tail in (4, 5):
        cache.insert(ids(1, 2, tail), "", FakeBuffer([tail], shared={id(root): 30}))
    assert (len(cache), cache.used) == (3, 50)


def test_what_another_buffer_covers_is_not_held_twice() -> None:
    cache: PrefixCache[FakeBuffer] = PrefixCache(10_000)
    serve(cache, ids(1, 2), [3])
    long = FakeBuffer([1, 2, 3, 4])
    cache.insert(ids(1, 2, 3, 4), "", long)
    assert len(cache) == 1
    cache.insert(ids(1, 2, 3), "", FakeBuffer([1, 2, 3]))
    assert len(cache) == 1
    assert cache.match(ids(1, 2, 3, 4, 5), "") == 4


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=8),
            st.lists(st.integers(0, 2), min_size=1, max_size=3),
            st.sampled_from(["", "s"]),
        ),
        max_size=25,
    ),
    st.integers(0, 400),
)
def test_reused_content_is_always_the_prompts_own(requests: list[tuple[list[int], list[int], str]], limit: int) -> None:
    cache: PrefixCache[FakeBuffer] = PrefixCache(limit)
    for prompt, answer, salt in requests:
        buffer = cache.acquire(np.asarray(prompt, dtype=np.int32), salt, new, 16)
        assert buffer.length < len(prompt)
        assert buffer.content == prompt[: buffer.length]
        buffer.content.extend(prompt[buffer.length :] + answer[:-1])
        buffer.claimed = False
        cache.insert(np.asarray(buffer.content, dtype=np.int32), salt, buffer)
        assert cache.used <= limit
        assert cache.match(np.asarray(prompt, dtype=np.int32), salt) in (0, len(prompt)) or limit < 400
