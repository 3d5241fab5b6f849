"""Finds out how a chat format wants its messages and how it ends a turn, by rendering probes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from polar_common.errors import RenderError

from .jinja import TemplateValue
from .messages import Message, Text, Thinking, ToolCall
from .shape import Shape, to_chat
from .vocabulary import Vocabulary

__all__ = ["Writer", "find_end", "find_shape"]

Writer = Callable[[list[dict[str, TemplateValue]]], str]
"""Renders chat dicts without tools and generation prompt; raises RenderError where it refuses."""

_ASK = Message("user", (Text("elmask"),))


def _text(write: Writer, shape: Shape, messages: Sequence[Message]) -> str:
    """The rendering, or "" where the format refuses."""
    try:
        return write(to_chat(messages, shape))
    except RenderError:
        return ""


def find_shape(write: Writer) -> Shape:
    """The shape under which the format shows most: arguments' bytes, developer messages, thinking."""
    shape = Shape(raw_arguments=True)
    call = Message("assistant", (ToolCall("c1", "elmtool", '{"elmkey":   "elmvalue"}'),))
    result = Message("tool", (Text("elmresult"),), call_id="c1")
    if '{"elmkey":   "elmvalue"}' not in _text(write, shape, [_ASK, call, result]):
        shape = replace(shape, raw_arguments=False)
    if "elmdev" not in _text(write, shape, [Message("developer", (Text("elmdev"),)), _ASK]):
        shape = replace(shape, developer="system")
    thought = Message("assistant", (Thinking("elmthought"), *call.parts))
    for field in ("reasoning_content", "reasoning", "thinking"):
        candidate = replace(shape, reasoning=field)
        if "elmthought" in _text(write, candidate, [_ASK, thought, result]):
            return candidate
    return shape


def find_end(write: Writer, shape: Shape, vocabulary: Vocabulary) -> tuple[str, int]:
    """The token that the format writes after an assistant's text, and its id; ("", -1) if it writes none.

    Only blanks may stand between the text and the token.
    """
    said = Message("assistant", (Text("elmsaid"),))
    text = _text(write, shape, [_ASK, said])
    rest = text[text.rfind("elmsaid") + len("elmsaid") :].lstrip() if "elmsaid" in text else ""
    end = max((t for t in vocabulary.added if rest.startswith(t)), key=len, default="")
    return (end, vocabulary.added[end]) if end else ("", -1)
