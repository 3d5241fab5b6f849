"""Where models are, so that a harness connected to one past the proxy is told from one that fetches a package."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Sequence

__all__ = ["ModelHosts"]

_FRESH_S = 300.0
_LOOKUP_S = 5.0


class ModelHosts:
    """`host` or `host:port`; IPv6 addresses in brackets.

    Names are looked up when they are first needed and every five minutes, for five seconds at most. A name that can't
    be found matches nothing.
    Providers share addresses with others behind large networks, so a match is a hint, not a proof.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(hosts)
        self._found: dict[str, frozenset[str]] = {}
        """host → its addresses."""
        self._until = 0.0

    async def among(self, peers: Sequence[str]) -> tuple[str, ...]:
        """Those of the `host:port` peers that are models."""
        if not peers or not self._hosts:
            return ()
        if time.monotonic() > self._until:
            await self._look_up()
        return tuple(peer for peer in peers if any(self._is(peer, host) for host in self._hosts))

    def _is(self, peer: str, model: str) -> bool:
        address, _, port = peer.rpartition(":")
        host, wanted = split(model)
        return address in self._found.get(host, ()) and wanted in ("", port)

    async def _look_up(self) -> None:
        """In a thread of its own: where there is no name server, each name takes long, and nobody else may wait."""
        self._until = time.monotonic() + _FRESH_S
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def work() -> None:
            for host in {split(model)[0]: None for model in self._hosts}:
                self._found[host] = _addresses(host)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=work, name="model hosts", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), _LOOKUP_S)


def split(model: str) -> tuple[str, str]:
    """Host and port; the port is empty where none is given."""
    host, colon, port = model.rpartition(":")
    return (host, port) if colon and port.isdigit() else (model, "")


def _addresses(host: str) -> frozenset[str]:
    """As they appear in peers. Blocking."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset(f"[{where[0]}]" if family == socket.AF_INET6 else str(where[0]) for family, *_, where in found)
