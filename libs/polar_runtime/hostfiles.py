"""Uploads, downloads and patches where the runtime's writable directories are directories of this host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from polar_common.errors import ResourceExhausted, RuntimeFault
from polar_runtime import archive
from polar_runtime.beneath import Beneath, Found, Outside, TooMuch
from polar_runtime.gitstore import Change, Node

__all__ = ["HostFiles"]


class HostFiles:
    """`places`: inside path → host directory, the working directory first. Blocking."""

    def __init__(self, places: Mapping[str, Path], max_bytes: int) -> None:
        self._places = places
        self._work = Beneath(next(iter(places.values())))
        self._max_bytes = max_bytes

    def upload(self, data: bytes | Mapping[str, bytes], dest: str) -> None:
        """As `Runtime.upload`."""
        for entry in archive.entries(data, max_bytes=self._max_bytes):
            path = entry.path if entry.path.startswith("/") else f"{dest.rstrip('/')}/{entry.path}"
            root, relative = self._find(path)
            with _translated():
                entry.write(root, relative)

    def download(self, paths: Sequence[str], max_bytes: int) -> dict[str, bytes]:
        """As `Runtime.download`."""
        found: dict[str, bytes] = {}
        left = max_bytes
        for path in paths:
            root, relative = self._find(path)
            with _translated():
                for node in root.nodes(relative):
                    if node.mode != "120000":
                        with contextlib.suppress(OSError):
                            data = found[archive.key(path, relative, node.path)] = root.read(node.path, max(0, left))
                            left -= len(data)
        return found

    def nodes(self) -> list[Node]:
        """The working directory's files and links."""
        root = self._work
        with _translated():
            return [Node(f.path, f.mode, f.size, partial(_content, root, f), f.stamp) for f in root.nodes()]

    def apply(self, changes: Sequence[Change]) -> None:
        """Make a patch's changes in the working directory."""
        with _translated():
            for change in changes:
                if change.read is None:
                    self._work.remove(change.path)
                elif change.mode == "120000":
                    self._work.link(change.path, change.read())
                else:
                    self._work.write(change.path, change.read(), 0o755 if change.mode == "100755" else 0o644)

    def _find(self, path: str) -> tuple[Beneath, str]:
        """The host directory and relative path of an inside path."""
        if not path.startswith("/"):
            return self._work, path
        for inside, host in self._places.items():
            if path == inside or path.startswith(inside.rstrip("/") + "/"):
                return Beneath(host), path[len(inside) :].strip("/") or "."
        raise RuntimeFault(f"{path} is in neither the working directory nor HOME nor /tmp")


def _content(root: Beneath, found: Found) -> bytes:
    try:
        return root.content(found)
    except TooMuch as error:
        raise ResourceExhausted(str(error), "disk") from error


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except Outside as error:
        raise RuntimeFault(str(error)) from error
    except TooMuch as error:
        raise ResourceExhausted(str(error), "disk") from error
    except OSError as error:
        raise RuntimeFault(f"{error.strerror}: {error.filename!r}") from error
