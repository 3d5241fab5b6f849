"""The life of a log segment: surveyed, rolled over to the next, sealed, and dropped when it is archived and verified.

Nothing here can lose anything by being interrupted: each step checks what the one before it has to have done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from nats.js.api import StreamInfo

from polar_common.bus import Bus, scan
from polar_common.catalogue import Catalogue
from polar_common.errors import ConfigError
from polar_common.topology import Topology, apply, blobs_stream, events_stream

from .format import flush_archive
from .read import check_archive, read_archive

__all__ = ["Bounds", "Survey", "active", "drop", "due", "roll", "seal", "survey"]

_ENDS = ("completed", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Bounds:
    """How large and how old a segment becomes: the server keeps 200 to 300 bytes of memory per subject, and each
    subject is used once. `days` 0: whatever its age."""

    messages: int = 5_000_000
    bytes: int = 200_000_000_000
    days: float = 0.0

    def reason(self, messages: int, size: int, age: timedelta) -> str:
        """Why a segment of that size (bytes, blobs included) and age is due to be rolled; "" if it isn't."""
        if messages >= self.messages:
            return f"{messages:,} messages"
        if size >= self.bytes:
            return f"{size:,} bytes"
        return f"{age.days} days" if self.days and age >= timedelta(days=self.days) else ""


@dataclass(slots=True)
class Survey:
    """A segment as it is. `state`: open, rolled, sealed, dropped. `live`: sessions without an end; `open_groups`: tasks
    whose group isn't closed; `archived`: the highest event that an archive is known to hold; `due`: why it should be
    rolled, where it's open or only half rolled."""

    segment: str
    state: str
    messages: int = 0
    bytes: int = 0
    last: int = 0
    tasks: int = 0
    sessions: int = 0
    live: int = 0
    open_groups: int = 0
    archived: int = 0
    due: str = ""

    @property
    def quiet(self) -> bool:
        """Nothing is left to happen."""
        return self.live == 0 and self.open_groups == 0


def _state(facts: Mapping[str, object]) -> str:
    return next((s for s in ("dropped", "sealed", "rolled") if s in facts), "open")


async def due(bus: Bus, segment: str, bounds: Bounds = Bounds()) -> str:
    """Why a segment should be rolled: it's open and has reached a bound, or it was rolled half-way; "" where it needn't
    be. Quick, however long the log."""
    state = _state(await Catalogue(bus).facts(segment))
    if state == "rolled":
        return await _half_rolled(bus, segment)
    if state != "open":
        return ""
    return await _due(bus, segment, await bus.js.stream_info(events_stream(segment)), bounds)


async def _half_rolled(bus: Bus, segment: str) -> str:
    """A rolled segment without one behind it: nothing new is taken anywhere until the roll is done again."""
    return "a roll that was broken off" if (await Catalogue(bus).segments())[-1] == segment else ""


async def _due(bus: Bus, segment: str, events: StreamInfo, bounds: Bounds) -> str:
    blobs = (await bus.js.stream_info(blobs_stream(segment))).state.bytes
    age = datetime.now(UTC) - events.created if events.created else timedelta()
    return bounds.reason(events.state.messages, events.state.bytes + blobs, age)


async def survey(bus: Bus, segment: str, bounds: Bounds = Bounds()) -> Survey:
    """Count what there is, in one pass over tasks, groups and sessions' ends."""
    facts = await Catalogue(bus).facts(segment)
    state = _state(facts)
    found = Survey(segment, state, archived=int(facts.get("archived", {}).get("last", 0)))
    if state == "dropped":
        return found
    info = await bus.js.stream_info(events_stream(segment))
    found.messages, found.bytes, found.last = info.state.messages, info.state.bytes, info.state.last_seq
    if state == "open":
        found.due = await _due(bus, segment, info, bounds)
    elif state == "rolled":
        found.due = await _half_rolled(bus, segment)
    closed = ended = 0
    prefix = f"polar.events.{segment}"
    filters = [f"{prefix}.task.*.accepted", f"{prefix}.group.*.closed", f"{prefix}.session.*.0.*"]
    async for stored in scan(bus, events_stream(segment), filters):
        tokens = stored.subject.split(".")
        found.tasks += tokens[3] == "task"
        closed += tokens[3] == "group"
        found.sessions += tokens[-1] == "accepted" and tokens[3] == "session"
        ended += tokens[-1] in _ENDS
    found.live, found.open_groups = found.sessions - ended, found.tasks - closed
    return found


