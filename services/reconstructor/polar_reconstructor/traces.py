"""Reading published traces back: by session, by trace id, or all of a build, with their arrays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from polar_common import subjects
from polar_common.blobs import Blobs
from polar_common.bus import Bus, Stored, scan
from polar_common.errors import ConfigError, TraceError
from polar_common.events import GroupMember
from polar_common.ids import segment_of, task_of
from polar_common.packing import Column, unpack
from polar_common.topology import TRACES
from polar_common.trace_messages import read_message
from polar_common.traces import GroupTraces, Trace, TraceManifest
from polar_render.vocabulary import Vocabulary

from .columns import Floats, Ids, Mask

__all__ = [
    "Read", "build_traces", "closed_members", "find_traces", "find_trained", "find_vocabulary", "is_called", "pieces",
]  # fmt: skip

ID_PREFIX = 6


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """A published trace and its arrays: prompt int32[P]; response int32[R], mask uint8[R], logprobs float32[R]."""

    trace: Trace
    prompt: Ids
    response: Ids
    mask: Mask
    logprobs: Floats


async def find_traces(bus: Bus, name: str, build: str) -> list[Read]:
    """By session, `<session>/<number>`, or a trace id (six or more of its first digits).

    Raises ConfigError where nothing, or more than one id, fits; Poison, naming the message, for what can't be read.
    """
    session, _, number = name.partition("/")
    if "-" in session:
        found = await bus.read(TRACES, [subjects.session_traces(build, task_of(session), session)])
        wanted = [m for m in found if _numbered(m.subject) and number in ("", m.subject.rpartition(".")[2])]
        if not wanted:
            raise ConfigError(f"build {build} has no such trace", name)
        return [await _read(bus, message) for message in wanted]
    return [await _read(bus, await _by_id(bus, name, build))]


async def _by_id(bus: Bus, name: str, build: str) -> Stored:
    if len(name) < ID_PREFIX:
        raise ConfigError(f"give at least {ID_PREFIX} digits of a trace id, or a session", name)
    found: dict[str, str] = {}
    async for stored in scan(bus, TRACES, [subjects.manifests_filter(build=build)]):
        manifest = read_message(TraceManifest, stored.body, stored.subject)
        for number, trace in enumerate(manifest.traces):
            if trace.startswith(name):
                found[trace] = subjects.trace(manifest.run, build, manifest.task, manifest.session, number)
    if len(found) != 1:
        raise ConfigError(f"{len(found) or 'no'} traces of build {build} begin so", name)
    stored_trace = await bus.last(next(iter(found.values())))
    if stored_trace is None:
        raise ConfigError("the trace's message is gone: replay its build", name)
    return stored_trace


def is_called(completion: str, name: str) -> bool:
    """Whether that is its id, or six or more of its first digits."""
    return completion == name or (len(name) >= ID_PREFIX and completion.startswith(name))


async def find_trained(bus: Bus, name: str, build: str) -> list[Read]:
    """The traces of a build that train a completion of that name."""
    found = []
    async for stored in scan(bus, TRACES, [subjects.trace_filter(build=build)]):
        # Parsing all of a build's traces would take many times as long as looking.
        if _numbered(stored.subject) and name.encode() in stored.body:
            trace = read_message(Trace, stored.body, stored.subject)
            if any(s.trained and is_called(s.completion, name) for s in trace.spans):
                found.append(await _read(bus, stored))
    return found


async def build_traces(bus: Bus, build: str, run: str | None = None) -> AsyncIterator[Read]:
    """All traces of a build that a manifest names, by session in the order their manifests came.

    Raises TraceError where one is gone; Poison, naming the message, for what can't be read.
    """
    waiting: dict[str, dict[str, Stored]] = {}
    async for stored in scan(bus, TRACES, [subjects.trace_filter(run, build)]):
        tokens = stored.subject.split(".")
        if len(tokens) != 7:
            continue
        session, name = tokens[5], tokens[6]
        if name != "manifest":
            waiting.setdefault(session, {})[name] = stored
            continue
        there = waiting.pop(session, {})
        for number in range(len(read_message(TraceManifest, stored.body, stored.subject).traces)):
            if str(number) not in there:
                raise TraceError(f"{session}: trace {number} of build {build} is gone: replay it under another name")
            yield await _read(bus, there[str(number)])


async def closed_members(bus: Bus, build: str, run: str | None = None) -> dict[str, GroupMember]:
    """Session → how it ended, of the groups that are closed for a build."""
    found: dict[str, GroupMember] = {}
    async for stored in scan(bus, TRACES, [subjects.closed_filter(run, build)]):
        found |= {m.session: m for m in read_message(GroupTraces, stored.body, stored.subject).members}
    return found


def _numbered(subject: str) -> bool:
    return subject.rpartition(".")[2].isdigit()


async def _read(bus: Bus, stored: Stored) -> Read:
    trace = read_message(Trace, stored.body, stored.subject)
    blobs = Blobs(bus, segment_of(trace.session))

    async def column(one: Column) -> npt.NDArray[np.generic]:
        return unpack(one, await blobs.column(one))

    return Read(
        trace,
        cast(Ids, await column(trace.prompt_ids)),
        cast(Ids, await column(trace.response_ids)),
        cast(Mask, await column(trace.loss_mask)),
        cast(Floats, await column(trace.logprobs)),
    )


def find_vocabulary(fingerprint: str, directories: Iterable[Path]) -> Vocabulary | None:
    """The tokenizer with this fingerprint among model directories; any of them where the trace names none."""
    for directory in directories:
        if not (directory / "tokenizer.json").is_file():
            continue
        found = Vocabulary.load(directory)
        if not fingerprint or found.fingerprint == fingerprint:
            return found
    return None


def pieces(read: Read) -> list[tuple[str, Ids]]:
    """The trace in stretches of one source: `prompt`, `context` (between samples), `sampled`, `masked` samples."""
    found: list[tuple[str, Ids]] = [("prompt", read.prompt)]
    at = 0
    for span in read.trace.spans:
        if span.start > at:
            found.append(("context", read.response[at : span.start]))
        end = span.start + span.length
        borders = np.flatnonzero(np.diff(read.mask[span.start : end])) + span.start + 1
        for start, stop in zip([span.start, *borders.tolist()], [*borders.tolist(), end], strict=True):
            if stop > start:
                found.append(("sampled" if read.mask[start] else "masked", read.response[start:stop]))
        at = end
    if at < len(read.response):
        found.append(("context", read.response[at:]))
    return found
