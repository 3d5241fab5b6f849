"""References of completions to earlier ones: what is written resolves to what was said, and growth is linear."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_common.errors import BlobError, TraceError
from polar_common.events import CompletionCaptured, EngineFacts, SamplingUsed, decode, encode
from polar_common.packing import pack
from polar_render import records
from polar_render.base import Head
from polar_render.messages import Message, Text, ToolSpec
from polar_render.records import Echo, Link, blobs_needed, head_ref, refer, resolve_session


def plain(value: Any) -> Any:
    """What JSON makes of it."""
    return orjson.loads(orjson.dumps(value))


def user(text: str) -> Message:
    return Message("user", (Text(text),))


class Log:
    """A session's captured events as they would come back from the log, and the truth to compare them with."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.blobs: dict[str, bytes] = {}
        self.links: dict[str, Link] = {}
        self.prompts: dict[str, np.ndarray[Any, np.dtype[np.int32]]] = {}
        self.sampled: dict[str, np.ndarray[Any, np.dtype[np.int32]]] = {}
        self.messages: dict[str, tuple[Message | Echo, ...]] = {}

    def add(
        self, name: str, prompt: list[int], sampled: list[int], messages: list[Message | Echo], base: str, shared: int
    ) -> CompletionCaptured:
        p, s = np.array(prompt, np.int32), np.array(sampled, np.int32)
        written = refer(name, p, s, messages, self.links[base] if base else None, shared)
        head, head_blob = head_ref(Head((ToolSpec("bash", "runs"),)), at="c0" if self.bodies else "")
        column, blob = pack(s, "i32")
        lps, lp_blob = pack(np.full(len(s), -0.5), "f32")
        for one in (*written.blobs, head_blob, blob, lp_blob):
            if one is not None:
                self.blobs[one[0].sha256] = one[1]
        event = CompletionCaptured(
            session="s1-x-0", attempt=1, completion=name, dialect="openai_chat", stream=False, model="m",
            request_hash="h", head=plain(head), messages=plain(written.messages), prompt=plain(written.prompt),
            sampled=column, logprobs=lps,
            finish="stop", closed=True,
            sampling=SamplingUsed(temperature=1, top_p=1, top_k=0, min_p=0, max_tokens=8),
            engine=EngineFacts(name="e", replica="r", model="m"),
        )  # fmt: skip
        self.bodies.append(encode(event))
        self.links[name], self.prompts[name], self.sampled[name] = written.link, p, s
        self.messages[name] = tuple(messages)
        return event

    def events(self) -> list[CompletionCaptured]:
        return [e for e in map(decode, self.bodies) if isinstance(e, CompletionCaptured)]

    def check(self) -> None:
        events = self.events()
        needed = {r.sha256 for r in blobs_needed(events)}
        assert needed <= set(self.blobs)
        resolved = resolve_session(events, {k: self.blobs[k] for k in needed})
        assert list(resolved) == list(self.prompts)
        names = list(resolved)
        random.Random(1).shuffle(names)
        for name in names:
            item = resolved[name]
            np.testing.assert_array_equal(item.prompt, self.prompts[name])
            np.testing.assert_array_equal(item.sampled, self.sampled[name])
            np.testing.assert_array_equal(item.context, np.concatenate((self.prompts[name], self.sampled[name])))
            assert item.logprobs is not None and len(item.logprobs) == len(self.sampled[name])
            assert item.messages == self.messages[name]
            assert item.head.tools == (ToolSpec("bash", "runs"),)


def conversation(log: Log, turns: int, tail: int = 8, sampled: int = 4, seed: int = 0) -> None:
    rng = random.Random(seed)
    ids: list[int] = []
    messages: list[Message | Echo] = []
    base = ""
    for turn in range(turns):
        shared = len(messages)
        if base:
            messages.append(Echo(base))
        messages.append(user(f"turn {turn}"))
        ids += [rng.randrange(50_000) for _ in range(tail)]
        answer = [rng.randrange(50_000) for _ in range(sampled)]
        log.add(f"c{turn}", ids, answer, messages, base, shared)
        ids = ids + answer
        base = f"c{turn}"
        messages = list(messages)


