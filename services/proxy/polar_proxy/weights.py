"""New weights for the engines: who updates which replica, and which version each samples with.

`policy.published` is work: one durable consumer per replica, whose lease decides which instance does the update. It
hands out one at a time; messages of newer schema versions, which wait for an upgrade, don't count.
`policy.activated` is what all instances follow to know what each replica samples with. Versions that a newer one has
overtaken are skipped. An engine that is started again has none of them any more, and gets its last ones again.
"""

from __future__ import annotations

import asyncio
import time

import nats.errors
import structlog

from polar_common import subjects
from polar_common.bus import Bus, Lease, Stored, Worker, follow
from polar_common.bus.poison import bury
from polar_common.errors import BusError, EngineDown, EngineError, FromTheFuture, Poison
from polar_common.events import PolicyActivated, PolicyPublished
from polar_common.topology import ConsumerSpec, events_stream

from .engines.pool import Pool, Replica

__all__ = ["Weights", "weights_consumer"]

_DRAIN_S = 600.0
_AGAIN_S = 0.5
_LOOK_S = 0.1
_log = structlog.get_logger(__name__)


def weights_consumer(replica: str, segment: str) -> ConsumerSpec:
    """The updates of one engine replica."""
    pattern = subjects.ANY_POLICY_PUBLISHED.replace("*", segment, 1)
    return ConsumerSpec(f"proxy-weights-{replica}", events_stream(segment), (pattern,), "proxy")


