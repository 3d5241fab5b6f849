"""The start-up proof: for which message shapes a model's format can be continued exactly, and what it can't express.

Every check compares real renderings: a tail must be, id for id, the end of the full rendering, stand right behind an
end-of-turn id, hold every new message in order and no piece of the answer. The matrix runs over histories of several
lengths and over answers with and without calls, thinking, blanks at the edges, so that a tail that depends on what
came before shows up. What fails is refused at run time with the reason found here; it is never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from typing import Literal, Protocol

from polar_common.errors import RenderError

from .base import Answer, Check, Head, Proof
from .messages import Message, Text, Thinking, ToolCall, ToolSpec, text_of
from .vocabulary import Vocabulary

__all__ = ["Features", "Subject", "keeps_thinking", "needs", "prove", "reads_back"]


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


# -- the matrix ------------------------------------------------------------------------------------------------------

_TOOL = ToolSpec(
    "elmlookup",
    "finds an elmdescribed thing",
    {"type": "object", "properties": {"elmkey": {"type": "string"}}, "required": ["elmkey"]},
)
_PLAIN, _TOOLS = Head(), Head(tools=(_TOOL,))


def _user(text: str) -> Message:
    return Message("user", (Text(text),))


def _system(text: str, developer: bool = False) -> Message:
    return Message("developer" if developer else "system", (Text(text),))


def _tool(text: str, call: str = "c1") -> Message:
    return Message("tool", (Text(text),), call_id=call, name="elmlookup")


def _call(word: str, call: str = "c1") -> ToolCall:
    return ToolCall(call, "elmlookup", f'{{"elmkey": "{word}"}}')


def _answer(text: str, *calls: ToolCall, thinking: str = "") -> Message:
    return Message("assistant", ((Thinking(thinking),) if thinking else ()) + (Text(text),) + calls)


_HISTORIES: tuple[tuple[Message, ...], ...] = (
    (_user("ashone"),),
    (_system("ashtwo"), _user("ashthree")),
    (_user("ashfour"), _answer("ashfive"), _user("ashsix")),
    (_user("ashseven"), _answer("asheight", _call("ashnine", "c0")), _tool("ashten", "c0")),
    (_system("asha"), _user("ashb"), _answer("ashc"), _user("ashd"), _answer("ashe"), _user("ashf")),
)


@dataclass(frozen=True, slots=True)
class _Case:
    answer: Message
    new: tuple[Message, ...]
    head: Head = _PLAIN
    prefill: bool = False


def _cases(*cases: tuple[Message, Sequence[Message]], head: Head = _PLAIN, prefill: bool = False) -> list[_Case]:
    return [_Case(answer, tuple(new), head, prefill) for answer, new in cases]


_ONE = _answer("oakanswer", _call("oakarg"))
_TWO = _answer("oakanswer", _call("oakarg", "c1"), _call("oakother", "c2"))
_SAID = _answer("oakanswer")
_U, _U2 = _user("firone"), _user("firtwo")
_T, _T2 = _tool("firtool"), _tool("firtool2", "c2")

_MATRIX: dict[str, list[_Case]] = {
    "user": _cases((_SAID, [_U]), (_answer("oak two\nlines"), [_U])) + _cases((_SAID, [_U]), head=_TOOLS),
    "tool": _cases((_ONE, [_T]), (_answer("", _call("oakarg")), [_T]), head=_TOOLS),
    "2 x tool": _cases((_TWO, [_T, _T2]), head=_TOOLS),
    "tool + user": _cases((_ONE, [_T, _U]), head=_TOOLS),
    "2 x user": _cases((_SAID, [_U, _U2])),
    "mid system": _cases((_SAID, [_system("firsys"), _U]), (_SAID, [_U, _system("firsys")]))
    + _cases((_ONE, [_T, _system("firsys")]), head=_TOOLS),
    "mid developer": _cases((_SAID, [_system("firdev", True), _U])),
    "assistant": _cases((_SAID, [_U, _answer("firsaid"), _U2])),
    "prefill": _cases((_SAID, [_U, _answer("firpre")]), prefill=True)
    + _cases((_ONE, [_T, _answer("firpre")]), head=_TOOLS, prefill=True),
    "white space": _cases(
        (_answer(" oakanswer \n"), [_user("\n firone  ")]),
        (_answer("oakanswer\n\n"), [_user("firone\n\n  firtwo\t")]),
        (_SAID, [_user("  \n")]),
    )
    + _cases((_ONE, [_tool("\n  firtool\n\n")]), head=_TOOLS),
    "empty content": _cases((_SAID, [_user("")])) + _cases((_ONE, [_tool("")]), head=_TOOLS),
    "parallel calls": _cases((_TWO, [_T, _T2]), head=_TOOLS),
    "thinking": _cases((_answer("oakanswer", thinking="oakthought"), [_U]))
    + _cases((_answer("oakanswer", _call("oakarg"), thinking="oakthought"), [_T]), head=_TOOLS),
}


def needs(answer: Message, new: Sequence[Message], prefill: bool) -> set[str]:
    """The features that a tail of this shape relies on."""
    turns = new[:-1] if prefill else new
    roles = [m.role for m in turns]
    wanted: set[str] = {"end of turn", "stop ids", "generation prompt"}
    named = {
        "user": "user", "tool": "tool", "system": "mid system", "developer": "mid developer", "assistant": "assistant",
    }  # fmt: skip
    wanted.update(named[r] for r in roles)
    pairs = set(pairwise(roles))
    wanted.update(name for pair, name in _PAIRS.items() if pair in pairs)
    if prefill:
        wanted.add("prefill")
    if answer.thinking:
        wanted.add("thinking")
    if len(answer.tool_calls) > 1 and "tool" in roles:
        wanted.add("parallel calls")
    texts = [text_of(m) for m in turns]
    if any(not t for t in texts):
        wanted.add("empty content")
    if any(t != t.strip() for t in texts):
        wanted.add("white space")
    return wanted


_PAIRS = {("tool", "tool"): "2 x tool", ("tool", "user"): "tool + user", ("user", "user"): "2 x user"}


# -- what the run time asks ------------------------------------------------------------------------------------------


@dataclass
class Features:
    """The proof, and the questions put to it for every call."""

    checks: list[Check] = field(default_factory=list)
    history: Literal["short", "full"] = "short"

    def __post_init__(self) -> None:
        self._failed = {c.feature: c.reason for c in self.checks if not c.ok}

    @property
    def failures(self) -> int:
        return len(self._failed)

    @property
    def proof(self) -> Proof:
        basic = {"end of turn", "stop ids", "generation prompt", "user", "tool"}
        return Proof(tuple(self.checks), not (basic & self._failed.keys()), self.history)

    def allow(self, wanted: set[str]) -> bool:
        return not (wanted & self._failed.keys())

    def require(self, messages: Sequence[Message], head: Head, prefill: bool) -> None:
        """Raises RenderError naming the message that this format can't express."""
        if not self._failed:
            return
        if head.tools:
            self._refuse("tools", "tools")
            self._refuse("calls read back", "tools")
        lead = True
        for number, message in enumerate(messages):
            where = f"messages[{number}]"
            lead = lead and message.role in ("system", "developer")
            if message.role in ("system", "developer"):
                self._refuse(message.role if number == 0 else "2 x system" if lead else f"mid {message.role}", where)
            if message.tool_calls:
                self._refuse("tool calls" if len(message.tool_calls) == 1 else "parallel calls shown", where)
        if prefill:
            self._refuse("prefill", f"messages[{len(messages)}]")

    def _refuse(self, feature: str, where: str) -> None:
        if (reason := self._failed.get(feature)) is not None:
            raise RenderError(f"{where}: {feature}: {reason}")


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


