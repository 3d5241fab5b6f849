"""Responses input items: a flat list of items to messages.

An assistant turn is spread over several items here (reasoning, text, calls). Neighbouring ones are one turn, unless ids
that we minted say that they come from different completions; a call that a client filed behind the result of its
sibling rejoins its turn by the same ids.
"""

from __future__ import annotations

from polar_proxy.dialects import fields as f
from polar_proxy.dialects.base import completion_of
from polar_proxy.dialects.openai_responses.tools import tool_specs
from polar_proxy.dialects.pictures import located
from polar_render.messages import Message, Part, Role, Text, Thinking, ToolCall, ToolSpec

__all__ = ["Items"]

_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system", "developer": "developer"}
_MESSAGE = f.keys("type id role content status")
_PART = f.keys("type text image_url detail refusal")
_CALL = f.keys("type id call_id name namespace arguments input status")
_OUTPUT = f.keys("type id call_id output status")
_REASONING = f.keys("type id summary content encrypted_content status")
_HOSTED = ("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "mcp_call",
           "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_call",
           "tool_search_output")  # fmt: skip


class _Turn:
    """An assistant turn that may still grow."""

    __slots__ = ("completion", "item_id", "parts")

    def __init__(self, completion: str, item_id: str) -> None:
        self.completion = completion
        self.item_id = item_id
        self.parts: list[Part] = []


class Items:
    """Reads the items of one request. `tools` are those that came as items."""

    def __init__(self, seen: f.Seen) -> None:
        self._seen = seen
        self._out: list[Message | _Turn] = []
        self.tools: list[ToolSpec] = []

    def messages(self) -> list[Message]:
        return [
            Message("assistant", tuple(one.parts), item_id=one.item_id) if isinstance(one, _Turn) else one
            for one in self._out
        ]

    def read(self, item: f.Obj, path: str) -> None:
        kind = f.text_or_none(item, "type", path) or "message"
        if kind == "message":
            self._message(item, path)
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, path, custom=kind == "custom_tool_call")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._output(item, path)
        elif kind == "reasoning":
            self._reasoning(item, path)
        elif kind == "additional_tools":
            self._seen.extra(item, f.keys("type id role tools"), "input[*]")
            self.tools += tool_specs(item, self._seen, path)
        elif kind in _HOSTED:
            self._seen.add(f"input[?type=='{kind}']")
        elif kind == "item_reference":
            raise f.bad(path, "references to stored items can't be resolved; send the item itself (store: false)")
        else:
            raise f.bad(f"{path}.type", f"unknown item type {kind!r}")

    def _turn(self, completion: str, item_id: str) -> _Turn:
        for one in reversed(self._out):
            if isinstance(one, _Turn):
                adjacent = one is self._out[-1]
                same = one.completion == completion if completion else adjacent
                if same or (adjacent and not one.completion):
                    one.completion = one.completion or completion
                    return one
                break
            if one.role != "tool":
                break
        turn = _Turn(completion, item_id)
        self._out.append(turn)
        return turn

    def _message(self, item: f.Obj, path: str) -> None:
        self._seen.extra(item, _MESSAGE, "input[*]")
        told = f.text(item, "role", path)
        role = _ROLES.get(told)
        if role is None:
            raise f.bad(f"{path}.role", f"unknown role {told!r}")
        item_id = f.text_or_none(item, "id", path) or ""
        parts = self._content(item, "content", path, "input[*].content[*]")
        if role == "assistant":
            self._turn(completion_of(item_id), item_id).parts += parts
        else:
            self._out.append(Message(role, tuple(parts), item_id=item_id))

    def _content(self, item: f.Obj, key: str, path: str, within: str) -> list[Part]:
        content = item.get(key)
        if type(content) is str:
            return [Text(content)]
        if type(content) is not list:
            raise f.bad(f"{path}.{key}", "must be a string or an array of content parts")
        return [self._part(part, f"{path}.{key}[{i}]", within) for i, part in enumerate(f.objects(item, key, path))]

    def _part(self, part: f.Obj, path: str, within: str) -> Part:
        kind = f.text(part, "type", path)
        self._seen.extra(part, _PART, within)
        if kind in ("input_text", "output_text", "text"):
            return Text(f.text(part, "text", path))
        if kind == "refusal":
            return Text(f.text(part, "refusal", path))
        if kind == "input_image":
            url = f.text_or_none(part, "image_url", path)
            if not url:
                raise f.bad(f"{path}.image_url", "is required; there is no file store")
            return located(url, f"{path}.image_url", f.text_or_none(part, "detail", path) or "")
        raise f.bad(f"{path}.type", f"unknown content part type {kind!r}; this model takes text and images")

    def _call(self, item: f.Obj, path: str, *, custom: bool) -> None:
        self._seen.extra(item, _CALL, "input[*]")
        item_id, call_id = f.text_or_none(item, "id", path) or "", f.text(item, "call_id", path)
        arguments = f.text_or_none(item, "input" if custom else "arguments", path) or ""
        namespace = f.text_or_none(item, "namespace", path) or ""
        turn = self._turn(completion_of(call_id) or completion_of(item_id), item_id)
        turn.parts.append(ToolCall(call_id, f.text(item, "name", path), arguments, namespace, custom))

    def _output(self, item: f.Obj, path: str) -> None:
        self._seen.extra(item, _OUTPUT, "input[*]")
        call_id, item_id = f.text(item, "call_id", path), f.text_or_none(item, "id", path) or ""
        output = item.get("output")
        if type(output) is dict:
            parts: list[Part] = [Text(f.compact(output))]
        else:
            parts = self._content(item, "output", path, "input[*].output[*]")
        self._out.append(Message("tool", tuple(parts), call_id=call_id, item_id=item_id))

    def _reasoning(self, item: f.Obj, path: str) -> None:
        self._seen.extra(item, _REASONING, "input[*]")
        item_id = f.text_or_none(item, "id", path) or ""
        sealed = f.text_or_none(item, "encrypted_content", path) or ""
        texts = []
        for key in ("content", "summary"):
            for index, part in enumerate(f.objects(item, key, path)):
                texts.append(f.text(part, "text", f"{path}.{key}[{index}]"))
            if texts:
                break
        if not texts and not sealed:
            self._seen.add("input[?type=='reasoning']")
            return
        turn = self._turn(completion_of(sealed) or completion_of(item_id), item_id)
        turn.parts.append(Thinking("\n\n".join(texts), sealed))
