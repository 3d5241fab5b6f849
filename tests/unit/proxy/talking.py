"""A session without a server: requests in, plans and captured nodes out, the log's bytes kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plain_renderer import PlainRenderer, ids

from polar_common.events import CompletionCaptured, EngineFacts, decode
from polar_common.keys import SessionKey
from polar_common.task_spec import SamplingSpec
from polar_proxy.capture import CallFacts, Captured, build, engine_json
from polar_proxy.context.nodes import Node, SessionIndex
from polar_proxy.context.prompt import Plan, head_of, plan
from polar_proxy.dialects.base import ChatRequest, Hints, Sampling
from polar_proxy.engines.base import Capabilities, Chunk
from polar_proxy.sample import Sampling as Collected
from polar_proxy.sampling import sampling_used
from polar_render.canonical import head_key
from polar_render.messages import Message, Part, Text, ToolSpec

KEY = SessionKey(session="s1-abc-0", task="s1-abc", run="r", attempt=1, model="policy", expires=1)
ENGINE = engine_json(EngineFacts(name="vllm", replica="e0", model="policy"))


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def said(*parts: Part | str) -> Message:
    return Message("assistant", tuple(Text(p) if isinstance(p, str) else p for p in parts))


def result(call_id: str, text: str = "done") -> Message:
    return Message("tool", (Text(text),), call_id=call_id)


class Talk:
    """One attempt. `renderer` may be exchanged between calls."""

    def __init__(self, renderer: PlainRenderer | None = None, *, keep: bool = True) -> None:
        self.renderer = renderer or PlainRenderer()
        self.keep = keep
        self.index = SessionIndex()
        self.events: list[tuple[int, CompletionCaptured]] = []
        self.blobs: dict[str, bytes] = {}
        self.last: Plan | None = None

    def request(self, *messages: Message, **more: Any) -> ChatRequest:
        tools = tuple(ToolSpec(name) for name in more.pop("tools", ()))
        raw = more.pop("raw_hash", repr((messages, tools)))
        return ChatRequest("openai_chat", "m", messages, tools=tools, raw_hash=raw, **more)

    def plan(self, request: ChatRequest) -> Plan:
        head = head_of(request)
        self.last = plan(self.index, request, self.renderer, head, head_key(head), keep=self.keep)
        return self.last

    def call(
        self, *messages: Message, answer: str = "ok|", finish: str = "stop", stop: Any = None, **more: Any
    ) -> Node:
        """One captured call; `answer` is what the engine samples, `|` being the end of the turn."""
        made = self.plan(self.request(*messages, **more))
        return self.capture(made, answer, finish, stop).node

    def capture(self, made: Plan, answer: str, finish: str = "stop", stop: Any = None, choice: int = 0) -> Captured:
        number = len(self.events)
        used = sampling_used(
            SamplingSpec(), made.request.sampling, tokens=99, session="s", request_hash="h", repeat=0, choice=0
        )
        collected = Collected(self.renderer.parser(made.head), used.stop)
        sampled = ids(answer)
        collected.take(
            Chunk(sampled, [-0.5] * len(sampled), finish=finish, stop_reason=stop, prompt_ids=made.prompt.tolist())  # type: ignore[arg-type]
        )
        sample, _ = collected.finish(fed=False)
        facts = CallFacts(
            f"{number:032x}", KEY, "proxy/t", used, ENGINE, Capabilities("policy", "vllm"), 0, "", 1000.5, choice=choice
        )
        item = build(self.index, made, sample, facts, self.renderer)
        for ref, body in item.blobs:
            self.blobs[ref.sha256] = body
        item.node.sequence = number + 1
        self.index.add(item.node)
        event = decode(item.body)
        assert isinstance(event, CompletionCaptured)
        self.events.append((number + 1, event))
        return item

    def hinted(self, **hints: Any) -> Hints:
        return replace(Hints(), **hints)


__all__ = ["KEY", "Sampling", "Talk", "result", "said", "user"]
