"""Files below a directory that an agent can write: every path is walked by file descriptor, and no link is followed.

A check by name would leave a moment in which the agent swaps a directory for a link to somewhere else on the host.
Standard library only: `courier.py` uses this file inside containers.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

__all__ = ["Beneath", "Found", "Outside", "TooMuch", "remove_tree"]

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 200
_MAX_NODES = 1_000_000
_MAX_FILE = 1 << 30
# A file changed this recently may change again without a change of its stamp: kernel clocks tick every 4 ms or so.
_RACY_NS = 50_000_000


class Outside(Exception):
    """A path that isn't below the directory."""


class TooMuch(Exception):
    """More files, levels or bytes than anybody needs."""


class Found(NamedTuple):
    """A file or link: git's mode, size in bytes, and a stamp that changes with the content; None where it may not."""

    path: bytes
    mode: str
    size: int
    stamp: tuple[int, ...] | None


class Beneath:
    """Blocking. Paths are relative, as bytes or text, without `..`; anything else raises `Outside`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, path: str | bytes, max_bytes: int = _MAX_FILE) -> bytes:
        """A regular file's content. OSError where there is none, or a link is in the way."""
        with self.opened(path, max_bytes) as stream:
            data = stream.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise TooMuch(f"{path!r} is larger than {max_bytes} bytes")
        return data

    @contextlib.contextmanager
    def opened(self, path: str | bytes, max_bytes: int = _MAX_FILE) -> Iterator[IO[bytes]]:
        """A regular file to be read in pieces."""
        *parents, name = _parts(path)
        with self._directory(parents) as fd:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            try:
                file = os.open(name, flags, dir_fd=fd)
            except PermissionError:
                _allow(name, fd, stat.S_ISREG, 0o600)
                file = os.open(name, flags, dir_fd=fd)
            with open(file, "rb") as stream:
                info = os.fstat(file)
                if not stat.S_ISREG(info.st_mode):
                    raise OSError(f"not a regular file: {path!r}")
                if info.st_size > max_bytes:
                    raise TooMuch(f"{path!r} is larger than {max_bytes} bytes")
                yield stream

    def write(self, path: str | bytes, data: bytes | IO[bytes], mode: int = 0o644) -> None:
        """Write a file, making directories; what lies in the way and isn't a directory is replaced."""
        *parents, name = _parts(path)
        with self._directory(parents, make=True) as fd:
            _clear(name, fd)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(name, flags, 0o600, dir_fd=fd), "wb") as stream:
                shutil.copyfileobj(io.BytesIO(data) if isinstance(data, bytes) else data, stream)
                os.fchmod(stream.fileno(), mode & 0o777)

    def link(self, path: str | bytes, target: bytes) -> None:
        """Make a symbolic link, as `write` makes a file."""
        *parents, name = _parts(path)
        with self._directory(parents, make=True) as fd:
            _clear(name, fd)
            os.symlink(target, name, dir_fd=fd)

    def make_dir(self, path: str | bytes) -> None:
        """Make a directory and those above it."""
        with self._directory(_parts(path), make=True):
            pass

    def remove(self, path: str | bytes) -> None:
        """Remove a file or link, and the directories that become empty by it."""
        parts = _parts(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._directory(parts[:-1]) as fd:
            _clear(parts[-1], fd)
        for depth in range(len(parts) - 1, 0, -1):
            try:
                with self._directory(parts[: depth - 1]) as fd:
                    os.rmdir(parts[depth - 1], dir_fd=fd)
            except OSError:
                return

    def target(self, path: str | bytes) -> bytes:
        """Where a symbolic link points to."""
        *parents, name = _parts(path)
        with self._directory(parents) as fd:
            return os.readlink(name, dir_fd=fd)

    def content(self, found: Found) -> bytes:
        """A file's content or a link's target."""
        return self.target(found.path) if found.mode == "120000" else self.read(found.path)

    def nodes(self, below: str | bytes = b".") -> list[Found]:
        """All files and links at or below a path, sorted; empty directories, special files and what no patch may name
        are left out: `.git` in whatever letters, and links at or below `.gitmodules`.

        `TooMuch` above a million entries or 200 levels.
        """
        found: list[Found] = []
        fresh = time.time_ns() - _RACY_NS
        stack = [b"" if below in ("", b"", ".", b".") else b"/".join(_parts(below))]
        while stack:
            directory = stack.pop()
            if directory.count(b"/") > _MAX_DEPTH or len(found) > _MAX_NODES:
                raise TooMuch("a directory is nested too deep or holds too many files")
            try:
                entries = self._entries(directory)
            except NotADirectoryError:
                entries = [directory] if directory else []
            except FileNotFoundError:
                continue
            for path, info in self._stats(entries):
                if stat.S_ISDIR(info.st_mode):
                    stack.append(path)
                elif (one := _found(path, info, fresh)) is not None:
                    found.append(one)
        return sorted(found, key=lambda f: f.path)

    def _entries(self, directory: bytes) -> list[bytes]:
        with self._directory(_parts(directory) if directory else []) as fd:
            names = [os.fsencode(n) for n in os.listdir(fd)]
        return [directory + b"/" + n if directory else n for n in names if n.lower() != b".git"]

    def _stats(self, paths: list[bytes]) -> Iterator[tuple[bytes, os.stat_result]]:
        if not paths:
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._directory(_parts(paths[0])[:-1]) as fd:
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    yield path, os.stat(path.rpartition(b"/")[2], dir_fd=fd, follow_symlinks=False)

    @contextlib.contextmanager
    def _directory(self, parts: list[bytes], make: bool = False) -> Iterator[int]:
        fd = os.open(self.root, _DIR)
        try:
            for part in parts:
                if make:
                    _ensure_dir(part, fd)
                try:
                    inner = os.open(part, _DIR, dir_fd=fd)
                except PermissionError:
                    _allow(part, fd, stat.S_ISDIR, 0o700)
                    inner = os.open(part, _DIR, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)


def _found(path: bytes, info: os.stat_result, fresh: int) -> Found | None:
    stamp = (info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns) if info.st_ctime_ns < fresh else None
    if stat.S_ISREG(info.st_mode):
        return Found(path, "100755" if info.st_mode & 0o100 else "100644", info.st_size, stamp)
    if not stat.S_ISLNK(info.st_mode) or b".gitmodules" in path.lower().split(b"/"):
        return None
    return Found(path, "120000", info.st_size, stamp)


def _parts(path: str | bytes) -> list[bytes]:
    raw = os.fsencode(path)
    parts = [p for p in raw.split(b"/") if p not in (b"", b".")]
    if raw.startswith(b"/") or b".." in parts or b"\0" in raw or not parts:
        raise Outside(f"not a path below the directory: {raw[:200]!r}")
    return parts


def _ensure_dir(name: bytes, fd: int) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=fd)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=fd)
            os.mkdir(name, 0o755, dir_fd=fd)


