"""NATS users, one per service, each with just its subjects; made from `ownership.py` and `topology.py`, so they can't
drift from the code. `authorization` writes the server's configuration; `polar up` and `polar log permissions` use it.

A user's replies come to an inbox prefix of its own, so that nobody hears what others are told. Ephemeral consumers
have names that the server draws, so reading is allowed by stream with others' durable consumers denied by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .ids import token
from .ownership import OWNERS
from .topology import CATALOGUE, DLQ, TRACES, Topology, blobs_stream, consumers, events_stream

__all__ = [
    "ADMIN",
    "SERVICES",
    "STORES",
    "SYSTEM",
    "TOOLS",
    "USERS",
    "NatsUser",
    "authorization",
    "inbox_prefix",
    "users",
]

SERVICES = ("ingest", "gateway", "proxy", "reconstructor", "evaluator", "analytics", "trainer")
TOOLS = "tools"
"""Command-line tools: read everything, make builds and evaluations again, hand dead letters back."""
ADMIN = "admin"
"""The topology user: the only one that may create, change or delete streams."""
SYSTEM = "monitor"
"""The server's system account: health and statistics, none of the log."""
USERS = (*SERVICES, TOOLS, ADMIN, SYSTEM)
STORES = "$SYS.REQ.SERVER.PING.JSZ"
"""Asks each server for its store's bound and use. The only question to the system account that others may ask."""

_API = "$JS.API"
# Which streams a user reads: events, blobs, traces, dlq, catalogue.
_READS: dict[str, tuple[str, ...]] = {
    "ingest": ("events", "blobs", "dlq", "catalogue"),
    "gateway": ("events", "blobs"),
    "proxy": ("events", "blobs"),
    "reconstructor": ("events", "blobs", "traces", "catalogue"),
    "evaluator": ("events", "blobs"),
    "analytics": ("events", "blobs", "traces", "catalogue"),
    "trainer": ("events", "blobs", "traces"),
    TOOLS: ("events", "blobs", "traces", "dlq", "catalogue"),
}
_WRITES_BLOBS = ("ingest", "gateway", "proxy", "reconstructor", "evaluator", TOOLS)
_BUILD_NAMES = "polar.catalogue.build.>"
# Consumers that are as many as there are trainers and engine replicas are made by those who read them.
_MAKES = {"trainer": ("traces",), "proxy": ("events",)}
# Dead letters are named by the consumer that gave up; the scheduler and the projector follow without a durable one.
_BURIES = {"ingest": ("scheduler",), "analytics": ("analytics",)}


@dataclass(frozen=True, slots=True)
class NatsUser:
    """What one user may do. Empty `publish`: everything."""

    name: str
    publish: tuple[str, ...]
    deny: tuple[str, ...]
    subscribe: tuple[str, ...]


def inbox_prefix(user: str) -> str:
    """Where a user's replies come; without a user the client's default."""
    return f"_INBOX_{user}" if user else "_INBOX"


def users(topology: Topology, segments: tuple[str, ...] = ()) -> list[NatsUser]:
    """Everybody but the system account. `segments`: all live ones; by default the topology's."""
    segments = segments or (topology.segment,)
    made = [_service(name, topology, segments) for name in SERVICES]
    return [*made, _tools(topology, segments), NatsUser(ADMIN, (), (), (">",))]


def _streams(kinds: tuple[str, ...], segments: tuple[str, ...]) -> list[str]:
    found = []
    for kind in kinds:
        if kind == "events":
            found += [events_stream(s) for s in segments]
        elif kind == "blobs":
            found += [blobs_stream(s) for s in segments]
        else:
            found.append({"traces": TRACES, "dlq": DLQ, "catalogue": CATALOGUE}[kind])
    return found


def _reading(streams: list[str]) -> list[str]:
    """Ask for facts about a stream, single messages, batches, and an ephemeral consumer."""
    allowed = [f"{_API}.INFO", f"{_API}.STREAM.NAMES"]
    for stream in streams:
        allowed += [
            f"{_API}.STREAM.INFO.{stream}",
            f"{_API}.STREAM.MSG.GET.{stream}",
            f"{_API}.DIRECT.GET.{stream}",
            f"{_API}.DIRECT.GET.{stream}.>",
            f"{_API}.CONSUMER.CREATE.{stream}",
            f"{_API}.CONSUMER.MSG.NEXT.{stream}.*",
        ]
    return allowed


