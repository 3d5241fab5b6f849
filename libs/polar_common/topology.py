"""The only place that creates streams and durable consumers. `polar doctor` compares the live ones with these."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StoreCompression,
    StreamConfig,
)
from nats.js.errors import NotFoundError

from . import subjects
from .ids import FIRST_SEGMENT, token

__all__ = [
    "ACK_WAIT_S", "BLOBS", "CATALOGUE", "DLQ", "EVENTS", "TRACES", "ConsumerSpec", "Topology", "apply",
    "apply_streams", "blobs_stream",
    "consumers", "differences", "events_stream", "live_topology", "streams", "trainer_consumer", "work_consumer",
]  # fmt: skip

ACK_WAIT_S = 30.0
"""The lease: work without a confirmed in-progress ack for this long is given to somebody else."""
DUPLICATE_WINDOW_S = 120.0
EVENTS = "POLAR_EVENTS"
BLOBS = "POLAR_BLOBS"
TRACES = "POLAR_TRACES"
DLQ = "POLAR_DLQ"
CATALOGUE = "POLAR_CATALOGUE"


@dataclass(frozen=True, slots=True)
class Topology:
    """What a house needs on its server. Sizes in bytes; -1 is unlimited."""

    segment: str = FIRST_SEGMENT
    replicas: int = 1
    work_classes: tuple[str, ...] = ("local", "docker")
    build: str = "live"
    lease_s: float = ACK_WAIT_S
    """Ack wait of every consumer; workers read it from the server."""
    events_bytes: int = -1
    traces_bytes: int = -1
    dlq_bytes: int = 1 << 30

    def for_segment(self, segment: str) -> Topology:
        """The same house with another open segment."""
        return replace(self, segment=segment)


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """One durable pull consumer. `owner` is the service that reads it."""

    durable: str
    stream: str
    filters: tuple[str, ...]
    owner: str
    ack_wait: float = ACK_WAIT_S
    headers_only: bool = field(default=False)

    def config(self) -> ConsumerConfig:
        single = len(self.filters) == 1
        return ConsumerConfig(
            durable_name=self.durable,
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self.ack_wait,
            max_deliver=-1,
            max_ack_pending=-1,
            filter_subject=self.filters[0] if single else None,
            filter_subjects=None if single else list(self.filters),
        )


def events_stream(segment: str) -> str:
    return f"{EVENTS}_{segment}"


def blobs_stream(segment: str) -> str:
    return f"{BLOBS}_{segment}"


def streams(topology: Topology) -> list[StreamConfig]:
    """The streams of a house, as they must be."""
    truth: dict[str, Any] = dict(
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        # Events of a session repeat most of their envelope: on disk that costs next to nothing. Not where servers
        # replicate: nats-server 2.15.1 can't cut a compressed block to where its raft log begins, so that after all of
        # them were killed at once a stream has no leader any more.
        compression=StoreCompression.S2 if topology.replicas == 1 else StoreCompression.NONE,
        num_replicas=topology.replicas,
        duplicate_window=DUPLICATE_WINDOW_S,
        allow_direct=True,
        deny_delete=True,
        deny_purge=True,
    )
    seg = topology.segment
    return [
        StreamConfig(
            name=events_stream(seg),
            subjects=[f"polar.events.{seg}.>"],
            max_bytes=topology.events_bytes,
            allow_atomic=True,
            **truth,
        ),
        StreamConfig(name=blobs_stream(seg), subjects=[f"polar.blobs.{seg}.>"], **truth),
        StreamConfig(name=CATALOGUE, subjects=["polar.catalogue.>"], **truth),
        StreamConfig(
            name=TRACES,
            subjects=["polar.traces.>"],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            discard=DiscardPolicy.NEW,
            max_bytes=topology.traces_bytes,
            num_replicas=topology.replicas,
            duplicate_window=DUPLICATE_WINDOW_S,
            allow_direct=True,
        ),
        StreamConfig(
            name=DLQ,
            subjects=["polar.dlq.>"],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            max_bytes=topology.dlq_bytes,
            num_replicas=topology.replicas,
            duplicate_window=DUPLICATE_WINDOW_S,
            allow_direct=True,
        ),
    ]


def work_consumer(work_class: str, segment: str = FIRST_SEGMENT, lease_s: float = ACK_WAIT_S) -> ConsumerSpec:
    """The queue of one class of work: its `queued` events."""
    return ConsumerSpec(
        f"gateway-{token(work_class)}",
        events_stream(segment),
        (subjects.queued_filter(work_class),),
        "gateway",
        lease_s,
    )


def trainer_consumer(trainer: str, run: str | None, build: str | None, lease_s: float = ACK_WAIT_S) -> ConsumerSpec:
    """A trainer's own: the groups that closed for a run and build (None: any). Made when the trainer connects."""
    return ConsumerSpec(
        f"trainer-{token(trainer)}", TRACES, (subjects.closed_filter(run or None, build or None),), "trainer", lease_s
    )


