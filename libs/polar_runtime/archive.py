"""What is written into a runtime: a mapping of files, or a tar archive from someone who may mean harm.

An archive is read through once and judged as a whole before its first entry is handed out. It is in memory meanwhile,
so that it may be of half a gigabyte once unpacked, whatever disk there is.
"""

from __future__ import annotations

import gzip
import io
import os
import posixpath
import stat
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from polar_common.errors import ResourceExhausted, RuntimeFault
from polar_runtime.beneath import Beneath

__all__ = ["Entry", "entries", "key", "pack_files", "to_tar"]

_MAX_ENTRIES = 200_000
_MAX_BYTES = 512 << 20
_TOO_LARGE = "the archive is too large once unpacked"


@dataclass(frozen=True, slots=True)
class Entry:
    """A file (`data`), a symbolic link (`target`) or a directory (neither). `path` is clean, `/`-separated."""

    path: str
    mode: int = 0o644
    data: bytes | None = None
    target: str | None = None

    def write(self, root: Beneath, path: str) -> None:
        """Write it at `path` below `root`."""
        if self.target is not None:
            root.link(path, os.fsencode(self.target))
        elif self.data is not None:
            root.write(path, self.data, self.mode)
        elif path != ".":
            root.make_dir(path)


def entries(data: bytes | Mapping[str, bytes], *, max_bytes: int) -> list[Entry]:
    """The entries of an upload, all checked. `RuntimeFault` for what could reach outside, `ResourceExhausted` for what
    is larger than `max_bytes` once unpacked."""
    if isinstance(data, Mapping):
        if sum(map(len, data.values())) > max_bytes:
            raise ResourceExhausted(f"files of more than {max_bytes} bytes", "disk")
        return [Entry(_clean(path, absolute=True), data=content) for path, content in data.items()]
    try:
        with tarfile.open(fileobj=io.BytesIO(_unpacked(data)), mode="r:") as tar:
            return _read(tar, min(max_bytes, _MAX_BYTES))
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error) as error:
        raise RuntimeFault(f"not a readable tar archive: {error}") from error


def _unpacked(data: bytes) -> bytes:
    """Without its compression. The tar reader would take a header of any length into memory."""
    if not data.startswith(b"\x1f\x8b"):
        return data
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        plain = file.read(_MAX_BYTES + 1)
    if len(plain) > _MAX_BYTES:
        raise ResourceExhausted(_TOO_LARGE, "disk")
    return plain


def _read(tar: tarfile.TarFile, max_bytes: int) -> list[Entry]:
    found: list[Entry] = []
    files: dict[str, Entry] = {}
    total = 0
    for member in tar:
        if len(found) >= _MAX_ENTRIES:
            raise ResourceExhausted(f"an archive of more than {_MAX_ENTRIES} entries", "disk")
        path = _clean(member.name, absolute=False)
        entry = _entry(tar, member, path, files, max_bytes - total)
        total += len(entry.data or b"")
        found.append(entry)
        files[path] = entry
    links = {e.path for e in found if e.target is not None}
    for entry in found:
        if any(parent in links for parent in _parents(entry.path)):
            raise RuntimeFault(f"archive entry {entry.path!r} lies behind a link")
    return found


def _entry(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str, files: dict[str, Entry], room: int) -> Entry:
    mode = 0o755 if member.mode & stat.S_IXUSR else 0o644
    if member.isdir():
        return Entry(path, 0o755)
    if member.issym():
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), member.linkname))
        if member.linkname.startswith("/") or target == ".." or target.startswith("../") or "\0" in member.linkname:
            raise RuntimeFault(f"archive link {path!r} leads outside: {member.linkname!r}")
        return Entry(path, mode, target=member.linkname)
    if member.islnk():
        source = files.get(_clean(member.linkname, absolute=False))
        if source is None or source.data is None:
            raise RuntimeFault(f"archive hard link {path!r} has no file in the archive: {member.linkname!r}")
        if len(source.data) > room:
            raise ResourceExhausted(_TOO_LARGE, "disk")
        return Entry(path, source.mode, data=source.data)
    if not member.isreg():
        raise RuntimeFault(f"archive entry {path!r} is a device, pipe or socket")
    if member.size > room:
        raise ResourceExhausted(_TOO_LARGE, "disk")
    stream = tar.extractfile(member)
    content = stream.read(room + 1) if stream is not None else b""
    if len(content) > room:
        raise ResourceExhausted(_TOO_LARGE, "disk")
    return Entry(path, mode, data=content)


def key(asked: str, relative: str, found: bytes) -> str:
    """The name under which a downloaded file is returned: as it was asked for, with what lies below."""
    name = os.fsdecode(found)
    below = name if relative == "." else name[len(posixpath.normpath(relative)) :].lstrip("/")
    return f"{asked.rstrip('/')}/{below}" if below else asked


def _clean(path: str, *, absolute: bool) -> str:
    parts = path.split("/")
    if "\0" in path or ".." in parts or (path.startswith("/") and not absolute):
        raise RuntimeFault(f"path leads outside: {path[:200]!r}")
    clean = "/".join(p for p in parts if p not in ("", "."))
    if path.startswith("/"):
        return "/" + clean
    return clean or "."


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:i]) for i in range(1, len(parts))]


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """A tar archive of the files; the same files give the same bytes."""
    return to_tar([Entry(_clean(path, absolute=False), data=files[path]) for path in sorted(files)])


def to_tar(found: list[Entry], *, uid: int = 0, gid: int = 0) -> bytes:
    """A tar archive of the entries, without times or names of users."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in found:
            info = tarfile.TarInfo(entry.path)
            info.mode, info.uid, info.gid = entry.mode, uid, gid
            if entry.target is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.target
            elif entry.data is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(entry.data)
            tar.addfile(info, io.BytesIO(entry.data) if entry.data is not None else None)
    return out.getvalue()