def _service(name: str, topology: Topology, segments: tuple[str, ...]) -> NatsUser:
    streams = _streams(_READS[name], segments)
    publish = [o.pattern for o in OWNERS.values() if o.owner == name] + _reading(streams)
    deny: list[str] = []
    if name in _WRITES_BLOBS:
        publish.append("polar.blobs.>")
    if name == "ingest":
        publish.append(STORES)
    if name == "reconstructor":
        publish += ["polar.traces.>", _BUILD_NAMES]
    publish += [f"polar.dlq.{consumer}.>" for consumer in _BURIES.get(name, ())]
    for spec in consumers(topology):
        if spec.owner == name:
            publish += _own_consumer(spec.stream, spec.durable)
        elif spec.stream in streams:
            deny.append(f"{_API}.CONSUMER.MSG.NEXT.{spec.stream}.{spec.durable}")
    for stream in _streams(_MAKES.get(name, ()), segments):
        others = [s.durable for s in consumers(topology) if s.stream == stream and s.owner != name]
        publish += _any_consumer(stream)
        deny += [subject for durable in others for subject in _taken(stream, durable)]
    if DLQ not in streams and any(subject.startswith("polar.dlq.") for subject in publish):
        # Whoever buries a message has to see whether it lies there already.
        publish.append(f"{_API}.STREAM.MSG.GET.{DLQ}")
    return NatsUser(name, tuple(publish), tuple(deny), (f"{inbox_prefix(name)}.>",))


def _own_consumer(stream: str, durable: str) -> list[str]:
    return [
        f"{_API}.CONSUMER.INFO.{stream}.{durable}",
        f"$JS.ACK.{stream}.{durable}.>",
        f"polar.dlq.{token(durable)}.>",
    ]


def _any_consumer(stream: str) -> list[str]:
    """Make a durable consumer under any name that isn't taken, work with it, and make it anew from elsewhere."""
    return [
        f"{_API}.CONSUMER.DELETE.{stream}.*",
        f"{_API}.CONSUMER.DURABLE.CREATE.{stream}.*",
        f"{_API}.CONSUMER.CREATE.{stream}.>",
        f"{_API}.CONSUMER.INFO.{stream}.*",
        f"$JS.ACK.{stream}.>",
        f"polar.dlq.*.{stream}.>",
    ]


def _taken(stream: str, durable: str) -> list[str]:
    create = f"{_API}.CONSUMER.CREATE.{stream}.{durable}"
    return [
        f"{_API}.CONSUMER.DELETE.{stream}.{durable}",
        f"{_API}.CONSUMER.DURABLE.CREATE.{stream}.{durable}",
        create,
        f"{create}.>",
        f"$JS.ACK.{stream}.{durable}.>",
        f"polar.dlq.{token(durable)}.>",
    ]


def _tools(topology: Topology, segments: tuple[str, ...]) -> NatsUser:
    streams = _streams(_READS[TOOLS], segments)
    owned = [o.pattern for o in OWNERS.values() if o.owner in ("reconstructor", "evaluator")]
    publish = [*owned, "polar.traces.>", _BUILD_NAMES, "polar.blobs.>", *_reading(streams), f"{_API}.STREAM.LIST"]
    publish += [f"{_API}.CONSUMER.{verb}.{stream}" + end for stream in streams for verb, end in _LOOKING]
    deny = [f"{_API}.CONSUMER.MSG.NEXT.{s.stream}.{s.durable}" for s in consumers(topology)]
    return NatsUser(TOOLS, tuple(publish), tuple(deny), (f"{inbox_prefix(TOOLS)}.>",))


_LOOKING = (("INFO", ".*"), ("LIST", ""), ("NAMES", ""))


def authorization(made: list[NatsUser], password: Callable[[str], str] | Mapping[str, str]) -> str:
    """The accounts block of a server's configuration. `password` gives each user's, or `$NAME` of a variable."""
    secret = password if callable(password) else password.__getitem__
    imports = f'    imports: [{{ service: {{ account: SYS, subject: "{STORES}" }} }}]'
    lines = ["accounts {", "  POLAR {", "    jetstream: enabled", imports, "    users: ["]
    for user in made:
        lines.append(f"      {{ user: {user.name}, password: {_text(secret(user.name))}")
        if user.publish:
            lines += ["        permissions {", f"          publish {{ allow: {_list(user.publish)}"]
            lines.append(f"            deny: {_list(user.deny)} }}")
            lines += [f"          subscribe {{ allow: {_list(user.subscribe)} }}", "        }"]
        lines.append("      }")
    lines += [
        "    ]",
        "  }",
        "  SYS {",
        f'    exports: [{{ service: "{STORES}", response: stream, accounts: [POLAR] }}]',
    ]
    lines += [f"    users: [{{ user: {SYSTEM}, password: {_text(secret(SYSTEM))} }}]", "  }"]
    return "\n".join([*lines, "}", "system_account: SYS"]) + "\n"


def _text(value: str) -> str:
    return value if value.startswith("$") else f'"{value}"'


def _list(patterns: tuple[str, ...]) -> str:
    return "[" + ", ".join(f'"{p}"' for p in patterns) + "]"
