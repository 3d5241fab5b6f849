"""`polar log`: segments of the log, archives of them, and the server's users."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from polar_common.archive import ArchiveSource, Manifest, check_archive, export, load_archive
from polar_common.archive import segments as life
from polar_common.bus import Bus
from polar_common.catalogue import Catalogue
from polar_common.errors import PolarError
from polar_common.permissions import ADMIN, SYSTEM, USERS, NatsUser, authorization, users
from polar_common.topology import Topology, events_stream, live_topology
from polar_common.verify import Options, audit

from .connect import with_bus
from .house import _DATA, DataOption, JsonOption
from .output import console, emit, table
from .verify import tell

__all__ = ["log"]

log = typer.Typer(help="The log: segments, archives, users.", no_args_is_help=True)
Directory = Annotated[Path, typer.Argument(help="The archive's directory.")]
_BOUNDS = life.Bounds()
Segment = Annotated[str, typer.Argument(help="A segment, e.g. s1.")]


class _Bar:
    """Messages so far, on a terminal."""

    def __init__(self, quiet: bool) -> None:
        columns = (TextColumn("{task.description}"), TextColumn("{task.completed:,.0f}"), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self._shown = self.progress.add_task("", total=None)

    def __call__(self, what: str, count: int) -> None:
        self.progress.update(self._shown, description=what, completed=count)


@log.command("segments")
def segments(data: DataOption = _DATA, json: JsonOption = False) -> None:
    """All segments: what they hold, what is left to happen in them, how far they are archived.

    Example: polar log segments
    """

    async def work(bus: Bus) -> list[life.Survey]:
        return [await life.survey(bus, s) for s in await Catalogue(bus).segments()]

    _tell(with_bus(data, work), json)


def _tell(found: list[life.Survey], json: bool) -> None:
    if json:
        for one in found:
            emit(asdict(one))
    elif found:
        table("", list(asdict(found[0])), [list(asdict(one).values()) for one in found])


@log.command("roll")
def roll(
    if_due: Annotated[bool, typer.Option("--if-due", help="Only if the open segment has reached a bound.")] = False,
    messages: Annotated[int, typer.Option(help="Bound in messages.")] = _BOUNDS.messages,
    size: Annotated[int, typer.Option(help="Bound in bytes, blobs included.")] = _BOUNDS.bytes,
    days: Annotated[float, typer.Option(help="Bound in days; 0: whatever its age.")] = _BOUNDS.days,
    data: DataOption = _DATA,
    json: JsonOption = False,
) -> None:
    """Open the next segment. The running house finishes what it has and takes nothing new until it is started again.

    Example: polar log roll --if-due --days 30 && polar down && polar up
    """

    async def work(bus: Bus) -> tuple[str, str]:
        newest = (await Catalogue(bus).segments())[-1]
        due = await life.due(bus, newest, life.Bounds(messages, size, days))
        # The next segment gets the choices that this one was made with.
        return (await life.roll(bus, await live_topology(bus.js, newest)) if due or not if_due else ""), due

    opened, due = with_bus(data, work, ADMIN)
    if json:
        emit({"opened": opened, "due": due})
    elif opened:
        console.print(f"segment {opened} is open; start the house again to use it", markup=False)
    else:
        console.print("not due", markup=False)
    if not opened:
        raise typer.Exit(1)


@log.command("seal")
def seal(segment: Segment, data: DataOption = _DATA, json: JsonOption = False) -> None:
    """Make a rolled segment read-only, for ever. Refused while anything is left to happen in it.

    Example: polar log seal s1
    """
    _tell([with_bus(data, lambda bus: life.seal(bus, segment), ADMIN)], json)


@log.command("drop")
def drop(
    segment: Segment,
    archive: Annotated[Path, typer.Option(help="The archive that holds it whole; its hashes are checked first.")],
    data: DataOption = _DATA,
    json: JsonOption = False,
) -> None:
    """Delete a sealed segment that is archived and verified. Its task ids stay refused.

    Example: polar log drop s1 --archive /backup/s1
    """
    _tell([with_bus(data, lambda bus: life.drop(bus, segment, archive), ADMIN)], json)


@log.command("export")
def export_(
    directory: Directory,
    segment: Annotated[str, typer.Option(help="By default the first one.")] = "s1",
    traces: Annotated[bool, typer.Option(help="Traces too; a replay makes them again.")] = True,
    data: DataOption = _DATA,
    json: JsonOption = False,
) -> None:
    """Write a segment to compressed files with hashes. Started again, it adds what is new. That a sealed segment is
    archived is noted in the catalogue.

    Example: polar log export /backup/s1
    """
    bar = _Bar(json)

    async def work(bus: Bus) -> tuple[Manifest, bool]:
        manifest = await export(bus, directory, segment, traces=traces, on_progress=bar)
        return manifest, await Catalogue(bus).has(segment, "sealed")

    with bar.progress:
        manifest, final = with_bus(data, work)
    if final:
        last = manifest.streams[events_stream(segment)].last
        place = str(directory.resolve())
        with_bus(data, lambda bus: Catalogue(bus).record(segment, "archived", last=last, archive=place), ADMIN)
    _tell_archive(manifest, [], json)


@log.command("import")
def import_(directory: Directory, data: DataOption = _DATA, json: JsonOption = False) -> None:
    """Bring an archive onto this log, which must not hold that segment yet. Interrupted, it can be started again.

    Example: polar log import /backup/s1
    """
    bar = _Bar(json)

    async def work(bus: Bus) -> Manifest:
        return await load_archive(bus, directory, Topology(), bar)

    with bar.progress:
        manifest = with_bus(data, work, ADMIN)
    _tell_archive(manifest, [], json)


@log.command("check")
def check(
    directory: Directory,
    verify: Annotated[bool, typer.Option(help="Audit its content too, as `polar verify` does.")] = False,
    json: JsonOption = False,
) -> None:
    """Check an archive's files against its manifest; no server is needed. Exit code 1 if anything is wrong.

    Example: polar log check /backup/s1 --verify
    """
    manifest, wrong = check_archive(directory)
    _tell_archive(manifest, wrong, json)
    if wrong:
        raise PolarError(f"{len(wrong)} files are wrong")
    if verify:
        import asyncio

        tell(asyncio.run(audit(ArchiveSource(directory), Options(settled=True))), json)


def _tell_archive(manifest: Manifest, wrong: list[str], json: bool) -> None:
    rows = [
        [name, len(s.files), s.messages, sum(f.bytes for f in s.files), s.last] for name, s in manifest.streams.items()
    ]
    if json:
        streams = [dict(zip(("stream", "files", "messages", "bytes", "last"), r, strict=True)) for r in rows]
        emit({"segment": manifest.segment, "complete": manifest.complete, "streams": streams, "wrong": wrong})
        return
    table(f"segment {manifest.segment}", ["stream", "files", "messages", "bytes", "last"], rows)
    for line in wrong:
        console.print(line, markup=False)


@log.command("permissions")
def permissions(
    work_class: Annotated[list[str] | None, typer.Option(help="A class of work; by default local and docker.")] = None,
    segment: Annotated[list[str] | None, typer.Option(help="A live segment; by default s1.")] = None,
    variable: Annotated[str, typer.Option(help="Prefix of the variables that hold passwords.")] = "POLAR_NATS_",
    passwords: Annotated[
        bool, typer.Option("--passwords", help="Print fresh passwords for these variables instead.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Print the accounts and users of a NATS configuration, with passwords as environment variables. As JSON: each
    user's rights, or a fresh password, with its variable.

    Example: polar log permissions > compose/nats/users.conf && polar log permissions --passwords >> compose/.env
    """
    named = {user: f"{variable}{user.upper()}" for user in USERS}
    if passwords:
        for user, name in named.items():
            # A letter first: the server takes a variable that begins with a digit for a number.
            fresh = f"p{secrets.token_hex(16)}"
            if json:
                emit({"name": user, "variable": name, "password": fresh})
            else:
                console.out(f"{name}={fresh}", highlight=False)
        return
    topology = Topology(work_classes=tuple(work_class or ("local", "docker")), segment=(segment or ["s1"])[-1])
    made = users(topology, tuple(segment or ()))
    if json:
        for one in (*made, NatsUser(SYSTEM, (), (), ())):
            emit({"variable": named[one.name], "system": one.name == SYSTEM, **asdict(one)})
        return
    console.out(authorization(made, lambda user: f"${named[user]}"), end="", highlight=False)
