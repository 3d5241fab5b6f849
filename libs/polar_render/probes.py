"""What the start-up proof renders: histories, answers and new messages, made of words that are easy to find again.

The words of histories begin with `ash`, those of answers with `oak`, those of new messages with `fir`. Call ids are
spelled the one way that every known format accepts, also those that print the id in place of the name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import Head
from .messages import Message, Text, Thinking, ToolCall, ToolSpec

__all__ = [
    "CALL_ONLY", "HISTORIES", "MATRIX", "ONE", "PLAIN", "SAID", "TOOL", "TOOLS", "TWO", "Case",
    "answer", "call", "system", "tool", "user",
]  # fmt: skip

TOOL = ToolSpec(
    "elmlookup",
    "finds an elmdescribed thing",
    {"type": "object", "properties": {"elmkey": {"type": "string"}}, "required": ["elmkey"]},
)
PLAIN, TOOLS = Head(), Head(tools=(TOOL,))


def _id(number: int) -> str:
    return f"functions.{TOOL.name}:{number}"


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def system(text: str, developer: bool = False) -> Message:
    return Message("developer" if developer else "system", (Text(text),))


def tool(text: str, number: int = 1) -> Message:
    return Message("tool", (Text(text),), call_id=_id(number), name=TOOL.name)


def call(word: str, number: int = 1) -> ToolCall:
    return ToolCall(_id(number), TOOL.name, f'{{"elmkey": "{word}"}}')


def answer(text: str, *calls: ToolCall, thinking: str = "") -> Message:
    texts = (Text(text),) if text else ()
    return Message("assistant", ((Thinking(thinking),) if thinking else ()) + texts + calls)


HISTORIES: tuple[tuple[Message, ...], ...] = (
    (user("ashone"),),
    (system("ashtwo"), user("ashthree")),
    (user("ashfour"), answer("ashfive"), user("ashsix")),
    (user("ashseven"), answer("", call("ashnine", 0)), tool("ashten", 0)),
    (system("asha"), user("ashb"), answer("ashc"), user("ashd"), answer("ashe"), user("ashf")),
)


@dataclass(frozen=True, slots=True)
class Case:
    """An answer and what follows it."""

    answer: Message
    new: tuple[Message, ...]
    head: Head = PLAIN
    prefill: bool = False


def _cases(*cases: tuple[Message, Sequence[Message]], head: Head = PLAIN, prefill: bool = False) -> list[Case]:
    return [Case(said, tuple(new), head, prefill) for said, new in cases]


ONE = answer("oakanswer", call("oakarg"))
TWO = answer("", call("oakarg", 1), call("oakother", 2))
SAID = answer("oakanswer")
CALL_ONLY = answer("", call("oakarg"))
_U, _U2 = user("firone"), user("firtwo")
_T, _T2 = tool("firtool", 1), tool("firtool2", 2)

MATRIX: dict[str, list[Case]] = {
    "user": _cases((SAID, [_U]), (answer("oak two\nlines"), [_U])) + _cases((SAID, [_U]), head=TOOLS),
    "tool": _cases((ONE, [_T]), (CALL_ONLY, [_T]), head=TOOLS),
    "2 x tool": _cases((TWO, [_T, _T2]), head=TOOLS),
    "tool + user": _cases((ONE, [_T, _U]), head=TOOLS),
    "2 x user": _cases((SAID, [_U, _U2])),
    "mid system": _cases((SAID, [system("firsys"), _U]), (SAID, [_U, system("firsys")]))
    + _cases((ONE, [_T, system("firsys")]), head=TOOLS),
    "mid developer": _cases((SAID, [system("firdev", True), _U])),
    "assistant": _cases((SAID, [_U, answer("firsaid"), _U2])),
    "prefill": _cases((SAID, [_U, answer("firpre")]), prefill=True)
    + _cases((ONE, [_T, answer("firpre")]), head=TOOLS, prefill=True),
    "white space": _cases(
        (answer(" oakanswer \n"), [user("\n firone  ")]),
        (answer("oakanswer\n\n"), [user("firone\n\n  firtwo\t")]),
        (SAID, [user("  \n")]),
    )
    + _cases((ONE, [tool("\n  firtool\n\n")]), head=TOOLS),
    "empty content": _cases((SAID, [user("")])) + _cases((ONE, [tool("")]), head=TOOLS),
    "parallel calls": _cases((TWO, [_T, _T2]), head=TOOLS),
    "thinking": _cases((answer("oakanswer", thinking="oakthought"), [_U]))
    + _cases((answer("oakanswer", call("oakarg"), thinking="oakthought"), [_T]), head=TOOLS),
}
"""Features of tails, and the cases that all have to hold over all histories."""
