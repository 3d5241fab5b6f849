"""Fixtures that every level uses: a real NATS server of our own, and a bus on a fresh topology."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from polar_common.bus import Bus
from polar_common.ids import new_id
from polar_common.nats_server import NatsConfig, NatsServer, free_port
from polar_common.topology import Topology, apply


def start_nats(directory: Path, **options: object) -> NatsServer:
    """A server on a free port; its name is checked, so that nobody else's server is taken for it."""
    name = f"test-{new_id()[:12]}"
    server = NatsServer(NatsConfig(data=directory / "js", port=free_port(), name=name, **options))  # type: ignore[arg-type]
    server.start()
    return server


@pytest.fixture
def nats_server() -> Iterator[NatsServer]:
    with tempfile.TemporaryDirectory(prefix="polar-nats-") as directory:
        server = start_nats(Path(directory), sync="2m")
        yield server
        server.stop("kill")


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    """A bus on a server with the default topology."""
    connected = await Bus.connect(nats_server.url, "test/bus")
    await apply(connected.js, Topology())
    yield connected
    await connected.close()
