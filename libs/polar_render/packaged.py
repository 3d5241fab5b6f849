"""The hand-coded formats of the `renderers` package, behind our own contract and our own proof.

The package knows how published models want their conversations; it renders, parses and bridges on ids. Its bridge is
asked for `thinking_retention="all"`, since its default bridges no new user message; where thinking is to follow the
model's own rule, its full rendering tells whether that rule keeps it. Whatever it can't do (`None` from its bridge, a
tail that isn't what it renders in full) fails the proof like a template would.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from polar_common.errors import ConfigError, RenderError

from .base import (
    Answer,
    AnswerEvent,
    Finished,
    Head,
    Proof,
    Provenance,
    StreamParser,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStarted,
)
from .bridge import missing, split_prefill
from .discover import find_shape
from .features import Features, needs
from .jinja import TemplateValue
from .messages import Json, Message, Part, Text, Thinking, ToolCall, dump
from .parsing import TaggedParser, Tags, ToolFormat, custom_input
from .proof import keeps_thinking, prove, reads_back
from .shape import Shape, call_names, to_chat, to_tools, tool_names
from .vocabulary import Vocabulary

__all__ = ["PackagedRenderer", "known_name"]

_OPENING = Message("user", (Text("x"),))
_SAID = Message("assistant", (Text("x"),))

# The package is untyped; its objects stay inside this module.
_Package = Any
_Use = Literal["render", "bridge"]


def known_name(model: str) -> str:
    """The package's renderer for a published model's full name, "" if it knows none."""
    if "/" not in model:
        return ""
    from renderers.base import MODEL_RENDERER_MAP

    return str(MODEL_RENDERER_MAP.get(model, ""))


class _Tokenizer:
    """What the package asks of a tokenizer. It offers no offsets, which spares the package half of its work."""

    def __init__(self, vocabulary: Vocabulary, name: str, template: str, eos: int | None) -> None:
        self._vocabulary = vocabulary
        self.name_or_path = name
        self.chat_template = template
        self.eos_token_id = eos
        self.unk_token_id = None

    def encode(self, text: str, *_: object, **__: object) -> list[int]:
        return self._vocabulary.encode(text)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **_: object) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        special = self._vocabulary.special_ids if skip_special_tokens else frozenset()
        return self._vocabulary.decode(i for i in ids if i not in special)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self._vocabulary.id_of(tokens)
        return [self._vocabulary.id_of(t) for t in tokens]


class _WholeParser:
    """For formats that only the package reads: it reads whole samples, so every event comes at the end."""

    def __init__(self, package: _Package, prompt: list[int], stop_ids: Sequence[int], head: Head) -> None:
        self._package = package
        self._prompt = prompt
        self._stop = frozenset(stop_ids)
        self._head = head
        self._tools = tool_names(head.tools)
        self._ids: list[int] = []
        self._over = False

    def feed(self, ids: Sequence[int]) -> list[AnswerEvent]:
        was_over, ended = self._over, False
        for token in ids:
            self._ids.append(token)
            ended = ended or token in self._stop
        self._over = was_over or ended
        return self._tell() if self._over and not was_over else []

    def finish(self) -> list[AnswerEvent]:
        if self._over:
            return []
        self._over = True
        return self._tell()

    def _sample(self) -> list[int]:
        end = next((i for i, token in enumerate(self._ids) if token in self._stop), len(self._ids))
        return self._ids[:end]

    def _tell(self) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        index, end = 0, len(self._sample())
        for part in self.answer().parts:
            if isinstance(part, Thinking):
                events.append(ThinkingDelta(part.text))
            elif isinstance(part, Text):
                events.append(TextDelta(part.text))
            elif isinstance(part, ToolCall):
                events.append(ToolCallStarted(index, part.name, part.namespace, part.custom))
                if part.arguments:
                    events.append(ToolCallDelta(index, part.arguments))
                events.append(ToolCallDone(index, end))
                index += 1
        return [*events, Finished()]

    def answer(self) -> Answer:
        try:
            parsed = self._package.parse_response(
                self._sample(), tools=to_tools(self._head.tools), prompt_ids=self._prompt
            )
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise RenderError(f"the package's parser failed: {error}") from error
        parts: list[Part] = []
        if parsed.reasoning_content:
            parts.append(Thinking(parsed.reasoning_content))
        if parsed.content:
            parts.append(Text(parsed.content))
        malformed: list[str] = []
        for call in parsed.tool_calls:
            if call.status != "ok":
                malformed.append(call.raw)
            parts.append(self._call(call) if call.name else Text(call.raw))
        closed = bool(self._ids) and self._ids[-1] in self._stop
        return Answer(tuple(parts), closed, tuple(malformed))

    def _call(self, call: _Package) -> ToolCall:
        arguments = call.arguments
        if call.status != "ok" and not isinstance(arguments, dict):
            text = call.raw
        else:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        tool = self._tools.get(call.name)
        if tool is None:
            return ToolCall(call.id or "", call.name, text)
        if tool.custom:
            raw = custom_input(text)
            text = text if raw is None else raw
        return ToolCall(call.id or "", tool.name, text, tool.namespace, tool.custom)


class PackagedRenderer:
    """A `Renderer` over one of the package's. `prove()` is computed when it is made."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        name: str,
        template: str,
        stop_ids: Sequence[int],
        provenance: Provenance,
        keep_thinking: bool = True,
        late_system: str = "",
    ) -> None:
        import renderers

        self.vocabulary = vocabulary
        self._provenance = provenance
        self._tokenizer = _Tokenizer(vocabulary, provenance.model, template, next(iter(stop_ids), None))
        try:
            plain = renderers.config_from_name(name)
            kept = type(plain).model_validate({"name": plain.name, "thinking_retention": "all"})
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"the renderers package has no usable {name!r}: {error}", "renderer") from error
        self._keep = keep_thinking
        self._configs = {"render": kept if keep_thinking else plain, "bridge": kept}
        self._made: dict[tuple[_Use, bytes], _Package] = {}
        self._prompts: dict[bytes, list[int]] = {}
        self._stubs: dict[bytes, tuple[list[int], list[int]]] = {}
        self._stop_ids = tuple(dict.fromkeys([*self._package("render", {}).get_stop_token_ids(), *stop_ids]))
        self._shape = Shape()
        self._shape = replace(find_shape(self._write), late_system=late_system)
        self._close = self._find_close()
        self._format: ToolFormat | None = self._find_format()
        self._features = Features(prove(self))

    # -- the package's side

    def _package(self, use: _Use, args: Mapping[str, Json]) -> _Package:
        """The package's renderer under template arguments. Raises RenderError on arguments it doesn't know.

        `enable_thinking` alone is what harnesses send to any model: a format that never thinks leaves it unread, as a
        template would.
        """
        import renderers

        known = type(self._configs[use]).template_field_names()
        args = {k: v for k, v in args.items() if k in known or k != "enable_thinking"}
        key = use, dump(dict(args)) if args else b""
        if key not in self._made:
            try:
                self._made[key] = renderers.create_renderer(
                    self._tokenizer, self._configs[use], chat_template_kwargs=dict(args) or None
                )
            except Exception as error:  # a missing token is an assertion there, a missing vocabulary a foreign error
                if args:
                    raise RenderError(f"template arguments: {error}") from error
                raise ConfigError(f"this model's tokenizer doesn't suit it: {error}", "renderer") from error
        return self._made[key]

    def _render(self, chat: list[dict[str, TemplateValue]], head: Head, *, generate: bool) -> list[int]:
        try:
            return list(
                self._package("render", head.template_args).render_ids(
                    chat, tools=to_tools(head.tools), add_generation_prompt=generate
                )
            )
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise RenderError(f"the package's renderer failed: {error}") from error

    def _write(self, chat: list[dict[str, TemplateValue]]) -> str:
        return self.vocabulary.decode(self._render(chat, Head(), generate=False))

    def _find_close(self) -> tuple[int, ...]:
        """What stands behind an answer, blanks aside, if the package stops there.

        Some formats end a turn with the token that opens the next one: these have no close of their own.
        """
        ids = self.full([_OPENING, _SAID], Head(), generate=False)
        last = next((i for i in reversed(ids) if self.vocabulary.text_of_id(i).strip()), -1)
        return (last,) if last in self._stop_ids else ()

    def _find_format(self) -> ToolFormat | None:
        """Our streaming parser where it reads the package's calls back, else the package's own."""
        formats: tuple[ToolFormat, ...] = ("hermes", "qwen3_coder")
        for self._format in formats:
            if not reads_back(self):
                return self._format
        return None

    def _prompt(self, args: Mapping[str, Json]) -> list[int]:
        """Ids of a short prompt; what a sample's parser has to know is how such a prompt ends."""
        key = dump(dict(args)) if args else b""
        if key not in self._prompts:
            self._prompts[key] = self.full([_OPENING], Head(template_args=dict(args)), generate=True)
        return self._prompts[key]

    def _stub(self, args: Mapping[str, Json]) -> tuple[list[int], list[int]]:
        """Ids of a short prompt and of an ended answer to it, as the package writes them."""
        key = dump(dict(args)) if args else b""
        if key not in self._stubs:
            head = Head(template_args=dict(args))
            prompt = self._prompt(args)
            whole = self.full([_OPENING, _SAID], head, generate=False)
            end = max(i for i, token in enumerate(whole) if token in self._close) + 1
            if whole[: len(prompt)] != prompt:
                prompt = whole[: end - 1]
            self._stubs[key] = prompt, whole[len(prompt) : end]
        return self._stubs[key]

    # -- the contract

    @property
    def provenance(self) -> Provenance:
        return self._provenance

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    @property
    def close_ids(self) -> tuple[int, ...]:
        return self._close

    def full(self, messages: Sequence[Message], head: Head, *, generate: bool, prefill: bool = False) -> list[int]:
        """The full rendering whatever the proof says."""
        before, unfinished = split_prefill(messages, prefill)
        ids = self._render(to_chat(before, self._shape), head, generate=generate)
        return ids + self.vocabulary.encode(unfinished) if unfinished else ids

    def render(self, messages: Sequence[Message], head: Head, *, prefill: bool = False) -> list[int]:
        before, _ = split_prefill(messages, prefill)
        self._features.require(before, head, prefill)
        ids = self.full(messages, head, generate=True, prefill=prefill)
        if lost := missing(before, self.vocabulary.decode(ids), self.vocabulary.normalized):
            raise RenderError(f"{lost}: this format drops the message")
        return ids

    def tail(
        self, history: Sequence[Message], answer: Message, new: Sequence[Message], head: Head, *, prefill: bool = False
    ) -> list[int] | None:
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
        """The tail whatever the proof says."""
        messages, unfinished = split_prefill(new, prefill)
        if not self._close:
            return None
        prompt, said = self._stub(head.template_args)
        chat = to_chat(messages, self._shape, call_names((*history, answer)), late=True)
        try:
            bridged = self._package("bridge", head.template_args).bridge_to_next_turn(
                prompt, said, chat, tools=to_tools(head.tools)
            )
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise RenderError(f"the package's bridge failed: {error}") from error
        size = len(prompt) + len(said)
        if bridged is None or list(bridged.token_ids[:size]) != prompt + said:
            return None
        tail = list(bridged.token_ids[size:])
        if missing(messages, self.vocabulary.decode(tail), self.vocabulary.normalized):
            return None
        return tail + self.vocabulary.encode(unfinished) if unfinished else tail

    def parse(self, ids: Sequence[int], head: Head, *, prefill: str = "") -> Answer:
        parser = self.parser(head, prefill=prefill)
        parser.feed(ids)
        parser.finish()
        return parser.answer()

    def parser(self, head: Head, *, prefill: str = "") -> StreamParser:
        prompt = self._prompt(head.template_args)
        if self._format is None:
            return _WholeParser(self._package("render", head.template_args), prompt, self._stop_ids, head)
        opened = self.vocabulary.decode(prompt).rstrip().endswith("<think>")
        tags: Tags = "open" if opened else "allowed"
        return TaggedParser(self.vocabulary, self._stop_ids, head, tags, self._format, prefill)

    def decode(self, ids: Sequence[int]) -> str:
        return self.vocabulary.decode(ids)

    def decode_tokens(self, ids: Sequence[int]) -> list[str]:
        return self.vocabulary.decode_tokens(ids)

    def control_tokens(self, text: str) -> list[str]:
        return self.vocabulary.control_tokens(text)

    def prove(self) -> Proof:
        return self._features.proof