class Weights:
    """Updates the pool's replicas and keeps `version` and `policy_seq` of each."""

    def __init__(self, bus: Bus, pool: Pool, segment: str, *, drain: bool) -> None:
        self._bus = bus
        self._pool = pool
        self._segment = segment
        self._drain = drain
        self._published: dict[str, PolicyPublished] = {}
        self._parked: set[int] = set()
        """Sequences of `published` events that a newer version wrote."""
        self.caught_up = asyncio.Event()
        """What each replica had when the proxy started is known."""

    async def _prepare(self, spec: ConsumerSpec, stop: asyncio.Event) -> None:
        """Make sure that a replica's consumer is there. They're as many as there are engines, so not in topology.

        The log may be later than the proxy, or between two leaders: it is asked until it answers.
        """
        while not stop.is_set():
            try:
                await self._one_at_a_time(spec)
                return
            except (BusError, nats.errors.Error) as error:
                if self._bus.nc.is_closed:
                    return
                _log.warning("weights can't be followed yet", consumer=spec.durable, error=repr(error))
                await asyncio.sleep(_AGAIN_S)

    async def _one_at_a_time(self, spec: ConsumerSpec) -> None:
        """Create or update a consumer: one update under way, beside what is parked."""
        config = spec.config()
        config.max_ack_pending = 1 + len(self._parked)
        await self._bus.js.add_consumer(spec.stream, config)

    async def follow(self) -> None:
        """Learn of published and activated versions, for ever."""
        patterns = [
            p.replace("*", self._segment, 1) for p in (subjects.ANY_POLICY_PUBLISHED, subjects.ANY_POLICY_ACTIVATED)
        ]
        stream = events_stream(self._segment)
        async for stored in follow(self._bus, stream, patterns, on_caught_up=self._now):
            try:
                event = stored.event
            except FromTheFuture as error:
                if stored.subject.endswith(".published"):
                    self._parked.add(stored.sequence)
                _log.error("a newer version wrote this; upgrade the proxy", subject=stored.subject, error=str(error))
                continue
            except Poison as error:
                await self._bury(stored, error)
                continue
            if isinstance(event, PolicyPublished):
                self._published[event.version] = event
                self._announced(event)
            elif isinstance(event, PolicyActivated):
                self._activated(event)

    def _now(self) -> None:
        if not self.caught_up.is_set():
            for replica in self._pool.replicas:
                replica.doubt()
            self.caught_up.set()

    async def keep(self, replica: Replica, stop: asyncio.Event) -> None:
        """Give a replica that was started again the weights that it had."""
        while not stop.is_set():
            if replica.unsure and self.caught_up.is_set():
                try:
                    async with replica.loading:
                        await self._again(replica)
                except EngineError as error:
                    replica.trouble = f"{replica.engine.replica} has lost its weights {replica.version}: {error}"
                    _log.error("weights can't be loaded again", replica=replica.engine.replica, error=str(error))
            await asyncio.sleep(_AGAIN_S if replica.trouble else _LOOK_S)

    async def _again(self, replica: Replica) -> None:
        has = (await replica.engine.capabilities()).weights_version
        newer = self._published.get(has)
        if has != replica.version and (newer is None or newer.policy_seq < replica.policy_seq):
            event = self._published.get(replica.version)
            if event is None:
                raise EngineDown("nobody knows where they are", 503)
            await replica.engine.update_weights(event.weights, event.version, drain=self._drain)
            _log.warning("weights loaded again", replica=replica.engine.replica, version=event.version, instead_of=has)
        self._hash(replica)
        replica.unsure, replica.trouble = False, ""
        await self._ask(replica)

    async def _bury(self, stored: Stored, error: Poison) -> None:
        try:
            await bury(self._bus, "proxy", events_stream(self._segment), stored, error)
        except BusError as failure:
            # It is read again at the next start.
            _log.warning("burying failed", subject=stored.subject, error=repr(failure))

    def _announced(self, event: PolicyPublished) -> None:
        """Another instance may be loading these from now on; one that drains lets what runs end first."""
        for replica in self._pool.replicas:
            if self._foreign(replica, event):
                continue
            replica.seq_of[event.version] = event.policy_seq
            if not self._drain:
                replica.announced = max(replica.announced, event.policy_seq)

    def _activated(self, event: PolicyActivated) -> None:
        for replica in self._pool.replicas:
            if replica.engine.replica != event.replica or event.policy_seq < replica.policy_seq:
                continue
            replica.swaps += (event.version, event.policy_seq) != (replica.version, replica.policy_seq)
            replica.version, replica.policy_seq = event.version, event.policy_seq
            replica.seq_of[event.version] = event.policy_seq
            self._hash(replica)

    def _hash(self, replica: Replica) -> None:
        """The hash of `version`: the trainer's word, or the engine's where it was asked since; else unknown."""
        published, found = self._published.get(replica.version), replica.capabilities
        asked = found.weights_hash if found is not None and found.weights_version == replica.version else ""
        replica.weights_hash = (published.weights_hash if published is not None else "") or asked

    async def _ask(self, replica: Replica) -> None:
        """Where the trainer named no hash, the engine may."""
        if not replica.weights_hash:
            try:
                replica.capabilities = await replica.engine.capabilities()
            except EngineError as error:
                _log.warning("an engine doesn't tell its weights", replica=replica.engine.replica, error=str(error))
            self._hash(replica)

    async def work(self, replica: Replica, stop: asyncio.Event) -> None:
        """Update one replica whenever its lease is ours."""

        async def handle(lease: Lease) -> None:
            try:
                event = lease.stored.event
            except FromTheFuture:
                self._parked.add(lease.stored.sequence)
                await self._one_at_a_time(spec)
                raise
            if isinstance(event, PolicyPublished):
                await self._update(replica, event)

        spec = weights_consumer(replica.engine.replica, self._segment)
        await self._prepare(spec, stop)
        await Worker(self._bus, spec, handle).run(stop)

    async def _update(self, replica: Replica, event: PolicyPublished) -> None:
        """Raises EngineError; the lease is then given back and tried again."""
        ours = [e.policy_seq for e in self._published.values() if not self._foreign(replica, e)]
        if self._foreign(replica, event) or event.policy_seq < max([replica.policy_seq, *ours]):
            return
        if replica.capabilities is None:
            raise EngineDown(f"{replica.engine.replica} isn't there to be updated", 503)
        start = time.monotonic()
        replica.draining = self._drain
        try:
            if self._drain:
                async with asyncio.timeout(_DRAIN_S):
                    while replica.running:
                        await replica.idle.wait()
            replica.announced = max(replica.announced, event.policy_seq)
            async with replica.loading:
                await replica.engine.update_weights(event.weights, event.version, drain=self._drain)
        finally:
            replica.draining = False
        told = PolicyActivated(
            segment=self._segment, version=event.version, policy_seq=event.policy_seq,
            replica=replica.engine.replica, update_s=round(time.monotonic() - start, 3),
            mode="drain" if self._drain else "in_flight", causation=event.event_id, run=event.run,
        )  # fmt: skip
        await self._bus.once(told)
        self._activated(told)
        replica.unsure, replica.trouble = False, ""
        await self._ask(replica)
        _log.info("weights activated", replica=told.replica, version=told.version, seconds=told.update_s)

    def _foreign(self, replica: Replica, event: PolicyPublished) -> bool:
        """Weights of another model than the one this engine serves."""
        served = replica.capabilities.model if replica.capabilities is not None else ""
        return event.model not in ("", "policy", served)
