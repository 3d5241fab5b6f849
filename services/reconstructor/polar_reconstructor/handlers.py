"""Ends of sessions in, traces and facts about builds out; ends of groups in, their projection for a build out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import structlog
from prometheus_client import Counter, Histogram

from polar_common import subjects
from polar_common.blobs import Blobs
from polar_common.bus import Bus, Stored
from polar_common.catalogue import Catalogue
from polar_common.errors import BlobError, BusError, Conflict, FromTheFuture, Poison, TraceError, Unavailable
from polar_common.events import BuildFailed, GroupClosed
from polar_common.ids import segment_of
from polar_common.packing import BlobRef
from polar_common.trace_messages import read_message
from polar_common.traces import GroupTraces, RoleTotals, TraceManifest
from polar_render.vocabulary import Vocabulary

from .build import Built, Prepared, build_session, prepare
from .calls import Wanted
from .columns import Ids
from .domain import Selection, select
from .publish import outgoing, publish
from .rules import RuleSet, rule_named

__all__ = ["Reconstructor", "decided"]

ReadBlob = Callable[[BlobRef], Awaitable[bytes]]
_AT_ONCE = 16
_log = structlog.get_logger(__name__)
_sessions = Counter("polar_reconstructor_sessions", "Sessions built", ["result"])
_seconds = Histogram("polar_reconstructor_build_seconds", "From stored bytes to traces, blobs fetched")


class Reconstructor:
    """One build under one rule set. `dry`: everything is made and checked, nothing published.

    `blob`: how the bodies that completions name are read; by default from the bus's server.
    """

    def __init__(
        self, bus: Bus, build: str, rules: RuleSet, *, dry: bool = False, blob: ReadBlob | None = None
    ) -> None:
        self.bus = bus
        self.dry = dry
        self.build = build
        self.rules = rules
        self._rule = rule_named(rules.rule)
        self._decode = _decoder(rules)
        self._blobs: dict[str, Blobs] = {}
        self._read_blob = blob
        self.written = 0
        """Bytes of traces published."""

    async def on_ended(self, stored: Stored) -> None:
        """`artifacts`, `failed` or `cancelled`: build the session if that decides it and nobody has yet."""
        # What can't be read is this consumer's to bury (or to park), whatever else the session holds.
        _ = stored.event
        session = stored.subject.split(".")[4]
        if await self.built(session):
            return
        await self.reconstruct(session, await self.bus.read_session(session, at_least=stored.sequence))

    async def built(self, session: str) -> bool:
        """Whether this build has spoken about the session."""
        return await self.bus.last(subjects.build(self.build, session, "*")) is not None

    async def any_built(self, sessions: Iterable[str]) -> bool:
        for session in sessions:
            if await self.built(session):
                return True
        return False

    async def reconstruct(self, session: str, messages: Sequence[Stored]) -> str:
        """Build and publish from a session's messages; "" where nothing is decided yet, else `reconstructed|failed`."""
        try:
            selection = select(session, messages)
        except (TraceError, Poison) as error:
            _unless_newer(error)
            return await self.failed(session, None, messages, error)
        if selection is None:
            return ""
        try:
            built = await self._build(selection)
            if not self.dry:
                out = outgoing(built, self.build)
                await self._bring(session, out.pictures)
                size = await publish(self.bus, self.blobs(session), out)
                self.written += size
        except (FromTheFuture, Unavailable):
            raise
        except (TraceError, BlobError, Poison, Conflict) as error:
            return await self.failed(session, selection, messages, error)
        except BusError:
            raise
        except Exception as error:
            # The build is a pure function: trying again would fail again, and the group would wait for its deadline.
            _log.exception("building failed", session=session)
            return await self.failed(session, selection, messages, error)
        _sessions.labels("reconstructed").inc()
        return "reconstructed"

    async def _build(self, selection: Selection) -> Built:
        prepared = prepare(selection)
        bodies = await self.fetch(prepared)
        with _seconds.time():
            return build_session(prepared, bodies, self.rules, rule=self._rule, decode=self._decode)

    async def _bring(self, session: str, pictures: Iterable[BlobRef]) -> None:
        """Pictures that traces name have to be where the traces are. Raises BlobError."""
        blobs = self.blobs(session)
        read = self._read_blob or blobs.get
        for ref in pictures:
            if not await blobs.has(ref):
                try:
                    body = await read(ref)
                except BlobError as error:
                    raise BlobError(f"a picture of its prompts: {error}") from error
                await blobs.put_as(ref, body)

    async def fetch(self, prepared: Prepared) -> Mapping[str, bytes]:
        """The blobs a build needs. Raises BlobError naming the column that lacks one."""
        read = self._read_blob or self.blobs(prepared.selection.session).get
        found: dict[str, bytes] = {}
        wanted = list({w.ref.get("sha256"): w for w in prepared.wanted}.values())
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            found |= dict(await asyncio.gather(*(_get(read, wanted) for wanted in some)))
        return found

    def blobs(self, session: str) -> Blobs:
        segment = segment_of(session)
        if segment not in self._blobs:
            self._blobs[segment] = Blobs(self.bus, segment)
        return self._blobs[segment]

    async def failed(
        self, session: str, selection: Selection | None, messages: Sequence[Stored], error: Exception
    ) -> str:
        """Say that the session can't be built, and why."""
        run, task = (selection.run, selection.task) if selection else _correlation(messages)
        _log.error("session not built", session=session, build=self.build, reason=str(error))
        failed = BuildFailed(
            run=run,
            task=task,
            session=session,
            attempt=selection.attempt if selection else 0,
            build=self.build,
            rules_hash=self.rules.hash,
            reason=f"{type(error).__name__}: {error}"[:2000],
        )
        if not self.dry:
            await self.bus.once(failed)
        _sessions.labels("failed").inc()
        return "failed"

    async def claim(self) -> None:
        """Take the build's name for these rules. Raises ConfigError where it is another rule set's."""
        await Catalogue(self.bus).claim_build(self.build, self.rules.name, self.rules.hash)

    # -- groups

    async def on_group_closed(self, stored: Stored) -> None:
        """`group.closed`: its projection for this build, with the members' manifests and sums. The first one wins."""
        event = stored.event
        if not isinstance(event, GroupClosed):
            raise Poison(f"{stored.subject} holds a {event.kind}")
        await self.project(event)

    async def project(self, event: GroupClosed) -> bool:
        """Publish the projection; False if it is there already."""
        subject = subjects.trace_closed(event.run, self.build, event.task)
        if await self.bus.last(subject) is not None:
            return False
        manifests = {m.session: await self._manifest(event, m.session) for m in event.members}
        group = _projection(event, self.build, {s: m for s, m in manifests.items() if m is not None})
        body = group.model_dump_json().encode()
        try:
            await self.bus.once_raw(subject, body, f"{event.task}/{self.build}")
        except Conflict:
            _log.info("a group's projection was there first", task=event.task, build=self.build)
            return False
        return True

    async def _manifest(self, event: GroupClosed, session: str) -> TraceManifest | None:
        """The session's manifest, if its build is finished: `reconstructed` follows the manifest."""
        done = await self.bus.last(subjects.build(self.build, session, "reconstructed"))
        if done is None:
            return None
        subject = subjects.trace_manifest(event.run, self.build, event.task, session)
        stored = await self.bus.last(subject)
        if stored is None:
            # Dropped before its group closed: a trainer that takes the group has to find it.
            await self.reconstruct(session, await self.bus.read_session(session))
            stored = await self.bus.last(subject)
        return None if stored is None else read_message(TraceManifest, stored.body, stored.subject)


