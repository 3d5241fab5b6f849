"""Whom an attempt's processes are connected to, where nothing keeps them from the network.

Read from /proc at intervals, so that a connection shorter than one may go unseen; only TCP is looked at. What the
attempt's processes serve to each other, the relay's port among it, isn't counted.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Peers"]

_LISTEN, _SYN_RECV = "0A", "03"
_MOST = 64


@dataclass(slots=True)
class Peers:
    """Remote ends as `host:port`, IPv6 in brackets. `ignored` are those that aren't worth a word: the proxy's own."""

    ignored: frozenset[str] = frozenset()
    seen: set[str] = field(default_factory=set)
    """At most 64."""

    def look(self, pids: Sequence[int]) -> None:
        """Add what the processes are connected to now. Blocking, for milliseconds."""
        inodes = {inode for pid in pids for inode in _sockets(pid)}
        if not inodes or len(self.seen) >= _MOST:
            return
        rows = [row for row in _tables(pids) if row[3] in inodes]
        served = {local.rpartition(":")[2] for local, _, state, _ in rows if state == _LISTEN}
        for local, remote, state, _ in rows:
            coming_in = local.rpartition(":")[2] in served
            host, _, port = remote.rpartition(":")
            inside = port in served and _is_loopback(host)
            if state not in (_LISTEN, _SYN_RECV) and not coming_in and not inside and remote not in self.ignored:
                self.seen.add(remote)


def _sockets(pid: int) -> list[str]:
    """Inodes of a process's sockets."""
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/{pid}/fd/{fd}")
                if link.startswith("socket:["):
                    found.append(link[8:-1])
    return found


def _tables(pids: Iterable[int]) -> list[tuple[str, str, str, str]]:
    """Local end, remote end, state and inode of every TCP socket in the network namespace of the first that lives."""
    for pid in pids:
        try:
            return [row for name in ("tcp", "tcp6") for row in _table(f"/proc/{pid}/net/{name}")]
        except OSError:
            continue
    return []


def _table(path: str) -> list[tuple[str, str, str, str]]:
    with open(path) as file:
        lines = file.read().splitlines()[1:]
    fields = [line.split() for line in lines]
    return [(_address(f[1]), _address(f[2]), f[3], f[9]) for f in fields if len(f) > 9]


def _address(text: str) -> str:
    """The kernel's form: the address as words of 32 bits in the machine's own order, then the port, all in hex."""
    digits, _, port = text.partition(":")
    words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return f"{mapped}:{int(port, 16)}" if mapped else f"[{address}]:{int(port, 16)}"
    return f"{address}:{int(port, 16)}"


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.strip("[]")).is_loopback
