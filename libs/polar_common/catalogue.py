"""The catalogue of log segments: which there are, what became of them, and which task ids a dropped one had.

One stream of facts that happen once. A log with one segment, as it begins, has an empty catalogue.
`polar.catalogue.segment.<seg>.<fact>` for `opened`, `rolled`, `archived`, `sealed`, `dropped`;
`polar.catalogue.task.<hash>` for each task of a dropped segment, so that its id is refused for ever.
`polar.catalogue.build.<build>`: under which rules a build is made, in all segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import orjson

from .bus import Bus
from .bus.read import Stored, leader_get
from .errors import ConfigError, Conflict, Poison
from .ids import FIRST_SEGMENT, token
from .topology import CATALOGUE, events_stream

__all__ = ["Catalogue", "Fact"]

Fact = Literal["opened", "rolled", "archived", "sealed", "dropped"]
_PREFIX = "polar.catalogue"


class Catalogue:
    """Reads and writes of the catalogue."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def segments(self) -> list[str]:
        """All segments, oldest first, dropped ones too; the last one is open. Raises Unavailable."""
        found = await self._fresh(f"{_PREFIX}.segment.*.opened")
        return [FIRST_SEGMENT, *(s.subject.split(".")[3] for s in found)]

    async def _fresh(self, pattern: str) -> list[Stored]:
        """What lies there, as new as the leader's: a replica may lag behind an acknowledgement."""
        newest = await leader_get(self._bus.nc, CATALOGUE, pattern)
        if newest is None:
            return []
        return await self._bus.read(CATALOGUE, [pattern], at_least=newest.sequence)

    async def kept(self) -> list[str]:
        """Those that aren't dropped."""
        return [s for s in await self.segments() if not await self.has(s, "dropped")]

    async def facts(self, segment: str) -> dict[str, dict[str, Any]]:
        """What became of a segment: fact → details. Raises Poison for one that can't be read."""
        found = await self._fresh(f"{_PREFIX}.segment.{segment}.*")
        return {s.subject.rpartition(".")[2]: _details(s) for s in found}

    async def has(self, segment: str, fact: Fact) -> bool:
        """Asked of the leader, so never stale."""
        return await leader_get(self._bus.nc, CATALOGUE, f"{_PREFIX}.segment.{segment}.{fact}") is not None

    async def record(self, segment: str, fact: Fact, **details: Any) -> None:
        """A fact, once; a repeat is the same fact."""
        subject = f"{_PREFIX}.segment.{segment}.{fact}"
        await self._bus.once_raw(subject, orjson.dumps({"segment": segment, "fact": fact, **details}), fact)

    async def remember(self, tasks: Iterable[str]) -> int:
        """Tasks whose segment is about to be dropped. Returns how many."""
        count = 0
        for task in tasks:
            segment, _, name = task.partition("-")
            body = orjson.dumps({"task": task, "segment": segment})
            try:
                await self._bus.once_raw(f"{_PREFIX}.task.{name}", body, task)
            except Conflict:
                # The same user id in two dropped segments: refused already.
                continue
            count += 1
        return count

    async def claim_build(self, build: str, rules: str, rules_hash: str) -> None:
        """A build is made under one rule set: whoever claims its name first decides which. Raises ConfigError."""
        if not build:
            raise ConfigError("a build needs a name", "build")
        subject = f"{_PREFIX}.build.{token(build)}"
        body = orjson.dumps({"build": build, "rules": rules, "rules_hash": rules_hash})
        try:
            await self._bus.once_raw(subject, body, rules_hash)
        except Conflict as conflict:
            found = await leader_get(self._bus.nc, CATALOGUE, subject)
            told = {} if found is None else _details(found)
            known = f"{told.get('rules')}, hash {str(told.get('rules_hash'))[:12]}"
            what = f"{build} exists under other rules ({known}), perhaps an earlier version's"
            what += ": give the new one another name (POLAR_BUILD names a house's own)"
            raise ConfigError(what, "build") from conflict

    async def earlier(self, task: str, segments: Sequence[str]) -> str:
        """The segment before this task's own in which the same run and id were accepted; "" if there is none."""
        own, _, name = task.partition("-")
        for segment in segments:
            if segment == own:
                break
            subject = f"polar.events.{segment}.task.{segment}-{name}.accepted"
            if await self.has(segment, "dropped"):
                continue
            if await leader_get(self._bus.nc, events_stream(segment), subject) is not None:
                return segment
        dropped = await leader_get(self._bus.nc, CATALOGUE, f"{_PREFIX}.task.{name}")
        return "" if dropped is None else str(_details(dropped).get("segment"))


def _details(stored: Stored) -> dict[str, Any]:
    try:
        details = orjson.loads(stored.body)
    except orjson.JSONDecodeError as error:
        raise Poison(f"{stored.subject} can't be read: {error}") from error
    if not isinstance(details, dict):
        raise Poison(f"{stored.subject} holds no fact")
    return details
