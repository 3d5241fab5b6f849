"""Finds out how a chat template wants its messages and how it ends a turn, by rendering probes with it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from polar_common.errors import RenderError

from .base import Head
from .jinja import Template
from .messages import Message, Text, Thinking, ToolCall
from .shape import Shape, to_chat
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["find_end", "find_shape"]

_ASK = Message("user", (Text("elmask"),))


def _text(template: Template, shape: Shape, messages: Sequence[Message], head: Head = Head()) -> str:
    """The rendering, or "" where the template refuses."""
    try:
        return template(to_chat(messages, shape), None, dict(head.template_args), generate=False)
    except RenderError:
        return ""


def find_shape(template: Template) -> Shape:
    """The shape under which the template shows most: arguments' bytes, developer messages, thinking."""
    shape = Shape(raw_arguments=True)
    call = Message("assistant", (ToolCall("c1", "elmtool", '{"elmkey":   "elmvalue"}'),))
    result = Message("tool", (Text("elmresult"),), call_id="c1")
    if '{"elmkey":   "elmvalue"}' not in _text(template, shape, [_ASK, call, result]):
        shape = replace(shape, raw_arguments=False)
    if "elmdev" not in _text(template, shape, [Message("developer", (Text("elmdev"),)), _ASK]):
        shape = replace(shape, developer="system")
    thought = Message("assistant", (Thinking("elmthought"), *call.parts))
    for field in ("reasoning_content", "reasoning", "thinking"):
        candidate = replace(shape, reasoning=field)
        if "elmthought" in _text(template, candidate, [_ASK, thought, result]):
            return candidate
    return shape


def find_end(template: Template, shape: Shape, vocabulary: Vocabulary) -> tuple[str, int]:
    """The token that the template writes after an assistant's text, and its id; ("", -1) if it writes none.

    Only blanks may stand between the text and the token.
    """
    said = Message("assistant", (Text("elmsaid"),))
    for messages in ([_ASK, said], [_ASK, said, _ASK]):
        text = _text(template, shape, messages)
        rest = text[text.rfind("elmsaid") + len("elmsaid") :].lstrip() if "elmsaid" in text else ""
        matches = [t for t in vocabulary.added if rest.startswith(t)]
        if matches:
            end = max(matches, key=len)
            return end, vocabulary.added[end]
    return "", -1