def test_a_long_conversation_resolves_and_stores_each_id_once() -> None:
    log = Log()
    conversation(log, 200, tail=600, sampled=40)
    log.check()
    stored = sum(e.prompt.new.n + e.sampled.n for e in log.events())
    assert stored == 200 * 640
    assert max(link.links for link in log.links.values()) <= records.MAX_LINKS
    assert max(link.message_links for link in log.links.values()) <= records.MAX_LINKS
    assert sum(len(e.messages.new) for e in log.events()) == 2 * 200 - 1


def test_siblings_share_the_parent_and_an_edit_shares_what_is_equal() -> None:
    log = Log()
    start: list[Message | Echo] = [user("a")]
    log.add("c0", [1, 2, 3], [9, 9], start, "", 0)
    follow: list[Message | Echo] = [*start, Echo("c0"), user("b")]
    log.add("c1", [1, 2, 3, 9, 9, 4], [5], follow, "c0", 1)
    log.add("c2", [1, 2, 3, 9, 9, 4], [6], follow, "c0", 1)
    log.add("c3", [1, 2, 3, 9, 8, 8], [6], [*start, user("c")], "c1", 1)
    log.add("c4", [1, 2, 3, 9, 8, 8, 6, 7], [1], [*start, user("c"), Echo("c3")], "c3", 2)
    log.check()
    assert [e.prompt.base for e in log.events()] == ["", "c0", "c0", "c1", "c3"]
    assert [e.prompt.new.n for e in log.events()] == [3, 1, 1, 2, 1]


def test_a_base_that_is_mostly_not_shared_is_not_referred_to() -> None:
    log = Log()
    log.add("c0", list(range(1000)), [1], [user("a")], "", 0)
    log.add("c1", list(range(10)), [1], [user("a")], "c0", 1)
    log.check()
    assert log.events()[1].prompt.base == ""


def test_large_columns_and_messages_go_to_blobs() -> None:
    log = Log()
    rng = random.Random(3)
    ids = [rng.randrange(150_000) for _ in range(20_000)]
    noise = "".join(rng.choice("abcdefghijklmnop") for _ in range(40_000))
    log.add("c0", ids, [1, 2], [user(noise)], "", 0)
    event = log.events()[0]
    assert event.prompt.new.blob is not None and event.messages.blob is not None
    log.check()
    with pytest.raises(BlobError, match="missing"):
        resolve_session([event], {})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_tree_of_calls_resolves(data: st.DataObject) -> None:
    log = Log()
    for number in range(data.draw(st.integers(1, 45))):
        base = data.draw(st.sampled_from(["", *log.prompts])) if number else ""
        if base:
            context = [*log.prompts[base].tolist(), *log.sampled[base].tolist()]
            keep = data.draw(st.sampled_from([len(context), data.draw(st.integers(0, len(context)))]))
            said = log.messages[base]
            shared = data.draw(st.sampled_from([len(said), data.draw(st.integers(0, len(said)))]))
        else:
            context, keep, said, shared = [], 0, (), 0
        prompt = context[:keep] + data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
        answer = data.draw(st.lists(st.integers(0, 3), max_size=3))
        log.add(f"c{number}", prompt, answer, [*said[:shared], user(f"m{number}")], base, shared)
    log.check()


def test_a_reference_to_nothing_earlier_names_the_completion() -> None:
    log = Log()
    conversation(log, 3)
    events = log.events()
    with pytest.raises(TraceError, match=r"c1 refers to c0"):
        resolve_session(events[1:], log.blobs)
    with pytest.raises(TraceError, match=r"c0 was captured twice"):
        resolve_session([events[0], events[0]], log.blobs)
    other = events[1].model_copy(update={"attempt": 2})
    with pytest.raises(TraceError, match="no earlier completion of its attempt"):
        resolve_session([events[0], other], log.blobs)


def test_lengths_that_disagree_are_found() -> None:
    log = Log()
    conversation(log, 2)
    first, second = log.events()
    short = second.prompt.model_copy(update={"length": 3})
    with pytest.raises(TraceError, match="says 3"):
        resolve_session([first, second.model_copy(update={"prompt": short})], {})
    far = second.prompt.model_copy(update={"shared": 99})
    with pytest.raises(TraceError, match="fewer than 99"):
        resolve_session([first, second.model_copy(update={"prompt": far})], {})