def consumers(topology: Topology) -> list[ConsumerSpec]:
    """All durable consumers but those of trainers and engine replicas. Who only folds the log follows without one."""
    events = events_stream(topology.segment)
    ended = (subjects.ANY_ARTIFACTS, subjects.ANY_FAILED, subjects.ANY_CANCELLED)
    lease = topology.lease_s
    return [
        *(work_consumer(c, topology.segment, lease) for c in topology.work_classes),
        ConsumerSpec(f"reconstructor-{token(topology.build)}", events, ended, "reconstructor", lease),
        ConsumerSpec("reconstructor-closed", events, (subjects.ANY_GROUP_CLOSED,), "reconstructor", lease),
        ConsumerSpec("evaluator", events, (subjects.ANY_ARTIFACTS,), "evaluator", lease),
        ConsumerSpec("callbacks", events, (subjects.ANY_GROUP_CLOSED,), "ingest", lease),
    ]


async def apply_streams(js: JetStreamContext, topology: Topology, names: Collection[str] = ()) -> None:
    """Create the streams that are missing; `names`: only these."""
    for stream in streams(topology):
        if names and stream.name not in names:
            continue
        try:
            await js.stream_info(str(stream.name))
        except NotFoundError:
            await js.add_stream(stream)


async def apply(js: JetStreamContext, topology: Topology) -> None:
    """Create what is missing. What exists is left as it is: changing a live log is a person's decision."""
    await apply_streams(js, topology)
    for consumer in consumers(topology):
        try:
            await js.consumer_info(consumer.stream, consumer.durable)
        except NotFoundError:
            await js.add_consumer(consumer.stream, consumer.config())


_COMPARED = (
    "retention", "storage", "discard", "num_replicas", "max_bytes", "max_age", "max_msgs_per_subject", "allow_direct",
    "deny_delete", "deny_purge", "allow_atomic", "subjects", "compression",
)  # fmt: skip


async def differences(js: JetStreamContext, topology: Topology) -> list[str]:
    """How the live configuration differs from the code's, one line each; empty where all is well."""
    found = []
    for want in streams(topology):
        try:
            live = (await js.stream_info(str(want.name))).config
        except NotFoundError:
            found.append(f"stream {want.name} is missing")
            continue
        for key in _COMPARED:
            wanted, got = (None if v == StoreCompression.NONE else v for v in (getattr(want, key), getattr(live, key)))
            if (wanted or None) != (got or None) and not (key in ("max_bytes", "max_msgs_per_subject") and got == -1):
                found.append(f"stream {want.name}: {key} is {got!r}, should be {wanted!r}")
    for spec in consumers(topology):
        try:
            info = await js.consumer_info(spec.stream, spec.durable)
        except NotFoundError:
            found.append(f"consumer {spec.durable} on {spec.stream} is missing")
            continue
        want_consumer, live_consumer = _compared(spec.config()), _compared(info.config)
        for key, wanted in want_consumer.items():
            if live_consumer[key] != wanted:
                found.append(f"consumer {spec.durable}: {key} is {live_consumer[key]!r}, should be {wanted!r}")
    return found


def _compared(config: ConsumerConfig) -> dict[str, Any]:
    """What of a consumer matters. One filter and a list of one are the same."""
    filters = config.filter_subjects or ([config.filter_subject] if config.filter_subject else [])
    return {
        "filters": sorted(filters),
        "deliver_policy": config.deliver_policy,
        "ack_policy": config.ack_policy,
        "ack_wait": config.ack_wait,
        "max_ack_pending": config.max_ack_pending,
        "max_deliver": config.max_deliver,
    }


async def live_topology(js: JetStreamContext, segment: str) -> Topology:
    """The choices that a live segment was made with: replicas, bounds, classes, build and lease. Raises NotFoundError
    where there is no such segment."""
    info = await js.stream_info(events_stream(segment))
    found = {c.name: c.config for c in await js.consumers_info(events_stream(segment))}
    classes = tuple(n.removeprefix("gateway-") for n in found if n.startswith("gateway-"))
    builds = [n.removeprefix("reconstructor-") for n in found if n.startswith("reconstructor-")]
    made = Topology(segment=segment, replicas=info.config.num_replicas or 1, events_bytes=info.config.max_bytes or -1)
    waits = [c.ack_wait for n, c in found.items() if n.startswith("gateway-") and c.ack_wait]
    return replace(
        made,
        work_classes=classes or made.work_classes,
        build=next((b for b in builds if b != "closed"), made.build),
        lease_s=waits[0] if waits else made.lease_s,
    )
