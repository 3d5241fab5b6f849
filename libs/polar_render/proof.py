"""The start-up proof: for which message shapes a model's format can be continued exactly, and what it can't express.

Every check compares real renderings: a tail must be, id for id, the end of the full rendering, stand right behind an
end-of-turn id, hold every new message in order and no piece of the answer. The matrix runs over histories of several
lengths and over answers with and without calls, thinking, blanks at the edges, so that a tail that depends on what
came before shows up. What fails is refused at run time with the reason found here; it is never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Protocol

from polar_common.errors import RenderError

from .base import Answer, Check, Head
from .messages import Message, Thinking, ToolCall, text_of
from .probes import (
    CALL_ONLY,
    HISTORIES,
    MATRIX,
    ONE,
    PLAIN,
    SAID,
    TOOL,
    TOOLS,
    TWO,
    Case,
    answer,
    call,
    system,
    tool,
    user,
)
from .vocabulary import Vocabulary

__all__ = ["Subject", "keeps_thinking", "prove", "reads_back"]


class Subject(Protocol):
    """What is examined: a renderer without its safety checks."""

    vocabulary: Vocabulary

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    @property
    def close_ids(self) -> tuple[int, ...]: ...

    def full(self, messages: Sequence[Message], head: Head, *, generate: bool, prefill: bool = False) -> list[int]: ...

    def bridge(
        self, history: Sequence[Message], answer: Message, new: Sequence[Message], head: Head, *, prefill: bool = False
    ) -> list[int] | None: ...

    def parse(self, ids: Sequence[int], head: Head) -> Answer: ...


def _in_order(text: str, words: Iterable[str]) -> str:
    """The first word that isn't in the text behind the one before it; "" if all are."""
    at = 0
    for word in words:
        found = text.find(word, at)
        if found < 0:
            return word
        at = found + len(word)
    return ""


def _marked(message: Message) -> list[str]:
    """The words by which a probe is recognised in a rendering: visible text, then names and arguments of calls."""
    words = text_of(message).split()
    for made in message.tool_calls:
        words += [made.name, *(w for w in made.arguments.replace('"', " ").split() if w.startswith("oak"))]
    return words


def _difference(whole: Sequence[int], tail: Sequence[int], vocabulary: Vocabulary) -> str:
    end = whole[max(0, len(whole) - len(tail)) :]
    at = next((i for i, (a, b) in enumerate(zip(end, tail, strict=False)) if a != b), min(len(end), len(tail)))
    shown = vocabulary.decode(end[at : at + 6]), vocabulary.decode(tail[at : at + 6])
    return f"the tail is not the end of the full rendering: at its id {at} {shown[1]!r} stands for {shown[0]!r}"


def _check_tail(subject: Subject, history: Sequence[Message], case: Case) -> str:
    """Why the tail of a case is wrong; "" if it is right."""
    try:
        whole = subject.full((*history, case.answer, *case.new), case.head, generate=True, prefill=case.prefill)
        tail = subject.bridge(history, case.answer, case.new, case.head, prefill=case.prefill)
    except RenderError as error:
        return str(error)
    if not tail:
        return "no tail can be cut: a new message is missing, or the placeholder's end of turn"
    if len(tail) >= len(whole) or whole[-len(tail) :] != tail:
        return _difference(whole, tail, subject.vocabulary)
    before, text = whole[: -len(tail)], subject.vocabulary.decode(tail)
    if before[-1] not in subject.close_ids:
        return f"the tail stands behind {subject.vocabulary.decode(before[-1:])!r}, not behind an end of turn"
    lost = _in_order(text, [w for m in case.new for w in text_of(m).split()])
    if lost:
        return f"{lost!r} of a new message is not in the tail, or not in its place"
    if spilled := [w for w in _marked(case.answer) if w.startswith("oak") and w in text]:
        return f"{spilled[0]!r} of the answer is in the tail"
    if _swallowed(subject, history, case, whole):
        return "an empty message leaves no turn behind"
    unfinished = text_of(case.new[-1]) if case.prefill else ""
    opening = subject.vocabulary.decode(_opening(subject, (*history, case.answer, *case.new), case))
    if not text.removesuffix(unfinished).endswith(opening):
        return "the tail doesn't end with the generation prompt"
    return ""


def _opening(subject: Subject, messages: Sequence[Message], case: Case) -> list[int]:
    """The ids that the format adds to these messages to have an answer begun; some add none after a tool result."""
    turns = messages[:-1] if case.prefill else messages
    with_prompt = subject.full(turns, case.head, generate=True)
    without = subject.full(turns, case.head, generate=False)
    return with_prompt[len(without) :] if with_prompt[: len(without)] == without else []


def _swallowed(subject: Subject, history: Sequence[Message], case: Case, whole: Sequence[int]) -> bool:
    """Whether a message without visible text isn't even rendered as an empty turn: no word of it could be missed."""
    if all(text_of(m).strip() for m in case.new):
        return False
    rest = [m for m in case.new if text_of(m).strip()]
    return subject.full((*history, case.answer, *rest), case.head, generate=True) == list(whole)


def _shown(subject: Subject, messages: Sequence[Message], head: Head, words: Sequence[str]) -> str:
    """Why words are not shown in order by the full rendering; "" if they are."""
    try:
        text = subject.vocabulary.decode(subject.full(messages, head, generate=True))
    except RenderError as error:
        return str(error)
    lost = _in_order(text, words)
    return f"{lost!r} is not rendered, or not in its place" if lost else ""


