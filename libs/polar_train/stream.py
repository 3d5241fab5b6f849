"""The trainer's side of the log: an async iterator over closed groups, exactly once relative to its checkpoint.

The trainer marks what went into an update (`used`), saves `state_dict()` with its weights, and says so (`saved`); only
then are groups acknowledged and `trainer.consumed` published. Whoever resumes from an older checkpoint gets everything
after it again, and nothing twice. Memory is bounded: only closings wait in a queue, traces are read when yielded.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Self

import nats.errors
import structlog
from nats.aio.msg import Msg

from polar_common import subjects
from polar_common.bus import Bus
from polar_common.bus.poison import bury
from polar_common.bus.pull import Pull
from polar_common.bus.read import from_delivery
from polar_common.errors import BlobError, BusError, ConfigError, FromTheFuture, Poison, TraceError, Unavailable
from polar_common.events import ConsumedTrace, PolicyPublished, TaskAccepted, TrainerConsumed, TrainerDemanded
from polar_common.house import find_house
from polar_common.ids import FIRST_SEGMENT
from polar_common.topology import TRACES, trainer_consumer
from polar_common.trace_messages import read_message
from polar_common.traces import GroupTraces

from .groups import Group, load_group
from .progress import Progress, Step, open_consumer

__all__ = ["Acceptance", "TraceStream"]

_LEASE_S = 60.0
_SILENCE_S = 8.0
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Which groups a trainer takes, and in what order. What is refused is dropped, counted and logged with its reason.

    `min_complete`: share of a group's sessions that must have ended (matters where a deadline closed it).
    `staleness`: how many policy versions a group's oldest token may lag behind; None: no bound.
    `zero_variance`: groups whose rewards are all equal teach nothing under a group baseline.
    `order`: as closed, by the task's priority, or by the task's age.
    """

    min_complete: float = 0.0
    min_trainable: int = 1
    staleness: int | None = None
    zero_variance: Literal["keep", "drop"] = "keep"
    order: Literal["fifo", "priority", "age"] = "fifo"
    window: int = 64
    """Closed groups looked at together when the order isn't fifo, and held in the queue at most."""


@dataclass(slots=True)
class _Waiting:
    sequence: int
    closed: GroupTraces
    priority: int = 0
    accepted: datetime | None = None


