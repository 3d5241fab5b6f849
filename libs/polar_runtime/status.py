"""bubblewrap's own account of how far it got: it tells its failure from that of the command it runs."""

from __future__ import annotations

import contextlib
import json
import os
from types import TracebackType
from typing import Self

__all__ = ["SandboxStatus"]


class SandboxStatus:
    """A pipe for `--json-status-fd`; closes both ends."""

    def __enter__(self) -> Self:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._open = True
        return self

    def close_write(self) -> None:
        """After the start: the sandbox now holds the only other end."""
        if self._open:
            os.close(self.write_fd)
            self._open = False

    def was_set_up(self) -> bool:
        """Whether the command was started. To be asked after the end."""
        with contextlib.suppress(BlockingIOError):
            for line in os.read(self._read_fd, 65536).decode(errors="replace").splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    if "child-pid" in json.loads(line):
                        return True
        return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close_write()
        os.close(self._read_fd)
