"""The contract of a rule: a session's calls in, chains out. Assembling, checking and packing happen elsewhere.

A rule is a pure function of the `View`. It says which calls stand in a row and which are trained where; it can't say
that a span is exact: the assembler compares ids and labels what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from polar_reconstructor.calls import Aborted, Call
from polar_reconstructor.columns import Ids
from polar_reconstructor.contexts import Contexts

from .ruleset import RuleSet

__all__ = ["Chain", "Link", "Links", "Rule", "View"]


@dataclass(frozen=True, slots=True)
class Links:
    """How calls hang together, by index into the view's calls.

    `parent[i]`: the call whose whole context begins i's prompt, None for a root. `recorded[i]`: the parent the proxy
    recorded, whether or not ids agree. `ambiguous`: several parents would do. `siblings`: groups of calls with the
    same head and messages.
    """

    parent: tuple[int | None, ...]
    recorded: tuple[int | None, ...]
    ambiguous: frozenset[int]
    siblings: tuple[tuple[int, ...], ...]

    def extended(self) -> frozenset[int]:
        """Calls that a later one continues, by ids or by record."""
        return frozenset(p for pair in (self.parent, self.recorded) for p in pair if p is not None)


@dataclass(frozen=True, slots=True)
class View:
    """A session's attempt: calls by number, their contexts and links, and what must not be trained and why."""

    calls: Sequence[Call]
    aborted: Sequence[Aborted]
    contexts: Contexts
    links: Links
    excluded: Mapping[str, str]
    """Completion id → reason."""
    rules: RuleSet
    decode: Callable[[Ids], str] | None = None

    def trained(self, index: int) -> bool:
        return self.calls[index].id not in self.excluded


@dataclass(frozen=True, slots=True)
class Link:
    """A call inside a chain. `gap`: ids between the previous sample and this one; None: whatever this call's own prompt
    has after the previous call's whole context. `reason`: why it isn't trained here.
    """

    call: int
    trained: bool = True
    reason: str = ""
    gap: Ids | None = None
    drift_class: str = ""
    """What the rule knows about a gap that isn't exact."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Calls in a row. The first one's prompt begins the trace."""

    links: tuple[Link, ...]
    chain_class: str = ""
    ambiguous: bool = False
    split: bool = field(default=False)
    """Cut off from its end by a policy option."""


class Rule(Protocol):
    """Named by `RuleSet.rule`; made without arguments."""

    def chains(self, view: View) -> list[Chain]:
        """The session's chains. Whatever they leave out becomes a chain of its own."""
        ...