async def active(bus: Bus) -> tuple[str, list[str]]:
    """The segment that a house has to serve, and all that aren't dropped: the oldest in which something is left to
    happen, else the open one."""
    catalogue = Catalogue(bus)
    there = await catalogue.kept()
    for segment in there[:-1]:
        if not await catalogue.has(segment, "sealed") and not (await survey(bus, segment)).quiet:
            return segment, there
    return there[-1], there


async def roll(bus: Bus, topology: Topology) -> str:
    """Open the next segment and return its name; done again, it finishes what was broken off. Tasks go there when the
    house is started again; until then, and until all its sessions have ended, the old one is served.

    Raises ConfigError if the topology's segment isn't the open one.
    """
    catalogue = Catalogue(bus)
    segments = await catalogue.segments()
    if segments[-1] != topology.segment:
        raise ConfigError(f"the open segment is {segments[-1]}, not {topology.segment}", "segment")
    following = f"s{len(segments) + 1}"
    await apply(bus.js, topology.for_segment(following))
    # Ingest asks for this fact: from here on it takes nothing new into the old segment.
    await catalogue.record(topology.segment, "rolled", next=following)
    await catalogue.record(following, "opened", after=topology.segment)
    return following


async def seal(bus: Bus, segment: str) -> Survey:
    """Make a segment's streams read-only, for ever. Raises ConfigError while anything is left to happen in it."""
    found = await _closed_segment(bus, segment)
    for stream in (events_stream(segment), blobs_stream(segment)):
        config = (await bus.js.stream_info(stream)).config
        if not config.sealed:
            config.sealed = True
            await bus.js.update_stream(config)
    await Catalogue(bus).record(segment, "sealed", last=found.last)
    return await survey(bus, segment)


async def _closed_segment(bus: Bus, segment: str) -> Survey:
    found = await survey(bus, segment)
    if found.state == "open":
        raise ConfigError(f"{segment} is the open segment: roll it first", "segment")
    if found.state == "dropped":
        raise ConfigError(f"{segment} was dropped", "segment")
    if not found.quiet:
        raise ConfigError(f"{segment}: {found.live} sessions and {found.open_groups} groups haven't ended", "segment")
    return found


async def drop(bus: Bus, segment: str, archive: Path) -> Survey:
    """Delete a sealed segment that the archive holds whole. Its task ids are refused from here on.

    Raises ConfigError for anything that would lose something: not sealed, an archive that is incomplete or damaged.
    """
    found = await _closed_segment(bus, segment)
    if found.state != "sealed":
        raise ConfigError(f"{segment} isn't sealed: `polar log seal {segment}`", "segment")
    manifest, wrong = check_archive(archive)
    if manifest.segment != segment:
        wrong.append(f"{archive} is the archive of segment {manifest.segment}")
    for stream in (events_stream(segment), blobs_stream(segment)):
        info = await bus.js.stream_info(stream)
        held = manifest.streams.get(stream)
        if held is None or (held.messages, held.last) != (info.state.messages, info.state.last_seq):
            there = f"{held.messages} up to {held.last}" if held else "nothing"
            wrong.append(f"{stream} has {info.state.messages} messages up to {info.state.last_seq}, archived: {there}")
    if wrong:
        raise ConfigError("; ".join(wrong[:5]), "archive")
    # The directory may be a copy that nobody flushed.
    flush_archive(archive, manifest)
    catalogue = Catalogue(bus)
    accepted = (s.subject.split(".") for s in read_archive(archive, check=False) if s.subject.endswith(".accepted"))
    await catalogue.remember(tokens[4] for tokens in accepted if tokens[3] == "task")
    await catalogue.record(segment, "dropped", archive=str(archive.resolve()), last=found.last)
    for stream in (events_stream(segment), blobs_stream(segment)):
        await bus.js.delete_stream(stream)
    return await survey(bus, segment)