def _allow(name: bytes, fd: int, kind: Callable[[int], bool], mode: int) -> None:
    """Give back the permissions that the agent took from its own file. By descriptor: a name could be swapped."""
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        if kind(os.fstat(handle).st_mode):
            os.chmod(f"/proc/self/fd/{handle}", mode)
    finally:
        os.close(handle)


def _clear(name: bytes, fd: int) -> None:
    try:
        os.unlink(name, dir_fd=fd)
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):
        _remove_dir(name, fd)


def _remove_dir(name: bytes, fd: int) -> None:
    _allow(name, fd, stat.S_ISDIR, 0o700)
    inner = os.open(name, _DIR, dir_fd=fd)
    try:
        for entry in os.listdir(inner):
            _clear(os.fsencode(entry), inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=fd)


def remove_tree(path: Path) -> None:
    """Remove a directory whatever the agent did to it: modes, depth, odd names. OSError where something remains."""
    if not os.path.lexists(path):
        return
    # `rm` walks by descriptor without recursion limits and doesn't cross into a mount that was left behind.
    command = ["rm", "-rf", "--one-file-system", "--", os.fspath(path)]
    subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    if os.path.lexists(path):
        subprocess.run(
            ["find", os.fspath(path), "-xdev", "-type", "d", "-exec", "chmod", "u+rwx", "{}", ";"],
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
        if os.path.lexists(path):
            raise OSError(f"cannot remove {path}: {done.stderr.decode(errors='replace')[-300:]}")
