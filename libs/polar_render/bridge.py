"""The template bridge: exact continuation for any model whose chat template appends.

The tail after an answer is the rendering of a short history `[user, assistant PLACEHOLDER, new messages]` cut after
the placeholder's end-of-turn; only the tail is tokenised, so a continued call costs its new tokens alone. The
placeholder carries the names and ids of the answer's calls, since tool results may be rendered by them. `proof.py`
shows at start for which shapes that equals the full rendering, and whether the history must be the whole one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from polar_common.errors import RenderError

from .base import Answer, Head, Proof, Provenance, StreamParser
from .discover import find_end, find_shape
from .features import Features, needs
from .jinja import Template, TemplateValue
from .messages import Json, Message, Text, ToolCall, dump
from .parsing import TaggedParser, Tags, ToolFormat
from .proof import keeps_thinking, prove, reads_back
from .shape import Shape, call_names, prompt_text, to_chat, to_tools
from .vocabulary import Vocabulary

__all__ = ["Bridging", "ChatText", "TemplateRenderer", "missing", "split_prefill"]

PLACEHOLDER = "qPolarPlaceholderq"
_OPENING = Message("user", (Text("x"),))


@dataclass(frozen=True, slots=True)
class Bridging:
    """How tails are made: with the whole history or a short one, with the tools shown meanwhile or not.

    `in_call`: where the answer has calls, the placeholder stands in the last one's arguments, for there are templates
    that drop the text beside a call, and turns whose calls follow the text's own end; otherwise in the text, for there
    are templates that drop calls.
    """

    whole: bool = False
    tools: bool = False
    in_call: bool = True


class ChatText:
    """Messages to text, by a template."""

    def __init__(self, template: Template, shape: Shape) -> None:
        self._template = template
        self.shape = shape

    def __call__(
        self,
        messages: Sequence[Message],
        head: Head,
        *,
        generate: bool,
        names: dict[str, str] | None = None,
    ) -> str:
        chat = to_chat(messages, self.shape, names)
        args: dict[str, TemplateValue] = dict(head.template_args)
        return self._template(chat, to_tools(head.tools), args, generate=generate)


def split_prefill(messages: Sequence[Message], prefill: bool) -> tuple[Sequence[Message], str]:
    """The messages before an unfinished assistant turn, and its text."""
    if not prefill:
        return messages, ""
    where = f"messages[{len(messages) - 1}]"
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant":
        raise RenderError(f"{where}: only an assistant turn can be continued")
    if last.tool_calls or last.thinking:
        raise RenderError(f"{where}: an unfinished turn can hold text only")
    return messages[:-1], prompt_text(last, where)


_WAYS = tuple(
    Bridging(whole, tools, in_call)
    for in_call in (True, False)
    for whole, tools in ((False, False), (False, True), (True, True))
)
"""The cheapest first."""


def _placeholder(answer: Message, in_call: bool) -> Message:
    calls = [ToolCall(c.id, c.name, "{}", c.namespace) for c in answer.tool_calls]
    if not calls or not in_call:
        return Message("assistant", (Text(PLACEHOLDER), *calls))
    last = calls[-1]
    calls[-1] = ToolCall(last.id, last.name, f'{{"q": "{PLACEHOLDER}"}}', last.namespace)
    return Message("assistant", tuple(calls))


def missing(messages: Sequence[Message], text: str, normalized: Callable[[str], str] = str) -> str:
    """The first message whose text isn't in the rendering, in order: `messages[i]`; "" if all are there.

    `normalized` is what the tokenizer makes of a text, where the rendering has been through it.
    """
    at = 0
    for number, message in enumerate(messages):
        wanted = normalized(prompt_text(message, "").strip())
        found = text.find(wanted, at)
        if found < 0:
            found = text.find(json.dumps(wanted, ensure_ascii=False)[1:-1], at)
        if found < 0:
            return f"messages[{number}]"
        at = found + len(wanted) if message.role != "assistant" else at
        if any(call.name not in text for call in message.tool_calls):
            return f"messages[{number}]"
    return ""


class TemplateRenderer:
    """A `Renderer` over a chat template. `prove()` is computed when it is made."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: Template,
        source: str,
        stop_ids: Sequence[int],
        provenance: Provenance,
        keep_thinking: bool = True,
        tool_format: ToolFormat | None = None,
        late_system: str = "",
    ) -> None:
        self.vocabulary = vocabulary
        self._provenance = provenance
        self._keep = keep_thinking
        self._source = source
        self._tags: dict[bytes, Tags] = {}
        self._stop_ids = tuple(stop_ids)

        def write(chat: list[dict[str, TemplateValue]]) -> str:
            return template(chat, None, {}, generate=False)

        self.chat = ChatText(template, replace(find_shape(write), late_system=late_system))
        self._end, self._end_id = find_end(write, self.chat.shape, vocabulary)
        self._format = tool_format or self._find_format()
        self._bridging = Bridging()
        self._features = self._examine()

    def _find_format(self) -> ToolFormat:
        """The format in which the template itself writes calls; `hermes` where none reads them back."""
        formats: tuple[ToolFormat, ...] = ("hermes", "qwen3_coder")
        for self._format in formats:
            if not reads_back(self):
                return self._format
        return formats[0]

    def _examine(self) -> Features:
        """Proves the cheapest way to make tails that works for all shapes, or else the one that works for most."""
        best: Features | None = None
        chosen = self._bridging
        for how in _WAYS:
            self._bridging = how
            found = Features(prove(self), "full" if how.whole else "short")
            if best is None or found.failures < best.failures:
                best, chosen = found, how
            if not found.failures:
                break
        self._bridging = chosen
        assert best is not None
        return best

    @property
    def provenance(self) -> Provenance:
        return self._provenance

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    @property
    def close_ids(self) -> tuple[int, ...]:
        return (self._end_id,) if self._end_id >= 0 else ()

    def full(self, messages: Sequence[Message], head: Head, *, generate: bool, prefill: bool = False) -> list[int]:
        """The full rendering whatever the proof says: it is what the proof compares with."""
        before, unfinished = split_prefill(messages, prefill)
        return self.vocabulary.encode(self.chat(before, head, generate=generate) + unfinished)

    def render(self, messages: Sequence[Message], head: Head, *, prefill: bool = False) -> list[int]:
        before, unfinished = split_prefill(messages, prefill)
        self._features.require(before, head, prefill)
        text = self.chat(before, head, generate=True)
        if lost := missing(before, text):
            raise RenderError(f"{lost}: the template drops this message")
        return self.vocabulary.encode(text + unfinished)

    def tail(
        self, history: Sequence[Message], answer: Message, new: Sequence[Message], head: Head, *, prefill: bool = False
    ) -> list[int] | None:
        """See `Renderer.tail`. `prefill`: the last new message is an assistant turn to be continued."""
        if not self._features.allow(needs(answer, new, prefill)):
            return None
        if not self._keep and not keeps_thinking(self, (*history, answer), new, head):
            return None
        try:
            return self.bridge(history, answer, new, head, prefill=prefill)
        except RenderError:
            return None

    def bridge(
        self, history: Sequence[Message], answer: Message, new: Sequence[Message], head: Head, *, prefill: bool = False
    ) -> list[int] | None:
        """The tail whatever the proof says: it is what the proof examines."""
        messages, unfinished = split_prefill(new, prefill)
        how = self._bridging
        names = call_names((*(history if how.whole else ()), answer))
        before = [*(history if how.whole else [_OPENING]), _placeholder(answer, how.in_call)]
        shown = head if how.tools or not head.tools else Head((), head.response_format, head.template_args)
        text = self.chat([*before, *messages], shown, generate=True, names=names)
        at = text.find(PLACEHOLDER)
        at = text.find(self._end, at) if at >= 0 and self._end else -1
        if at < 0 or text.count(PLACEHOLDER) != 1:
            return None
        tail = text[at:]
        if missing(messages, tail):
            return None
        ids = self.vocabulary.encode(tail + unfinished)
        return ids[1:] if ids and ids[0] == self._end_id else None

    def parse(self, ids: Sequence[int], head: Head, *, prefill: str = "") -> Answer:
        parser = self.parser(head, prefill=prefill)
        parser.feed(ids)
        parser.finish()
        return parser.answer()

    def parser(self, head: Head, *, prefill: str = "") -> StreamParser:
        tags = self._thinking_tags(head.template_args)
        return TaggedParser(self.vocabulary, self._stop_ids, head, tags, self._format, prefill)

    def _thinking_tags(self, args: dict[str, Json]) -> Tags:
        """Whether an answer may begin with thinking, or the generation prompt has already begun it."""
        key = dump(args) if args else b""
        if (tags := self._tags.get(key)) is None:
            opened = self.chat([_OPENING], Head(template_args=args), generate=True).rstrip().endswith("<think>")
            known = "<think>" in self._source or "<think>" in self.vocabulary.added
            tags = self._tags[key] = "open" if opened else "allowed" if known else "none"
        return tags

    def decode(self, ids: Sequence[int]) -> str:
        return self.vocabulary.decode(ids)

    def decode_tokens(self, ids: Sequence[int]) -> list[str]:
        return self.vocabulary.decode_tokens(ids)

    def control_tokens(self, text: str) -> list[str]:
        return self.vocabulary.control_tokens(text)

    def prove(self) -> Proof:
        return self._features.proof
