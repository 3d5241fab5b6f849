"""Uploads, downloads and patches where the files are a container's own: `courier.py` is run inside it.

What comes back was made in reach of the agent and is read as such: bounded, parsed as data, never unpacked on the host.
"""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import IO

from polar_common.errors import ResourceExhausted, RuntimeFault
from polar_runtime import archive
from polar_runtime.base import Runtime
from polar_runtime.beneath import Found
from polar_runtime.gitstore import Change, Node

__all__ = ["CourieredRuntime"]

_MAX_LISTING = 256 << 20
# Of a patch's files are so many bytes in memory at once, and one file more.
_BATCH = 64 << 20
_MODES = {"100644", "100755", "120000"}


class CourieredRuntime(Runtime):
    """Subclasses say how the courier is run. The writable places are the working directory, HOME and `/tmp`."""

    @abstractmethod
    async def _courier(self, args: Sequence[str], stdin: bytes, sink: Callable[[bytes], None]) -> tuple[int, str]:
        """Run `courier.py ARGS` inside as the user who runs commands; returns its exit code and standard error."""

    async def upload(self, data: bytes | Mapping[str, bytes], dest: str | None = None) -> None:
        limit = self.spec.limits.disk_mb << 20
        base = (dest or self.workdir).rstrip("/")
        for root, found in self._by_root(archive.entries(data, max_bytes=limit), base).items():
            await self._call("put", root, archive.to_tar(found))

    def _by_root(self, found: Sequence[archive.Entry], base: str) -> dict[str, list[archive.Entry]]:
        sorted_out: dict[str, list[archive.Entry]] = {}
        for entry in found:
            root, relative = self._place(entry.path if entry.path.startswith("/") else f"{base}/{entry.path}")
            moved = archive.Entry(relative, entry.mode, entry.data, entry.target)
            sorted_out.setdefault(root, []).append(moved)
        return sorted_out

    async def download(self, paths: Sequence[str], *, max_bytes: int = 64 << 20) -> dict[str, bytes]:
        got: dict[str, bytes] = {}
        for path in paths:
            root, relative = self._place(path if path.startswith("/") else f"{self.workdir}/{path}")
            found = [f for f in await self._list(root, relative) if f.mode != "120000"]
            if sum(f.size for f in found) + sum(map(len, got.values())) > max_bytes:
                raise ResourceExhausted(f"more than {max_bytes} bytes", "disk")
            contents = await self._read(root, found, max_bytes)
            got |= {archive.key(path, relative, name): data for name, data in contents.items()}
        return got

    async def _tree(self) -> list[Node]:
        found = await self._list(self.workdir, ".")
        if sum(f.size for f in found) > self.spec.limits.disk_mb << 20:
            raise ResourceExhausted(f"more than {self.spec.limits.disk_mb} MiB in the working directory", "disk")
        store = self._store()
        if self._base:
            # A patch is to be made of it: too much for one is told before anything is read.
            store.check_changed(found)
        wanted = [f for f in found if store.unread(f.path, f.stamp)]
        # On disk until git has it: the first snapshot of a large repository would fill the memory.
        spool: IO[bytes] = tempfile.TemporaryFile(dir=self._git_dir().parent)  # noqa: SIM115 - closed with its nodes
        if wanted:
            limit = sum(f.size for f in wanted) + 4096 * (len(wanted) + 16)
            await self._call("read", self.workdir, b"\0".join(f.path for f in wanted), _bounded(spool, limit))
        contents = await asyncio.to_thread(_index, spool)
        return [Node(f.path, f.mode, f.size, partial(_content, spool, contents, f.path), f.stamp) for f in found]

    async def _apply(self, changes: Sequence[Change]) -> None:
        gone = [c.path for c in changes if c.read is None]
        if gone:
            await self._call("remove", self.workdir, b"\0".join(gone))
        batch: list[archive.Entry] = []
        for change in changes:
            if change.read is not None:
                batch.append(_entry(change, await asyncio.to_thread(change.read)))
            if sum(len(e.data or b"") for e in batch) > _BATCH:
                await self._call("put", self.workdir, archive.to_tar(batch))
                batch = []
        if batch:
            await self._call("put", self.workdir, archive.to_tar(batch))

    async def _list(self, root: str, relative: str) -> list[Found]:
        out = io.BytesIO()
        await self._call("list", root, os.fsencode(relative), _bounded(out, _MAX_LISTING))
        return [_parsed(record) for record in out.getvalue().split(b"\0") if record]

    async def _read(self, root: str, found: Sequence[Found], max_bytes: int) -> dict[bytes, bytes]:
        if not found:
            return {}
        out = io.BytesIO()
        limit = max_bytes + 4096 * (len(found) + 16)
        await self._call("read", root, b"\0".join(f.path for f in found), _bounded(out, limit))
        return dict(_unpack(out.getvalue()))

    async def _call(self, action: str, root: str, stdin: bytes, sink: Callable[[bytes], None] = lambda _: None) -> None:
        code, error = await self._courier([action, root], stdin, sink)
        if code == 4:
            raise ResourceExhausted(error, "disk")
        if code:
            raise RuntimeFault(f"{action} in {root}: {error[-500:] or f'ended with {code}'}")

    def _place(self, path: str) -> tuple[str, str]:
        for root in (self.workdir, self.home, "/tmp"):
            if path == root or path.startswith(root.rstrip("/") + "/"):
                relative = path[len(root) :].strip("/") or "."
                if ".." in relative.split("/"):
                    break
                return root, relative
        raise RuntimeFault(f"{path} is in neither the working directory nor HOME nor /tmp")


