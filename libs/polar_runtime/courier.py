"""Carries files into and out of a container, as a process inside it. The other half is `couriered.py`.

    python3 courier.py put ROOT            a tar archive on standard input → files and links below ROOT
    python3 courier.py remove ROOT         NUL-separated paths on standard input
    python3 courier.py list ROOT           NUL-separated paths → records `mode size stamp path`, NUL-separated
    python3 courier.py read ROOT           NUL-separated paths → a tar archive of these files and links
    python3 courier.py whoami              `uid gid`
    python3 courier.py door SOCKET HOME WORKDIR -- COMMAND [ARG]...

`door` is a container's first process: it makes HOME, `/tmp` and the working directory, does what it is asked through
the socket (the other half is `door.py`) until that is closed, and becomes COMMAND.

Never follows a link below ROOT (`beneath.py`, which must lie beside it). Standard library only.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import tarfile
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from beneath import Beneath, Outside, TooMuch  # type: ignore[import-not-found,unused-ignore]

__all__ = ["main"]


def put(root: Beneath, given: IO[bytes], out: IO[bytes]) -> None:
    """Unpack what is given. The sender has checked the archive as a whole."""
    with tarfile.open(fileobj=given, mode="r|") as tar:
        for member in tar:
            if member.issym():
                root.link(member.name, os.fsencode(member.linkname))
            elif member.isdir():
                if member.name != ".":
                    root.make_dir(member.name)
            else:
                root.write(member.name, tar.extractfile(member) or b"", member.mode)
            _forget(tar)


def remove(root: Beneath, given: IO[bytes], out: IO[bytes]) -> None:
    """Remove files and links."""
    for path in _paths(given):
        root.remove(path)


def listing(root: Beneath, given: IO[bytes], out: IO[bytes]) -> None:
    """Records of all that is at or below the paths."""
    for path in _paths(given):
        for found in root.nodes(path):
            stamp = ",".join(map(str, found.stamp)) if found.stamp else "-"
            out.write(f"{found.mode} {found.size} {stamp} ".encode() + found.path + b"\0")


def read(root: Beneath, given: IO[bytes], out: IO[bytes]) -> None:
    """A tar archive of the paths; what vanished meanwhile or isn't a file or link is left out."""
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path in _paths(given):
            info = tarfile.TarInfo(os.fsdecode(path))
            try:
                info.linkname = os.fsdecode(root.target(path))
                info.type = tarfile.SYMTYPE
                tar.addfile(info)
            except OSError:
                _read_file(root, path, info, tar)
            _forget(tar)


def _read_file(root: Beneath, path: bytes, info: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(root.opened(path))
        except OSError:
            return
        info.size = os.fstat(file.fileno()).st_size
        tar.addfile(info, _Whole(file))  # type: ignore[arg-type]


def _forget(tar: tarfile.TarFile) -> None:
    """What it keeps of each member is a kilobyte, for which nobody asks."""
    tar.members = []  # type: ignore[attr-defined]


class _Whole:
    """A file's bytes, and zeros where it was cut meanwhile: how many come was said before."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        return self._file.read(size).ljust(size, b"\0")


def _paths(given: IO[bytes]) -> list[bytes]:
    return [p for p in given.read().split(b"\0") if p]


_ACTIONS = {"put": put, "remove": remove, "list": listing, "read": read}


def perform(action: str, root: str, given: IO[bytes], out: IO[bytes]) -> tuple[int, str]:
    """Exit code 3 for a path outside, 4 for too much, 5 for an error of the file system; and what is said about it."""
    try:
        _ACTIONS[action](Beneath(Path(root)), given, out)
        out.flush()
    except Outside as error:
        return 3, str(error)
    except TooMuch as error:
        return 4, str(error)
    except OSError as error:
        return 5, str(error)
    return 0, ""


class _Given(io.RawIOBase):
    """The next `size` bytes of a stream."""

    def __init__(self, stream: IO[bytes], size: int) -> None:
        self._stream = stream
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(min(len(buffer), self._left))
        self._left -= len(data)
        buffer[: len(data)] = data
        return len(data)


class _Frames(io.RawIOBase):
    """What is written goes out as a frame of output."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._stream.write(b"o" + len(data).to_bytes(4, "big") + data)
        return len(data)


def _make_places(home: str, workdir: str) -> None:
    """OSError where that takes capabilities."""
    if not os.path.isdir(workdir):
        os.makedirs(workdir, 0o755)
    for place, mode in ((home, 0o700), ("/tmp", 0o1777)):
        os.makedirs(place, exist_ok=True)
        os.chmod(place, mode)


def _serve(address: str, home: str, workdir: str) -> None:
    """Until the other side closes. OSError where there is none."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        asked, answers = client.makefile("rb"), client.makefile("wb")
        for place in (workdir, home, "/tmp"):
            if os.path.lexists(place) and (os.path.islink(place) or not os.path.isdir(place)):
                answers.write(f"no {place} isn't a directory in the image\n".encode())
                return
        if os.path.isdir(workdir) and os.stat(workdir).st_uid != os.getuid():
            answers.write(b"another's\n")
            return
        _make_places(home, workdir)
        answers.write(b"ready\n")
        answers.flush()
        while line := asked.readline():
            action, size, root = line[:-1].split(b" ", 2)
            given = io.BufferedReader(_Given(asked, int(size)), 65536)
            out = io.BufferedWriter(_Frames(answers), 65536)
            code, text = perform(action.decode(), os.fsdecode(root), given, out)
            out.flush()
            while given.read(65536):
                pass
            end = bytes([code]) + text.encode(errors="replace")[:8000]
            answers.write(b"e" + len(end).to_bytes(4, "big") + end)
            answers.flush()


def door(args: list[str]) -> None:
    """See the module. Never returns."""
    command = args[args.index("--") + 1 :]
    os.umask(0o022)
    try:
        _serve(*args[: args.index("--")])
    except OSError:
        pass
    finally:
        os.execv(command[0], command)


def main(args: list[str]) -> int:
    """Exit codes are those of `perform`."""
    if args == ["whoami"]:
        sys.stdout.write(f"{os.getuid()} {os.getgid()}")
        return 0
    if args[0] == "door":
        door(args[1:])
    code, text = perform(args[0], args[1], sys.stdin.buffer, sys.stdout.buffer)
    sys.stderr.write(text)
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
