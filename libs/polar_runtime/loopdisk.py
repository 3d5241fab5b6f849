"""A disk of a fixed size for one attempt: a sparse file with ext4 in it, mounted beside the attempt's directory.

What is in it can't outgrow it, however fast it is written, and one look tells how full it is. Needs root, loop devices
and e2fsprogs; the host's daemon must see the gateway's mounts. The kernel gives the loop device back at the unmount.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

from polar_common.errors import RuntimeFault, RuntimeUnavailable

__all__ = ["LoopDisk"]

_SLACK = 1 << 20
_BUSY_S = 5.0
# No journal and no reserved blocks: nobody reads it after a crash.
_FEATURES = ("-m", "0", "-O", "^has_journal,^resize_inode", "-E", "lazy_itable_init=1,nodiscard")


class LoopDisk:
    """`base` is the attempt's directory. All calls block, for tens of milliseconds."""

    def __init__(self, base: Path, mb: int) -> None:
        self._file = base / "disk.img"
        self._place = base / "disk"
        self._bytes = mb << 20

    def make(self) -> None:
        """Create and mount it. RuntimeUnavailable where this host can't."""
        with self._file.open("xb") as file:
            file.truncate(self._bytes)
        self._place.mkdir()
        _run(["mkfs.ext4", "-q", "-F", *_FEATURES, str(self._file)])
        _run(["mount", "-t", "ext4", "-o", "loop,nodev,nosuid", str(self._file), str(self._place)])
        (self._place / "lost+found").rmdir()

    def directory(self, name: str) -> Path:
        """A directory in it, made if need be."""
        path = self._place / name
        path.mkdir(exist_ok=True)
        return path

    def used(self) -> int:
        """Bytes, those of the file system's own tables left out."""
        with contextlib.suppress(OSError):
            told = os.statvfs(self._place)
            return (told.f_blocks - told.f_bfree) * told.f_frsize
        return 0

    def full(self) -> bool:
        """Whether next to nothing, or no further file, fits in."""
        with contextlib.suppress(OSError):
            told = os.statvfs(self._place)
            return told.f_bavail * told.f_frsize < _SLACK or told.f_favail == 0
        return False

    def remove(self) -> None:
        """Unmount it, if it is mounted, and delete it. RuntimeFault where the kernel won't."""
        until = time.monotonic() + _BUSY_S
        while self._place.is_mount():
            done = subprocess.run(["umount", str(self._place)], capture_output=True, text=True, check=False)
            if done.returncode and time.monotonic() > until:
                raise RuntimeFault(f"umount: {done.stderr.strip()[:300]}")
            if done.returncode:
                # Whoever looked into it a moment ago (the daemon, making a container of it) is about to leave.
                time.sleep(0.05)
        self._file.unlink(missing_ok=True)


def _run(argv: list[str]) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeUnavailable(f"no disk of its own: {error}") from error
    if done.returncode:
        raise RuntimeUnavailable(f"no disk of its own: {argv[0]}: {done.stderr.strip()[-300:]}")