def _bounded(out: IO[bytes], limit: int) -> Callable[[bytes], None]:
    written = 0

    def write(data: bytes) -> None:
        nonlocal written
        written += len(data)
        if written > limit:
            raise ResourceExhausted(f"a container answered with more than {limit} bytes", "disk")
        out.write(data)

    return write


def _parsed(record: bytes) -> Found:
    try:
        mode, size, stamp, path = record.split(b" ", 3)
        numbers = None if stamp == b"-" else tuple(map(int, stamp.split(b",")))
        found = Found(path, mode.decode(), int(size), numbers)
    except ValueError as error:
        raise RuntimeFault(f"not a listing: {record[:100]!r}") from error
    parts = path.lower().split(b"/")
    if found.mode not in _MODES or found.size < 0 or b".." in parts or b".git" in parts or b"" in parts:
        raise RuntimeFault(f"not a listing: {record[:100]!r}")
    return found


def _unpack(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    spool = io.BytesIO(data)
    for path, where in _index(spool).items():
        if isinstance(where, bytes):
            yield path, where
        else:
            yield path, data[where[0] : where[0] + where[1]]


def _index(spool: IO[bytes]) -> dict[bytes, bytes | tuple[int, int]]:
    """Path → a link's target, or where in the archive a file's content is and how long."""
    found: dict[bytes, bytes | tuple[int, int]] = {}
    spool.seek(0)
    if not spool.read(1):
        return found
    spool.seek(0)
    try:
        with tarfile.open(fileobj=spool, mode="r:") as tar:
            for member in tar:
                content = os.fsencode(member.linkname) if member.issym() else (member.offset_data, member.size)
                found[os.fsencode(member.name)] = content
    except (tarfile.TarError, EOFError) as error:
        raise RuntimeFault(f"a container answered with a broken archive: {error}") from error
    return found


def _content(spool: IO[bytes], contents: Mapping[bytes, bytes | tuple[int, int]], path: bytes) -> bytes:
    where = contents.get(path)
    if where is None:
        raise FileNotFoundError(path)
    return where if isinstance(where, bytes) else os.pread(spool.fileno(), where[1], where[0])


def _entry(change: Change, data: bytes) -> archive.Entry:
    path = os.fsdecode(change.path)
    if change.mode == "120000":
        return archive.Entry(path, target=os.fsdecode(data))
    return archive.Entry(path, 0o755 if change.mode == "100755" else 0o644, data=data)
