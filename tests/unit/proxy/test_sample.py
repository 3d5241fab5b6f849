"""Samples as they come in: any split tells the same, stop strings never leak, reasons for not training are found."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_renderer import END, PlainRenderer, ids

from polar_common.errors import EngineDown, EngineOverflow
from polar_common.events import SamplingUsed
from polar_common.task_spec import SamplingSpec
from polar_proxy.dialects.base import Sampling as Asked
from polar_proxy.engines.base import Chunk
from polar_proxy.nesting import too_deep
from polar_proxy.sample import Sampling, cut_stop
from polar_proxy.sampling import asked_fields, max_tokens, sampling_used, used_json
from polar_proxy.validity import judge
from polar_render.base import Answer, Head, TextDelta, ToolCallDelta
from polar_render.messages import Text, Thinking, ToolCall


class LineParser:
    """Text only, told as it comes."""

    def __init__(self) -> None:
        self.text = ""
        self.closed = False

    def feed(self, more: list[int]) -> list[TextDelta]:
        new = "".join(chr(i) for i in more if i != END)
        self.closed = bool(more) and more[-1] == END
        self.text += new
        return [TextDelta(new)] if new else []

    def finish(self) -> list[TextDelta]:
        return []

    def answer(self) -> Answer:
        return Answer((Text(self.text),) if self.text else (), self.closed)


@given(st.text("abST", max_size=30), st.lists(st.integers(0, 40), max_size=6), st.sampled_from(["", "STOP", "ab"]))
def test_any_split_of_a_stream_tells_the_same(text: str, cuts: list[int], stop: str) -> None:
    whole = text + stop
    stops = ("STOP", "ab")
    first = min((whole.find(s) for s in stops if s in whole), default=-1)
    hit = next((s for s in stops if first >= 0 and whole.startswith(s, first)), None)
    # The engine ends at the first stop string, perhaps some characters behind it.
    sampled = whole[: first + len(hit) + 1] if hit else whole
    expected = sampled[:first] if hit else sampled
    for parts in (cuts, list(range(40)), []):
        sampling = Sampling(LineParser(), stops)  # type: ignore[arg-type]
        numbers = [ord(c) for c in sampled]
        borders = sorted({0, len(numbers), *(c for c in parts if c < len(numbers))})
        told = ""
        for start, end in pairwise(borders):
            told += "".join(e.text for e in sampling.feed(Chunk(numbers[start:end])) if isinstance(e, TextDelta))
        sampling.take(Chunk(finish="stop", stop_reason=hit))
        sample, events = sampling.finish(fed=True)
        told += "".join(e.text for e in events if isinstance(e, TextDelta))
        assert told == expected
        assert sample.stop_sequence == hit and sample.finish == ("stop_string" if hit else "stop")


def test_text_behind_a_stop_string_is_told_where_the_engine_did_not_stop_there() -> None:
    sampling = Sampling(LineParser(), ("XX",))  # type: ignore[arg-type]
    told = [e for c in "aXXb" for e in sampling.feed(Chunk([ord(c)]))]
    sampling.take(Chunk(finish="length"))
    sample, events = sampling.finish(fed=True)
    assert "".join(e.text for e in (*told, *events) if isinstance(e, TextDelta)) == "aXXb"
    assert sample.finish == "length" and sample.stop_sequence is None


def test_a_stop_string_cuts_thinking_and_arguments_too() -> None:
    parts = (Thinking("hm"), Text("say"), ToolCall("", "f", '{"a": "STOP"}'), Text("rest"))
    assert cut_stop(parts, ["STOP"]) == ((Thinking("hm"), Text("say"), ToolCall("", "f", '{"a": "')), "STOP")
    assert cut_stop(parts, ["hm", "say"]) == ((), "hm")
    assert cut_stop(parts, ["nowhere"]) == (parts, None)


def test_streamed_and_whole_samples_are_equal() -> None:
    text = "t!a(1)!b(2)|"
    whole = Sampling(PlainRenderer().parser(Head()), ())
    whole.take(Chunk(ids(text), [-0.1] * len(text), "stop"))
    one, _ = whole.finish(fed=False)
    split = Sampling(PlainRenderer().parser(Head()), ())
    events = [e for i in ids(text) for e in split.feed(Chunk([i], [-0.1]))]
    split.take(Chunk(finish="stop"))
    two, _ = split.finish(fed=True)
    assert one == two and one.finish == "tool_calls"
    assert sum(isinstance(e, ToolCallDelta) for e in events) == 2


def test_an_answer_without_an_end_is_an_error() -> None:
    with pytest.raises(EngineDown):
        Sampling(PlainRenderer().parser(Head()), ()).finish(fed=False)


USED = SamplingUsed(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=8)
SENT = np.array([1, 2, 3], np.int32)


@pytest.mark.parametrize(
    ("sampled", "logprobs", "used", "kind", "reported", "reason", "at"),
    [
        ([5, 6], [-0.1, -0.2], {}, "processed", [1, 2, 3], "", None),
        ([5, 6], [-0.1, 0.0], {}, "processed", None, "", None),
        ([5, 6], None, {}, "processed", None, "no_logprobs", None),
        ([5, 6], [-0.1, -0.2], {}, "none", None, "no_logprobs", None),
        ([5, 6], [-0.1], {}, "processed", None, "length_mismatch", None),
        ([5, 6], [-0.1, None], {}, "processed", None, "invalid_logprobs", 1),
        ([5, 6], [math.nan, -0.1], {}, "processed", None, "invalid_logprobs", 0),
        ([5, 6], [-0.1, -math.inf], {}, "processed", None, "invalid_logprobs", 1),
        ([5, 6], [-0.1, math.inf], {}, "processed", None, "invalid_logprobs", 1),
        ([5, 6], [-0.1, 0.5], {}, "processed", None, "invalid_logprobs", 1),
        ([5, 6], [-0.1, -0.2], {}, "processed", [1, 2], "engine_retokenised", None),
        ([5, 6], [-0.1, -0.2], {"temperature": 0.0}, "processed", None, "greedy", None),
        ([5, 6], [-0.1, -0.2], {"presence_penalty": 0.1}, "processed", None, "penalties", None),
        ([5, 6], [-0.1, -0.2], {"repetition_penalty": 1.1}, "processed", None, "penalties", None),
        ([5, 6], [-0.1, -0.2], {"logit_bias": {"5": 1.0}}, "processed", None, "logit_bias", None),
        ([5, 6], [-0.1, -0.2], {"temperature": 0.7}, "raw", None, "raw_logprobs", None),
        ([5, 6], [-0.1, -0.2], {}, "raw", None, "", None),
        ([], None, {}, "processed", None, "", None),
    ],
)
def test_why_a_sample_cannot_be_trained(sampled, logprobs, used, kind, reported, reason, at) -> None:  # type: ignore[no-untyped-def]
    verdict = judge(sampled, logprobs, USED.model_copy(update=used), kind, SENT, reported)
    assert (verdict.untrainable, verdict.at) == (reason, at)
    assert verdict.context_exact is (None if reported is None else reported == [1, 2, 3])


def test_ids_that_the_engine_counted_and_did_not_give() -> None:
    assert judge([], None, USED, "processed", SENT, None, completion_tokens=4).untrainable == "no_token_ids"
    assert judge([5], [-0.1], USED, "processed", SENT, None, completion_tokens=4).untrainable == "length_mismatch"


def test_pinned_sampling_ignores_what_the_harness_wants_and_says_so() -> None:
    asked = Asked(
        temperature=0.2, top_p=0.9, top_k=5, frequency_penalty=1.0, logit_bias={"1": 2.0}, stop=("x",), seed=7
    )
    pinned = sampling_used(SamplingSpec(), asked, tokens=9, session="a", request_hash="h", repeat=0, choice=0)
    assert used_json(pinned).keys() == {"temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop"}
    assert pinned.temperature == 1.0 and pinned.stop == ("x",)
    other = sampling_used(SamplingSpec(), asked, tokens=9, session="b", request_hash="h", repeat=0, choice=0)
    assert pinned.seed != other.seed
    follow = sampling_used(
        SamplingSpec(mode="follow", min_p=0.1), asked, tokens=9, session="a", request_hash="h", repeat=0, choice=1
    )
    assert (follow.temperature, follow.top_p, follow.top_k, follow.min_p, follow.seed) == (0.2, 0.9, 5, 0.1, 8)
    assert asked_fields(asked)["logit_bias"] == {"1": 2.0} and asked_fields(Asked()) == {}


def test_a_tasks_seed_gives_each_repeat_and_session_its_own() -> None:
    spec = SamplingSpec(seed=3)
    seeds = {
        sampling_used(spec, Asked(), tokens=9, session=s, request_hash="h", repeat=r, choice=c).seed
        for s in "ab" for r in range(3) for c in range(2)
    }  # fmt: skip
    assert len(seeds) == 12


def test_the_answer_fits_the_window() -> None:
    assert max_tokens(None, None, 100, 60, 4096) == 40
    assert max_tokens(10, 5, 100, 60, 4096) == 5
    assert max_tokens(None, None, 0, 60, 4096) == 4096
    with pytest.raises(EngineOverflow, match="maximum context length is 100"):
        max_tokens(10, None, 100, 100, 4096)


@pytest.mark.parametrize("text", [b"[" * 20, b'{"a":' * 20, b'[{"a":[' * 7])
def test_nesting_is_found_before_parsing(text: bytes) -> None:
    assert too_deep(text, 10) and not too_deep(text, 21)


def test_brackets_in_strings_and_side_by_side_are_not_depth() -> None:
    assert not too_deep(b'["' + b"[" * 50 + b'\\"[["]', 5)
    assert not too_deep(b"[" + b"[]," * 50 + b"0]", 5)


_JSON = st.recursive(
    st.text('"\\[]{}a\n', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\[]{}', max_size=3), inner, max_size=4),
    max_leaves=40,
)


def _depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


@given(_JSON)
def test_the_depth_found_is_the_parsed_depth(value: object) -> None:
    body, depth = orjson.dumps(value), _depth(value)
    assert not too_deep(body, depth)
    assert depth == 0 or too_deep(body, depth - 1)
