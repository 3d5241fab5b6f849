"""Responses answers as a stream of events with sequence numbers.

Items follow one another. Clients keep and execute finished items even of a broken stream, so every
`response.output_item.done` is actionable; pieces of text, reasoning and arguments are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from polar_common.errors import PolarError
from polar_proxy.dialects import sequence
from polar_proxy.dialects.base import ChatRequest, Frame, Minted, Reply, Usage
from polar_proxy.dialects.faults import fault
from polar_proxy.dialects.fields import Json, Obj
from polar_proxy.dialects.openai_responses.response import (
    call_item,
    failure,
    message_item,
    reasoning_item,
    response_json,
)
from polar_render.base import AnswerEvent, ToolCallStarted
from polar_render.messages import ToolCall

__all__ = ["ResponsesEncoder"]

_dumps = orjson.dumps
_DELTAS = {
    "text": "response.output_text.delta",
    "thinking": "response.reasoning_summary_text.delta",
    "tool": "response.function_call_arguments.delta",
}


class ResponsesEncoder:
    """One streamed response."""

    def __init__(self, request: ChatRequest, minted: Sequence[Minted]) -> None:
        self._request = request
        self._minted = minted[0]
        self._order = sequence.Sequence()
        self._number = 0
        self._output: list[Json] = []
        self._thoughts = 0
        self._pieces: list[str] = []
        self._call: ToolCallStarted | None = None
        self._delta_head = b""
        self._status = "completed"

    def _event(self, name: str, data: Obj, *, actionable: bool = False) -> Frame:
        body = _dumps({"type": name, "sequence_number": self._number, **data})
        self._number += 1
        return Frame(b"event: " + name.encode() + b"\ndata: " + body + b"\n\n", actionable)

    def start(self, usage: Usage) -> list[Frame]:
        response = _dumps(response_json(self._request, self._minted, "in_progress", [], None))
        frames = []
        for name in (b"response.created", b"response.in_progress"):
            head = b'event: %b\ndata: {"type":"%b","sequence_number":%d,"response":' % (name, name, self._number)
            frames.append(Frame(head + response + b"}\n\n"))
            self._number += 1
        return frames

    def feed(self, event: AnswerEvent, choice: int = 0) -> list[Frame]:
        return [frame for step in self._order.feed(event) for frame in self._frames(step)]

    def _frames(self, step: sequence.Step) -> list[Frame]:
        if isinstance(step, sequence.Piece):
            return self._piece(step)
        if isinstance(step, sequence.Opened):
            return self._opened(step)
        return self._closed(step)

    def _piece(self, step: sequence.Piece) -> list[Frame]:
        self._pieces.append(step.text)
        if not step.text:
            return []
        data = self._delta_head + _dumps(step.text) + b',"sequence_number":%d}\n\n' % self._number
        self._number += 1
        return [Frame(data)]

    def _place(self) -> Obj:
        index = len(self._output)
        return {"item_id": self._minted.item_id(index), "output_index": index}

    def _spot(self, kind: sequence.Kind) -> Obj:
        """Where pieces of this kind go: the item, and the part within it."""
        if kind == "tool":
            return self._place()
        return {**self._place(), ("content_index" if kind == "text" else "summary_index"): 0}

    def _opened(self, step: sequence.Opened) -> list[Frame]:
        self._pieces, self._call = [], step.call
        custom = step.call is not None and step.call.custom
        name = "response.custom_tool_call_input.delta" if custom else _DELTAS[step.kind]
        head = b"event: " + name.encode() + b"\ndata: " + _dumps({"type": name, **self._spot(step.kind)})[:-1]
        self._delta_head = head + (b',"logprobs":[],"delta":' if step.kind == "text" else b',"delta":')
        item = self._item(step.kind, "", "in_progress")
        if step.kind == "text":
            item["content"] = []
        frames = [self._event("response.output_item.added", {"output_index": len(self._output), "item": item})]
        if step.kind == "text":
            frames.append(self._part("response.content_part.added", ""))
        elif step.kind == "thinking":
            frames.append(self._part("response.reasoning_summary_part.added", ""))
        return frames

    def _part(self, name: str, text: str) -> Frame:
        if "reasoning" in name:
            part: Obj = {"type": "summary_text", "text": text}
            return self._event(name, {**self._spot("thinking"), "part": part})
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return self._event(name, {**self._spot("text"), "part": part})

    def _item(self, kind: sequence.Kind, text: str, status: str) -> Obj:
        index = len(self._output)
        item_id = self._minted.item_id(index)
        if kind == "text":
            return message_item(item_id, text, status)
        if kind == "thinking":
            return reasoning_item(item_id, text, self._minted.signature(self._thoughts))
        if self._call is None:
            raise AssertionError("a tool item without its call")
        call = self._call
        spec = ToolCall(self._minted.tool_id(call.index), call.name, text, call.namespace, call.custom)
        return call_item(item_id, spec, status)

    def _closed(self, step: sequence.Closed) -> list[Frame]:
        text = "".join(self._pieces)
        cut = step.cut and self._status == "incomplete"
        item = self._item(step.kind, text, "incomplete" if cut else "completed")
        frames = self._ending(step.kind, text)
        done: Obj = {"output_index": len(self._output), "item": item}
        frames.append(self._event("response.output_item.done", done, actionable=True))
        self._output.append(item)
        self._thoughts += step.kind == "thinking"
        self._call = None
        return frames

    def _ending(self, kind: sequence.Kind, text: str) -> list[Frame]:
        spot = self._spot(kind)
        if kind == "text":
            done = self._event("response.output_text.done", {**spot, "text": text, "logprobs": []})
            return [done, self._part("response.content_part.done", text)]
        if kind == "thinking":
            done = self._event("response.reasoning_summary_text.done", {**spot, "text": text})
            return [done, self._part("response.reasoning_summary_part.done", text)]
        if self._call is not None and self._call.custom:
            return [self._event("response.custom_tool_call_input.done", {**spot, "input": text})]
        name = self._call.name if self._call is not None else ""
        return [self._event("response.function_call_arguments.done", {**spot, "name": name, "arguments": text})]

    def finish(self, reply: Reply, choice: int = 0) -> list[Frame]:
        if reply.finish == "length":
            self._status = "incomplete"
        return [frame for step in self._order.finish() for frame in self._frames(step)]

    def end(self, usage: Usage) -> list[Frame]:
        response = response_json(self._request, self._minted, self._status, self._output, usage)
        return [self._event(f"response.{self._status}", {"response": response}, actionable=True)]

    def fail(self, error: PolarError) -> list[Frame]:
        # Finished items were held back: nothing of this answer may be acted upon.
        response = response_json(self._request, self._minted, "failed", [], None)
        response["error"] = failure(fault(error))
        return [self._event("response.failed", {"response": response}, actionable=True)]

    def keepalive(self) -> bytes:
        return b": keepalive\n\n"
