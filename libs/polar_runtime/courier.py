"""Carries files into and out of a container, as a process inside it. The other half is `couriered.py`.

    python3 courier.py put ROOT            a tar archive on standard input → files and links below ROOT
    python3 courier.py remove ROOT         NUL-separated paths on standard input
    python3 courier.py list ROOT           NUL-separated paths → records `mode size stamp path`, NUL-separated
    python3 courier.py read ROOT           NUL-separated paths → a tar archive of these files and links
    python3 courier.py whoami              `uid gid`

Never follows a link below ROOT (`beneath.py`, which must lie beside it). Standard library only.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from beneath import Beneath, Found, Outside, TooMuch  # type: ignore[import-not-found,unused-ignore]

__all__ = ["main"]


def put(root: Beneath) -> None:
    """Unpack standard input. The sender has checked the archive as a whole."""
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as tar:
        for member in tar:
            if member.issym():
                root.link(member.name, os.fsencode(member.linkname))
            elif member.isdir():
                if member.name != ".":
                    root.make_dir(member.name)
            else:
                stream = tar.extractfile(member)
                root.write(member.name, stream.read() if stream else b"", member.mode)


def remove(root: Beneath) -> None:
    """Remove files and links."""
    for path in _paths():
        root.remove(path)


def listing(root: Beneath) -> None:
    """Records of all that is at or below the paths."""
    out = sys.stdout.buffer
    for path in _paths():
        for found in root.nodes(path):
            stamp = ",".join(map(str, found.stamp)) if found.stamp else "-"
            out.write(f"{found.mode} {found.size} {stamp} ".encode() + found.path + b"\0")


def read(root: Beneath) -> None:
    """A tar archive of the paths; what vanished meanwhile or isn't a file or link is left out."""
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path in _paths():
            info = tarfile.TarInfo(os.fsdecode(path))
            try:
                try:
                    info.linkname = os.fsdecode(root.target(path))
                    info.type = tarfile.SYMTYPE
                    tar.addfile(info)
                except OSError:
                    data = root.content(Found(path, "100644", 0, None))
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
            except OSError:
                continue


def _paths() -> list[bytes]:
    return [p for p in sys.stdin.buffer.read().split(b"\0") if p]


def main(args: list[str]) -> int:
    """Exit code 3 for a path outside, 4 for too much, 5 for an error of the file system."""
    if args == ["whoami"]:
        sys.stdout.write(f"{os.getuid()} {os.getgid()}")
        return 0
    actions = {"put": put, "remove": remove, "list": listing, "read": read}
    try:
        actions[args[0]](Beneath(Path(args[1])))
        sys.stdout.flush()
    except Outside as error:
        sys.stderr.write(str(error))
        return 3
    except TooMuch as error:
        sys.stderr.write(str(error))
        return 4
    except OSError as error:
        sys.stderr.write(str(error))
        return 5
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