def _projection(event: GroupClosed, build: str, manifests: Mapping[str, TraceManifest]) -> GroupTraces:
    """Sums are over trainable members with a manifest: the denominators of EXACT §8."""
    counted = [manifests[m.session] for m in event.members if m.trainable and m.session in manifests]
    return GroupTraces(
        run=event.run,
        build=build,
        task=event.task,
        agent_role=event.agent_role,
        expected=event.expected,
        terminal=event.terminal,
        trainable=event.trainable,
        by=event.by,
        members=event.members,
        manifests={session: m.hash() for session, m in sorted(manifests.items())},
        action_tokens=sum(sum(m.action_tokens) for m in counted),
        traces=sum(len(m.traces) for m in counted),
        roles=_roles(counted),
    )


def _roles(counted: Sequence[TraceManifest]) -> dict[str, RoleTotals]:
    """Sums by agent role, over the same members as the whole group's."""
    found: dict[str, RoleTotals] = {}
    for manifest in counted:
        for role in sorted(set(manifest.roles)):
            own = [a for a, r in zip(manifest.action_tokens, manifest.roles, strict=True) if r == role]
            was = found.get(role, RoleTotals())
            found[role] = RoleTotals(
                sessions=was.sessions + 1, traces=was.traces + len(own), action_tokens=was.action_tokens + sum(own)
            )
    return dict(sorted(found.items()))


def _decoder(rules: RuleSet) -> Callable[[Ids], str] | None:
    if not rules.tokenizer:
        return None
    vocabulary = Vocabulary.load(Path(rules.tokenizer))
    return lambda ids: vocabulary.decode(ids.tolist())


def decided(session: str, messages: Sequence[Stored]) -> bool:
    """Whether these messages decide the session (damage does, too)."""
    try:
        return select(session, messages) is not None
    except (TraceError, Poison):
        return True


def _correlation(messages: Sequence[Stored]) -> tuple[str, str]:
    """Run and task, from the first message that can be read."""
    for message in messages:
        with suppress(Poison):
            return message.event.run, message.event.task
    return "", ""


def _unless_newer(error: Exception) -> None:
    """A newer schema version isn't damage: the message is parked until this service is upgraded."""
    if isinstance(error, FromTheFuture):
        raise error


async def _get(read: ReadBlob, wanted: Wanted) -> tuple[str, bytes]:
    try:
        ref = BlobRef.model_validate(wanted.ref)
        return ref.sha256, await read(ref)
    except (BlobError, ValueError) as error:
        raise BlobError(f"{wanted.place}: {error}") from error
