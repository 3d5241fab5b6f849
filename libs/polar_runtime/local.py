"""Attempts as processes of this host: in bubblewrap where it works, else in a process group only.

Without bubblewrap `isolation` is `none`: a command reaches whatever the gateway's user reaches, the relay adopts its
orphans so that all of them are found and ended, and model calls that bypass the proxy can be noticed but not prevented.
"""

from __future__ import annotations

import os
from pathlib import Path

from polar_common.errors import ConfigError, RuntimeUnavailable
from polar_runtime import bwrap
from polar_runtime.base import Mount, RuntimeSpec
from polar_runtime.hostdir import HOME, RELAY, HostDirRuntime
from polar_runtime.status import SandboxStatus

__all__ = ["LocalRuntime"]


class LocalRuntime(HostDirRuntime):
    """See the module. `spec.isolation` may demand bubblewrap or do without it."""

    kind = "local"

    def __init__(self, spec: RuntimeSpec) -> None:
        super().__init__(spec)
        self._etc: list[Mount] = []
        uid, _, gid = (spec.user or "1000").partition(":")
        self._uid, self._gid = _number(uid), _number(gid or uid)

    @property
    def isolation(self) -> str:
        return "bubblewrap" if self._isolated else "none"

    def _can_enclose(self) -> bool:
        if self.spec.isolation == "none":
            return False
        why = bwrap.missing()
        if why and self.spec.isolation == "bubblewrap":
            raise RuntimeUnavailable(f"no isolation: {why}")
        return not why

    def _prepare_enclosure(self) -> None:
        if self._isolated:
            self._etc = bwrap.write_etc(self._places.etc, self._uid, self._gid, HOME)

    def _relay_command(self) -> list[str]:
        return [bwrap.system_python()[0], "-I", "-S", "/polar/relay.py" if self._isolated else str(RELAY)]

    def _enclose(self, inner: list[str], status_fd: int) -> list[str]:
        network = self.spec.network
        read_only = [*self._etc, Mount(RELAY, "/polar/relay.py"), *bwrap.system_python()[1], *self._read_only()]
        if network == "host":
            read_only.append(Mount(Path(os.path.realpath("/etc/resolv.conf")), "/etc/resolv.conf"))
        return bwrap.command(
            bwrap.prefix(self._uid, self._gid, share_net=network == "host"),
            read_only=read_only,
            writable=self._writable(),
            status_fd=status_fd,
            argv=inner,
        )

    def _was_not_set_up(self, status: SandboxStatus, code: int, tail: str) -> bool:
        return not status.was_set_up()


def _number(text: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"must be uid or uid:gid in numbers: {text!r}", "runtime.user")
    return int(text)
