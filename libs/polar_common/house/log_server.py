"""The log of a house that `polar up` runs: its server with users, its streams, and which segment is served."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from polar_common.archive.segments import active
from polar_common.bus import Bus
from polar_common.connection import with_user
from polar_common.nats_server import NatsConfig, find_binary, server_config
from polar_common.permissions import ADMIN, authorization, users
from polar_common.topology import CATALOGUE, Topology, apply, apply_streams

from .layout import House, nats_secret
from .supervisor import Child, Supervisor

__all__ = ["start_log"]

_NAME = "polar"


def start_log(
    house: House, supervisor: Supervisor, port: int, sync: str, topology: Topology
) -> tuple[Topology, list[str]]:
    """Start the server and make what is missing. The topology with the segment to be served, and all there are.

    Raises ConfigError if it doesn't start.
    """
    file = _write_config(house, port, sync, topology, (topology.segment,))

    def greets() -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), 1) as sock:
                return f'"server_name":"{_NAME}"'.encode() in sock.recv(4096)
        except OSError:
            return False

    argv = [str(find_binary()), "-c", str(file)]
    server = supervisor.start(Child("nats", argv, house.logs / "nats.log", ready=greets))
    url = with_user(f"nats://127.0.0.1:{port}", ADMIN, house.secret(nats_secret(ADMIN)))
    chosen, segments = asyncio.run(_make(url, topology))
    if segments != [topology.segment] and server.process is not None:
        # Which segments there are is known only now; the server reads its users again.
        _write_config(house, port, sync, chosen, segments)
        server.process.send_signal(signal.SIGHUP)
    return chosen, segments


def _write_config(house: House, port: int, sync: str, topology: Topology, segments: Sequence[str]) -> Path:
    who = authorization(users(topology, tuple(segments)), lambda user: house.secret(nats_secret(user)))
    file = house.run / "nats.conf"
    # It holds passwords.
    file.touch(0o600)
    file.chmod(0o600)
    file.write_text(server_config(NatsConfig(data=house.nats, port=port, name=_NAME, sync=sync, authorization=who)))
    return file


async def _make(url: str, topology: Topology) -> tuple[Topology, list[str]]:
    bus = await Bus.connect(url, "up")
    try:
        await apply_streams(bus.js, topology, (CATALOGUE,))
        segment, there = await active(bus)
        chosen = topology.for_segment(segment)
        await apply(bus.js, chosen)
        return chosen, there
    finally:
        await bus.close()