class TraceStream:
    """Closed groups of a run and build (None: any), for one trainer. Use `connect`, or give a `Bus`."""

    def __init__(
        self,
        bus: Bus,
        *,
        trainer: str,
        run: str | None = None,
        build: str | None = "live",
        accept: Acceptance | None = None,
        segment: str = FIRST_SEGMENT,
        verify: bool = True,
    ) -> None:
        self.bus = bus
        self.accept = accept or Acceptance()
        self.dropped: Counter[str] = Counter()
        """Reason → groups not taken."""
        self._spec = trainer_consumer(trainer, run, build, _LEASE_S)
        self._progress = Progress(trainer, run, build)
        self._run = run
        self._demanded: tuple[int, int] | None = None
        self._lacking = False
        """Whether groups were dropped since the demand, which admission still counts."""
        self._segment = segment
        self._verify = verify
        self._policy_seq: int | None = None
        self._pull: Pull | None = None
        self._waiting: dict[int, _Waiting] = {}
        self._messages: dict[int, Msg] = {}
        self._expected = 1
        self._owned = False
        self._closed = False

    @classmethod
    async def connect(cls, url: str = "", *, trainer: str, user: str = "", password: str = "", **options: Any) -> Self:
        """A stream with a connection of its own; `options` as for the class. Without a `url`: the log of the house that
        `polar` finds here (`POLAR_DATA`, `POLAR_NATS`), as user `trainer`. Raises Unavailable, ConfigError."""
        bus = await Bus.connect(
            url or find_house(user="trainer").nats, f"trainer/{trainer}", user=user, password=password
        )
        stream = cls(bus, trainer=trainer, **options)
        stream._owned = True
        return stream

    # -- the checkpoint's side

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: what has been used or dropped so far. Save it with the weights."""
        return self._progress.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint, before the first group is taken. Raises ConfigError for another stream's state."""
        if self._pull is not None:
            raise ConfigError("the stream is running: load before the first group is taken", "state")
        self._progress.load(state)

    def set_policy(self, policy_seq: int) -> None:
        """The trainer's current policy version, against which staleness counts."""
        self._policy_seq = policy_seq

    def used(self, groups: Sequence[Group], *, step: int, policy_version: str = "", policy_seq: int = 0) -> None:
        """These groups went into update `step`. Raises ConfigError for a step that was recorded already."""
        self._progress.add(
            Step(
                step,
                self._progress.epoch,
                policy_version,
                policy_seq,
                tuple(g.sequence for g in groups),
                tuple(g.task for g in groups),
                tuple((t.trace_id, t.session, t.policy_seq_min) for g in groups for t in g.traces),
                groups[0].build if groups else "",
            )
        )

    async def saved(self, state: dict[str, Any]) -> None:
        """The checkpoint with `state` is safe: publish what its steps consumed, then acknowledge its groups.

        May be called again with the same state (a crash in between): what is there already counts as done.
        """
        for step in self._progress.unpublished(state):
            await self.bus.once(self._consumed(step))
            self._progress.published(step)
        for sequence in self._progress.settle(state):
            message = self._messages.pop(sequence, None)
            if message is not None:
                await self.bus.reply(message, b"+ACK")

    async def publish(
        self, weights: str, *, version: str, policy_seq: int, model: str = "policy", step: int = 0
    ) -> None:
        """Offer new weights to the engines, which load them from `weights` (a directory that they can read).

        Versions and their numbers grow, over all trainers of a house (`newest_policy`); the same once more is no error,
        other weights under a version are. Raises ConfigError for a number that engines would pass over.
        """
        newest = await self.newest_policy()
        there = await self.bus.last(subjects.policy(self._segment, version, "published"))
        if newest is not None and there is None and newest.policy_seq >= policy_seq:
            told = f"{policy_seq} isn't above {newest.policy_seq} ({newest.version}): engines would pass it over"
            raise ConfigError(told, "policy_seq")
        await self.bus.once(
            PolicyPublished(
                segment=self._segment,
                version=version,
                policy_seq=policy_seq,
                model=model,
                weights=weights,
                trainer=self._progress.trainer,
                step=step,
            )
        )
        self.set_policy(policy_seq)

    async def newest_policy(self) -> PolicyPublished | None:
        """The weights that were published last, by whomever; None before any. A trainer that begins on a house in which
        others trained counts on from their number, and publishes the weights that it begins with."""
        stored = await self.bus.last(subjects.ANY_POLICY_PUBLISHED.replace("*", self._segment, 1))
        event = None if stored is None else stored.event
        return event if isinstance(event, PolicyPublished) else None

    async def demand(self, groups: int, staleness: int) -> None:
        """Tell admission how many groups are wanted in flight, and how many versions they may lag behind.

        It counts until the next one, where ingest obeys demand. Nothing is opened while all engines lag further behind
        what was published. When all that came was dropped the stream states it again by itself. Raises
        ConfigError for less than none.
        """
        if groups < 0 or staleness < 0:
            raise ConfigError(f"{groups} groups, {staleness} versions behind: at least 0", "demand")
        name, epoch = self._progress.trainer, self._progress.epoch
        last = await self.bus.last(subjects.trainer(self._segment, name, epoch, "*", "demanded"))
        number = int(last.subject.split(".")[6]) + 1 if last is not None else 0
        await self.bus.once(
            TrainerDemanded(
                segment=self._segment,
                run=self._run or "",
                trainer=name,
                epoch=epoch,
                number=number,
                groups=groups,
                staleness=staleness,
            )
        )
        self._demanded, self._lacking = (groups, staleness), False

    def _consumed(self, step: Step) -> TrainerConsumed:
        return TrainerConsumed(
            segment=self._segment,
            trainer=self._progress.trainer,
            epoch=step.epoch,
            step=step.step,
            build=step.build,
            policy_version=step.policy_version,
            policy_seq=step.policy_seq,
            groups=step.tasks,
            traces=tuple(ConsumedTrace(trace=t, session=s, policy_seq=p) for t, s, p in step.traces),
        )

    # -- the groups' side

    def __aiter__(self) -> AsyncIterator[Group]:
        return self

    async def __anext__(self) -> Group:
        group = await self.next()
        if group is None:
            raise StopAsyncIteration
        return group

    async def next(self, timeout: float | None = None) -> Group | None:
        """The next group that is accepted; None after `timeout` seconds, or when the stream was closed."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while not self._closed:
            chosen = self._choose()
            if chosen is not None:
                group = await self._taken(chosen)
                if group is not None:
                    return group
                continue
            left = None if deadline is None else deadline - loop.time()
            if left is not None and left <= 0:
                return None
            await self._receive(1.0 if left is None else min(1.0, left))
        return None

    async def close(self) -> None:
        """Stop. What wasn't saved comes again to whoever resumes."""
        self._closed = True
        if self._pull is not None:
            await self._pull.close()
        if self._owned:
            await self.bus.close()

    async def _receive(self, timeout: float) -> None:
        """Wait for a closing; then take what else is there already, up to the window."""
        try:
            if self._pull is None:
                await open_consumer(self.bus, self._spec, self._progress, self._segment)
                self._pull, self._expected = Pull(self.bus.nc, TRACES, self._spec.durable), 1
            pull = self._pull
            room = self.accept.window - len(self._waiting) - pull.pending
            if room > 0:
                await pull.want(room)
            message = await pull.next(timeout)
            if message is None and self._lacking and self._demanded is not None:
                await self.demand(*self._demanded)
            if message is None and asyncio.get_running_loop().time() - pull.heard > _SILENCE_S:
                raise Unavailable("the consumer is silent")
            while message is not None:
                await self._arrived(message)
                if len(self._waiting) >= self.accept.window:
                    return
                message = await pull.next(0.02)
        except (BusError, nats.errors.Error) as error:
            if self.bus.nc.is_closed:
                raise
            _log.info("the trace stream reconnects", error=repr(error))
            if self._pull is not None:
                await self._pull.close()
                self._pull = None
            await asyncio.sleep(0.2)

    async def _arrived(self, message: Msg) -> None:
        meta = message.metadata.sequence
        if meta.consumer != self._expected:
            # A checkpoint's floor says that everything below it was seen: nothing may be missed on the way.
            raise Unavailable("deliveries were lost on the way")
        self._expected += 1
        sequence = meta.stream
        if self._progress.saved(sequence):
            await self.bus.reply(message, b"+ACK")
            return
        known = sequence in self._messages
        self._messages[sequence] = message
        if known or not self._progress.arrived(sequence):
            return
        closed = await self._read(message)
        message.data = b""
        if closed is None:
            return
        waiting = _Waiting(sequence, closed)
        if self.accept.order != "fifo":
            await self._describe(waiting)
        self._waiting[sequence] = waiting

    async def _read(self, message: Msg) -> GroupTraces | None:
        """A closing; None for what isn't one, which is buried and dropped, and for a newer version's, which stays open:
        the floor doesn't pass it, so an upgraded trainer gets it from its checkpoint."""
        sequence = message.metadata.sequence.stream
        try:
            return read_message(GroupTraces, message.data)
        except FromTheFuture as error:
            _log.error(
                "parked: a newer version wrote this; upgrade the trainer", subject=message.subject, error=str(error)
            )
        except Poison as error:
            _log.error("a closing can't be read", subject=message.subject, error=str(error))
            await bury(self.bus, self._spec.durable, TRACES, from_delivery(message), error)
            self._lacking = True
            self.dropped["unreadable"] += 1
            self._progress.drop(sequence)
        return None

    async def _describe(self, waiting: _Waiting) -> None:
        stored = await self.bus.last(subjects.task(waiting.closed.task, "accepted"))
        if stored is not None and isinstance(stored.event, TaskAccepted):
            waiting.priority, waiting.accepted = stored.event.spec.priority, stored.time

    def _choose(self) -> _Waiting | None:
        if not self._waiting:
            return None
        match self.accept.order:
            case "priority":
                chosen = min(self._waiting.values(), key=lambda w: (-w.priority, w.sequence))
            case "age":
                chosen = min(
                    self._waiting.values(), key=lambda w: (w.accepted.timestamp() if w.accepted else 0.0, w.sequence)
                )
            case _:
                chosen = min(self._waiting.values(), key=lambda w: w.sequence)
        return self._waiting.pop(chosen.sequence)

    async def _taken(self, waiting: _Waiting) -> Group | None:
        closed = waiting.closed
        reason = self._refusal(closed)
        group: Group | None = None
        if not reason:
            try:
                group = await load_group(self.bus, closed, waiting.sequence, verify=self._verify)
                reason = self._refusal_of(group)
            except (TraceError, BlobError) as error:
                reason = "damaged"
                _log.error("a group is damaged", task=closed.task, error=str(error))
            except FromTheFuture as error:
                # Its closing stays open: an upgraded trainer gets it from its checkpoint.
                _log.error("parked: a newer version wrote this; upgrade the trainer", error=str(error))
                return None
            except BusError:
                self._waiting[waiting.sequence] = waiting
                raise
        if reason:
            self._lacking = True
            self.dropped[reason] += 1
            self._progress.drop(waiting.sequence)
            _log.info("a group was dropped", task=closed.task, reason=reason)
            return None
        return group

    def _refusal(self, closed: GroupTraces) -> str:
        if closed.expected and closed.terminal / closed.expected < self.accept.min_complete:
            return "incomplete"
        if closed.trainable < self.accept.min_trainable:
            return "too_few_trainable"
        scored = any(m.trace_rewards for m in closed.members)
        rewards = {m.reward for m in closed.members if m.trainable}
        if self.accept.zero_variance == "drop" and not scored and len(rewards) < 2:
            return "zero_variance"
        return ""

    def _refusal_of(self, group: Group) -> str:
        oldest = group.oldest_policy
        if oldest is None:
            return "no_traces"
        bound = self.accept.staleness
        if bound is not None and self._policy_seq is not None and self._policy_seq - oldest > bound:
            return "stale"
        return ""