# -- the checks ------------------------------------------------------------------------------------------------------


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
    for call in message.tool_calls:
        words += [call.name, *(w for w in call.arguments.replace('"', " ").split() if w.startswith("oak"))]
    return words


def _difference(whole: Sequence[int], tail: Sequence[int], vocabulary: Vocabulary) -> str:
    end = whole[max(0, len(whole) - len(tail)) :]
    at = next((i for i, (a, b) in enumerate(zip(end, tail, strict=False)) if a != b), min(len(end), len(tail)))
    shown = vocabulary.decode(end[at : at + 6]), vocabulary.decode(tail[at : at + 6])
    return f"the tail is not the end of the full rendering: at its id {at} {shown[1]!r} stands for {shown[0]!r}"


def _check_tail(subject: Subject, history: Sequence[Message], case: _Case, prompt: Sequence[int]) -> str:
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
    unfinished = subject.vocabulary.encode(text_of(case.new[-1])) if case.prefill else []
    if list(tail[len(tail) - len(prompt) - len(unfinished) :][: len(prompt)]) != list(prompt):
        return "the tail doesn't end with the generation prompt"
    return ""


def _swallowed(subject: Subject, history: Sequence[Message], case: _Case, whole: Sequence[int]) -> bool:
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
    ask, key = _user("firone"), '"oakarg"'
    return {
        "system": _shown(subject, [_system("firsys"), ask], _PLAIN, ["firsys", "firone"]),
        "developer": _shown(subject, [_system("firdev", True), ask], _PLAIN, ["firdev", "firone"]),
        "2 x system": _shown(subject, [_system("firsys"), _system("firtwo"), ask], _PLAIN, ["firsys", "firtwo"]),
        "tools": _shown(subject, [ask], _TOOLS, ["elmlookup"])
        or _shown(subject, [ask], _TOOLS, ["elmdescribed"])
        or _shown(subject, [ask], _TOOLS, ["elmkey"]),
        "tool calls": _shown(subject, [ask, _ONE, _T], _TOOLS, ["oakanswer", "elmlookup", key[1:-1], "firtool"]),
        "parallel calls shown": _shown(subject, [ask, _TWO, _T, _T2], _TOOLS, ["oakarg", "oakother", "firtool2"]),
        "thinking shown": _shown(
            subject, [ask, _answer("", _call("oakarg"), thinking="oakthought"), _T], _TOOLS, ["oakthought", "oakarg"]
        ),
    }


