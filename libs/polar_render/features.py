"""What a proof says at run time: which features a call relies on, and what is refused with which reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from polar_common.errors import RenderError

from .base import Check, Head, Proof
from .messages import Message, text_of

__all__ = ["BASICS", "Features", "needs"]

BASICS = frozenset({"end of turn", "stop ids", "generation prompt"})
"""What every tail needs."""

_ROLES = {
    "user": "user", "tool": "tool", "system": "mid system", "developer": "mid developer", "assistant": "assistant",
}  # fmt: skip
_PAIRS = {("tool", "tool"): "2 x tool", ("tool", "user"): "tool + user", ("user", "user"): "2 x user"}


def needs(answer: Message, new: Sequence[Message], prefill: bool) -> set[str]:
    """The features that a tail of this shape relies on."""
    turns = new[:-1] if prefill else new
    roles = [m.role for m in turns]
    wanted = {_ROLES[r] for r in roles} | BASICS
    wanted.update(_PAIRS[pair] for pair in pairwise(roles) if pair in _PAIRS)
    if prefill:
        wanted.add("prefill")
    if answer.thinking:
        wanted.add("thinking")
    if len(answer.tool_calls) > 1 and "tool" in roles:
        wanted.add("parallel calls")
    if any(call.name not in call.id for call in answer.tool_calls):
        wanted.add("foreign call ids")
    for message in turns:
        text = text_of(message)
        if not text:
            wanted.add("empty content")
        elif text[0].isspace() or text[-1].isspace():
            wanted.add("white space")
    return wanted


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
        basic = BASICS | {"user", "tool"}
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
                self._require_calls(message, where)
        if prefill:
            self._refuse("prefill", f"messages[{len(messages)}]")

    def _require_calls(self, message: Message, where: str) -> None:
        self._refuse("tool calls", where)
        if len(message.tool_calls) > 1:
            self._refuse("parallel calls shown", where)
        if text_of(message):
            self._refuse("text beside calls", where)
        if any(call.name not in call.id for call in message.tool_calls):
            self._refuse("foreign call ids", where)

    def _refuse(self, feature: str, where: str) -> None:
        if (reason := self._failed.get(feature)) is not None:
            raise RenderError(f"{where}: {feature}: {reason}")
