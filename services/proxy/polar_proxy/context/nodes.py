"""What the proxy knows of one attempt's completions: nodes that later calls may continue, and an index by messages.

Plain state without I/O: filled by the call flow after an acknowledgement and by the loader from the log; asked by
`match.py` and `retry.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from polar_common.packing import BlobRef
from polar_proxy.dialects.base import Finish, Usage
from polar_render.base import Head
from polar_render.messages import Message, Part
from polar_render.records import Link

__all__ = ["Delivery", "Live", "Node", "SessionIndex"]

Delivery = Literal["pending", "delivered", "undelivered", "unknown"]


@dataclass(slots=True, eq=False)
class Node:
    """A completion that the log has acknowledged.

    `key` stands for head + messages + answer (`prefix_keys`), `request_key` for head + messages. The harness sent
    `size` messages: the first `shared` of `base`'s, then `own`. `answer` is the whole assistant turn, a prefill merged,
    with minted ids, and stands at index `position` of a conversation that goes on. `parts` is what was sampled.
    """

    completion: str
    sequence: int
    head: bytes
    key: bytes
    request_key: bytes
    base: Node | None
    shared: int
    own: tuple[Message, ...]
    position: int
    answer: Message
    parts: tuple[Part, ...]
    finish: Finish
    closed: bool
    link: Link
    request_hash: str
    created: int
    usage: Usage
    sampled_from: int
    """Length of the prompt: the context's sampled ids begin here."""
    stop_sequence: str | None = None
    agent: str = ""
    parent_agent: str = ""
    agent_role: str = ""
    own_ids: tuple[tuple[str, str], ...] = ()
    """(minted id, the model's own) of its calls, where the model names them."""
    parent: Node | None = None
    additions: tuple[str, ...] = ()
    delivery: Delivery = "pending"
    replays: int = 0
    extended: bool = False
    choice: int = 0
    parallel_of: str = ""

    @property
    def size(self) -> int:
        return self.shared + len(self.own)

    def messages(self) -> list[Message]:
        """All messages the harness had sent with this call."""
        pieces: list[tuple[Node, int]] = []
        node: Node | None = self
        end = self.size
        while node is not None and end > 0:
            if end > node.shared:
                pieces.append((node, end))
            end = min(end, node.shared)
            node = node.base
        found: list[Message] = []
        for piece, stop in reversed(pieces):
            found += piece.own[: stop - piece.shared]
        return found

    def conversation(self) -> list[Message]:
        """The messages and the answer, as a later call repeats them."""
        return [*self.messages()[: self.position], self.answer]


@dataclass(slots=True, eq=False)
class Live:
    """A call that has no outcome yet. `committing`: the engine is done, the log is being asked."""

    completion: str
    request_hash: str
    gone: bool = False
    committing: bool = False
    sealed: bool = False


@dataclass(slots=True)
class SessionIndex:
    """One attempt's completions. `synced`: up to this log sequence all of its completion events are known here."""

    nodes: dict[str, Node] = field(default_factory=dict)
    by_key: dict[bytes, list[Node]] = field(default_factory=dict)
    by_request: dict[bytes, list[Node]] = field(default_factory=dict)
    by_hash: dict[str, list[Node]] = field(default_factory=dict)
    live: dict[str, Live] = field(default_factory=dict)
    aborted: Counter[str] = field(default_factory=Counter)
    """Request hash → calls that ended without a capture since the last capture of the same."""
    ended: set[str] = field(default_factory=set)
    """Completions that were aborted."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Request hash → refusals, and failures that were told, that a retry mark may still refer to."""
    heads: dict[bytes, str] = field(default_factory=dict)
    """Head key → the completion whose event holds its body."""
    agents: set[str] = field(default_factory=set)
    own_ids: dict[str, str] = field(default_factory=dict)
    """Minted tool-call ids → the model's own."""
    pictures: dict[str, BlobRef] = field(default_factory=dict)
    """What the log holds of the session's pictures, by hash."""
    bodies: dict[bytes, Head] = field(default_factory=dict)
    """Heads by key, each once."""
    synced: int = 0
    calls: int = 0
    tokens: int = 0

    def add(self, node: Node) -> None:
        """A completion was acknowledged (or read from the log)."""
        if node.completion in self.nodes:
            return
        self.nodes[node.completion] = node
        self.by_key.setdefault(node.key, []).append(node)
        self.by_request.setdefault(node.request_key, []).append(node)
        self.by_hash.setdefault(node.request_hash, []).append(node)
        self.heads.setdefault(node.head, node.completion)
        self.aborted.pop(node.request_hash, None)
        if node.parent is not None:
            node.parent.extended = True
        self.own_ids.update(node.own_ids)
        if node.agent:
            self.agents.add(node.agent)

    def choices(self, node: Node) -> list[Node]:
        """All completions of the request that `node` answered, by choice."""
        first = node.parallel_of or node.completion
        same = [n for n in self.by_hash.get(node.request_hash, ()) if (n.parallel_of or n.completion) == first]
        return sorted(same, key=lambda n: n.choice)
