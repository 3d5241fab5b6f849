"""The replicas of one policy: which is asked, which is out, which weights each has.

A conversation stays with the replica that holds its prefix, unless that one is much fuller than another. Sick replicas
leave and come back by themselves; a replica that drains for a weight update takes nothing new.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from polar_common.errors import EngineBusy, EngineDown, EngineError
from polar_common.tasks import cancel_and_wait, spawn

from .base import Capabilities, Engine

__all__ = ["Pool", "Replica"]

_STICKY = 16_384
_LOOK_S = 0.05
_PROBE_S = 60.0
"""A real engine's first token after its start takes a while."""
_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Replica:
    """One engine and what is known of it. `version` and `policy_seq`: the weights it samples with now."""

    engine: Engine
    capabilities: Capabilities | None = None
    healthy: bool = False
    draining: bool = False
    running: int = 0
    version: str = ""
    policy_seq: int = 0
    weights_hash: str = ""
    seq_of: dict[str, int] = field(default_factory=dict)
    """Policy sequence by version, of all versions this replica has had."""
    swaps: int = 0
    """How often its weights were changed."""
    announced: int = 0
    """The latest policy sequence that is meant for it: any instance may be loading it until it is `policy_seq`."""
    unsure: bool = False
    """It may have been started again, with other weights than `version`: it takes nothing until it has them."""
    trouble: str = ""
    """Why it couldn't get them."""
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def doubt(self) -> None:
        """Compare what was loaded into it with what it said when it was probed."""
        found = self.capabilities
        if self.policy_seq and found is not None and found.weight_update:
            self.unsure = found.weights_version != self.version

    def seq(self, version: str, otherwise: int) -> int:
        """The policy sequence of weights that it says it sampled with; 0 where nobody loaded them. `otherwise`: the one
        that it had when the call began.
        """
        if version in self.seq_of or not (self.policy_seq and otherwise):
            return self.seq_of.get(version, otherwise)
        self.unsure = True
        return 0

    def swapped(self, since: int) -> bool:
        """Whether its weights may have changed under a call that began when `swaps` was so."""
        updates = self.capabilities is not None and self.capabilities.weight_update
        return self.swaps != since or (updates and self.announced > self.policy_seq)

    @property
    def usable(self) -> bool:
        return self.healthy and not self.draining and not self.unsure and self.capabilities is not None

    def enter(self) -> None:
        self.running += 1
        self.idle.clear()

    def leave(self) -> None:
        self.running -= 1
        if not self.running:
            self.idle.set()

    async def probe(self) -> None:
        """Find out what the engine can. Raises EngineError."""
        found = await self.engine.capabilities()
        self.capabilities = found
        if not self.policy_seq:
            self.version = found.weights_version
        self.weights_hash = found.weights_hash or self.weights_hash
        self.healthy = True


class Pool:
    """`slack`: by how many running calls the sticky replica may be fuller than the emptiest."""

    def __init__(self, engines: Sequence[Engine], *, slack: int = 8) -> None:
        self.replicas = [Replica(engine) for engine in engines]
        self._slack = slack
        self._sticky: OrderedDict[str, Replica] = OrderedDict()

    def pick(self, conversation: str) -> Replica:
        """Raises EngineBusy while all healthy replicas drain, EngineDown when none is healthy."""
        usable = [r for r in self.replicas if r.usable]
        if not usable:
            if any(r.healthy and (r.draining or (r.unsure and not r.trouble)) for r in self.replicas):
                raise EngineBusy("the engines are being updated", 429, 1.0)
            trouble = next((r.trouble for r in self.replicas if r.healthy and r.unsure), "")
            raise EngineDown(trouble or "no engine answers", 503)
        emptiest = min(usable, key=lambda r: r.running)
        chosen = self._sticky.get(conversation)
        if chosen is None or not chosen.usable or chosen.running > emptiest.running + self._slack:
            chosen = self._sticky[conversation] = emptiest
        self._sticky.move_to_end(conversation)
        if len(self._sticky) > _STICKY:
            self._sticky.popitem(last=False)
        return chosen

    async def there(self, patience_s: float, given_up: Callable[[], bool]) -> None:
        """Wait for a replica that takes calls: harnesses try again for a few seconds only."""
        deadline = time.monotonic() + patience_s
        while not any(r.usable for r in self.replicas) and time.monotonic() < deadline and not given_up():
            await asyncio.sleep(_LOOK_S)

    @property
    def capabilities(self) -> Capabilities | None:
        """Of any replica that was reached."""
        return next((r.capabilities for r in self.replicas if r.capabilities is not None), None)

    @property
    def window(self) -> int:
        """The smallest context window of the replicas in tokens, 0 if unknown."""
        windows = [r.capabilities.context_window for r in self.replicas if r.capabilities is not None]
        return min((w for w in windows if w), default=0)

    async def probe(self) -> None:
        """Probe all replicas; those that can't be reached are left for `watch`."""
        await asyncio.gather(*(self._check(r) for r in self.replicas))

    async def watch(self, every_s: float) -> None:
        """Check for ever, each replica for itself: one that is slow to answer mustn't hide another's end."""
        checks = [spawn(self._watch(r, every_s), name=f"watch:{r.engine.replica}") for r in self.replicas]
        try:
            await asyncio.gather(*checks)
        finally:
            await cancel_and_wait(*checks)

    async def _watch(self, replica: Replica, every_s: float) -> None:
        while True:
            await self._check(replica)
            await asyncio.sleep(every_s)

    async def _check(self, replica: Replica) -> None:
        """A replica that returns is probed again: it may have come back as another."""
        try:
            well = await replica.engine.healthy()
            if well and not replica.healthy:
                async with asyncio.timeout(_PROBE_S):
                    await replica.probe()
                replica.doubt()
                _log.info("engine is there", replica=replica.engine.replica)
            elif not well and replica.healthy:
                _log.warning("engine is gone", replica=replica.engine.replica)
            replica.healthy = well and replica.capabilities is not None
        except (EngineError, TimeoutError) as error:
            _log.warning("engine can't be probed", replica=replica.engine.replica, error=repr(error))
            replica.healthy = False

    async def close(self) -> None:
        for replica in self.replicas:
            await replica.engine.close()