def _renderings(subject: Subject) -> dict[str, str]:
    """What full renderings show: feature → why not."""
    ask, late = user("firone"), user("firtwo")
    results = tool("firtool", 1), tool("firtool2", 2)
    thought = answer("", call("oakarg"), thinking="oakthought")
    return {
        "system": _shown(subject, [system("firsys"), ask], PLAIN, ["firsys", "firone"]),
        "developer": _shown(subject, [system("firdev", True), ask], PLAIN, ["firdev", "firone"]),
        "2 x system": _shown(subject, [system("firsys"), system("firtwo"), ask], PLAIN, ["firsys", "firtwo"]),
        "tools": next(filter(None, (_shown(subject, [ask], TOOLS, [w]) for w in _TOOL_WORDS)), ""),
        "tool calls": _shown(subject, [ask, CALL_ONLY, results[0]], TOOLS, [TOOL.name, "oakarg", "firtool"]),
        "text beside calls": _shown(subject, [ask, ONE, results[0], late], TOOLS, ["oakanswer", "oakarg", "firtool"]),
        "parallel calls shown": _shown(subject, [ask, TWO, *results], TOOLS, ["oakarg", "oakother", "firtool2"]),
        "foreign call ids": _shown(subject, [ask, answer("", _FOREIGN)], PLAIN, [_FOREIGN.name, "oakarg"])
        and "a call's id is rendered in place of its name: the model's own ids have to be given back",
        "thinking shown": _shown(subject, [ask, thought, results[0]], TOOLS, ["oakthought", "oakarg"]),
    }


_FOREIGN = replace(call("oakarg"), id="oak000001")
_TOOL_WORDS = (TOOL.name, "elmdescribed", "elmkey")


def reads_back(subject: Subject) -> str:
    """Why the parser doesn't read calls back as the format writes them; "" if it does."""
    wrong = "tool calls as the format writes them are not read by the parser: name another tool_format"
    try:
        if not _read_back(subject, CALL_ONLY):
            return wrong
    except RenderError as error:
        return str(error)
    try:
        return "" if _read_back(subject, TWO) else wrong
    except RenderError:  # a format of single calls: refused as parallel calls, not here
        return ""


def _read_back(subject: Subject, said: Message) -> bool:
    ask = user("firone")
    whole = subject.full([ask, said], TOOLS, generate=False)
    prompt = subject.full([ask], TOOLS, generate=True)
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, prompt, strict=False)))
    ends = [i for i, token in enumerate(whole) if token in subject.close_ids]
    sample = whole[start : ends[-1] + 1 if ends else len(whole)]
    wanted = [(TOOL.name, json.loads(c.arguments)) for c in said.tool_calls]
    for before in ("", "</think>\n\n"):
        parts = subject.parse([*subject.vocabulary.encode(before), *sample], TOOLS).parts
        if [(p.name, _parsed(p.arguments)) for p in parts if isinstance(p, ToolCall)] == wanted:
            return True
    return False


def _parsed(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return None


def _append_only(subject: Subject) -> str:
    """Whether rendered turns stay as they are when the conversation grows. Native mode needs it; tails don't."""
    turns = [*HISTORIES[4], SAID, user("firone"), answer("firsaid"), user("firtwo")]
    try:
        steps = [subject.full(turns[:n], PLAIN, generate=False) for n in range(2, len(turns) + 1)]
    except RenderError as error:
        return str(error)
    for number, (short, longer) in enumerate(pairwise(steps), 2):
        if longer[: len(short)] != short:
            return f"turn {number} is rendered differently once another follows"
    return ""


def _basics(subject: Subject, prompt: Sequence[int]) -> dict[str, str]:
    close = subject.close_ids
    shown = subject.vocabulary.decode(close)
    return {
        "end of turn": "" if close else "the template ends an assistant turn with no token of its own",
        "stop ids": ""
        if set(close) & set(subject.stop_ids)
        else f"turns end with {shown!r}, which the model's configuration doesn't declare: set stop_tokens",
        "generation prompt": "" if prompt else "the template adds no generation prompt",
    }


def prove(subject: Subject) -> list[Check]:
    """The whole matrix. A basic feature that fails stands alone: nothing else can be examined without it."""
    try:
        prompt = _opening(subject, HISTORIES[0], Case(SAID, ()))
    except RenderError as error:
        return [Check("user", False, str(error))]
    reasons = _basics(subject, prompt)
    tails = {"end of turn", "generation prompt"}
    if any(reasons[f] for f in tails):
        reasons |= {feature: "no tail without an end of turn and a generation prompt" for feature in MATRIX}
    else:
        for feature, cases in MATRIX.items():
            problems = (_check_tail(subject, history, case) for case in cases for history in HISTORIES)
            reasons[feature] = next(filter(None, problems), "")
    reasons |= _renderings(subject) | {"append only": _append_only(subject)}
    if subject.vocabulary.decode(prompt).rstrip().endswith("<think>"):
        reasons["prefill"] = "the generation prompt opens thinking: a prefilled text would become part of it"
    reasons["calls read back"] = reads_back(subject)
    return [Check(feature, not reason, reason) for feature, reason in reasons.items()]


def keeps_thinking(subject: Subject, so_far: Sequence[Message], new: Sequence[Message], head: Head) -> bool:
    """Whether the model's own format, once `new` follows, still shows the thinking that it showed before."""
    marks: list[str] = []

    def mark(message: Message) -> Message:
        if not any(t.text for t in message.thinking):
            return message
        marks.append(f"qThought{len(marks)}q")
        rest = tuple(p for p in message.parts if not isinstance(p, Thinking))
        return replace(message, parts=(Thinking(marks[-1]), *rest))

    marked = [mark(m) for m in so_far]
    if not marks:
        return True
    try:
        before = subject.vocabulary.decode(subject.full(marked, head, generate=False))
        after = subject.vocabulary.decode(subject.full((*marked, *new), head, generate=False))
    except RenderError:
        return False
    return [m in before for m in marks] == [m in after for m in marks]