def reads_back(subject: Subject) -> str:
    """Why the parser doesn't read calls back as the template writes them; "" if it does."""
    ask = _user("firone")
    try:
        whole = subject.full([ask, _TWO], _TOOLS, generate=False)
        prompt = subject.full([ask], _TOOLS, generate=True)
    except RenderError as error:
        return str(error)
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, prompt, strict=False)))
    ends = [i for i, token in enumerate(whole) if token in subject.close_ids]
    sample = whole[start : ends[-1] + 1 if ends else len(whole)]
    wanted = [json.loads(c.arguments) for c in _TWO.tool_calls]
    for before in ("", "</think>\n\n"):
        answer = subject.parse([*subject.vocabulary.encode(before), *sample], _TOOLS)
        calls = [p for p in answer.parts if isinstance(p, ToolCall)]
        if [_parsed(c.arguments) for c in calls] == wanted and {c.name for c in calls} == {_TOOL.name}:
            return ""
    return "tool calls as the template writes them are not read by the parser: name another tool_format"


def _parsed(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return None


def _append_only(subject: Subject) -> str:
    """Whether rendered turns stay as they are when the conversation grows. Native mode needs it; tails don't."""
    turns = [*_HISTORIES[4], _SAID, _U, _answer("firsaid"), _U2]
    try:
        steps = [subject.full(turns[:n], _PLAIN, generate=False) for n in range(2, len(turns) + 1)]
    except RenderError as error:
        return str(error)
    for number, (short, longer) in enumerate(pairwise(steps), 2):
        if longer[: len(short)] != short:
            return f"turn {number} is rendered differently once another follows"
    return ""


def _prompt_ids(subject: Subject) -> list[int]:
    with_prompt = subject.full(_HISTORIES[0], _PLAIN, generate=True)
    without = subject.full(_HISTORIES[0], _PLAIN, generate=False)
    return with_prompt[len(without) :] if with_prompt[: len(without)] == without else []


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
        prompt = _prompt_ids(subject)
    except RenderError as error:
        return [Check("user", False, str(error))]
    reasons = _basics(subject, prompt)
    tails = {"end of turn", "generation prompt"}
    if any(reasons[f] for f in tails):
        reasons |= {feature: "no tail without an end of turn and a generation prompt" for feature in _MATRIX}
    else:
        for feature, cases in _MATRIX.items():
            problems = (_check_tail(subject, history, case, prompt) for case in cases for history in _HISTORIES)
            reasons[feature] = next(filter(None, problems), "")
    reasons |= _renderings(subject) | {"append only": _append_only(subject)}
    reasons["calls read back"] = reads_back(subject)
    return [Check(feature, not reason, reason) for feature, reason in reasons.items()]
