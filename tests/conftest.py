"""Fixtures that every level uses: a real NATS server of our own, and a bus on a fresh topology."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import nats.errors
import pytest
from nats.js.errors import APIError, NotFoundError

from polar_common.bus import Bus
from polar_common.ids import new_id
from polar_common.nats_server import NatsCluster, NatsConfig, NatsServer, free_port
from polar_common.topology import Topology, apply, streams


def start_nats(directory: Path, **options: object) -> NatsServer:
    """A server on a free port; its name is checked, so that nobody else's server is taken for it."""
    name = f"test-{new_id()[:12]}"
    server = NatsServer(NatsConfig(data=directory / "js", port=free_port(), name=name, **options))  # type: ignore[arg-type]
    server.start()
    return server


@contextmanager
def own_nats(**options: object) -> Iterator[NatsServer]:
    """A server that has never seen a stream, for the block."""
    with tempfile.TemporaryDirectory(prefix="polar-nats-") as directory:
        server = start_nats(Path(directory), sync="2m", **options)
        try:
            yield server
        finally:
            server.stop("kill")


@pytest.fixture
def nats_server() -> Iterator[NatsServer]:
    with own_nats() as server:
        yield server


@pytest.fixture(scope="session")
def nats_cluster() -> Iterator[NatsCluster]:
    """Three servers on loopback that replicate between them, shared by the tests of a session."""
    with tempfile.TemporaryDirectory(prefix="polar-cluster-") as directory:
        cluster = NatsCluster(Path(directory), sync="2m")
        cluster.start()
        yield cluster
        cluster.stop("kill")


async def replicated(cluster: NatsCluster, topology: Topology = Topology(replicas=3)) -> Bus:
    """A bus on the cluster, with fresh streams of three replicas."""
    connected = await Bus.connect(cluster.url, "test/bus")
    for _ in range(100):
        try:
            for stream in streams(topology):
                with suppress(NotFoundError):
                    await connected.js.delete_stream(str(stream.name))
            await apply(connected.js, topology)
            return connected
        except (APIError, TimeoutError, nats.errors.Error):
            # No meta leader yet: the cluster is just coming up.
            await asyncio.sleep(0.2)
    await connected.close()
    raise RuntimeError("the cluster has no leader")


async def either(request: pytest.FixtureRequest, topology: Topology) -> Bus:
    """A bus on one server, or on the cluster with fresh streams, as the topology says."""
    if topology.replicas > 1:
        return await replicated(request.getfixturevalue("nats_cluster"))
    connected = await Bus.connect(request.getfixturevalue("nats_server").url, "test/bus")
    await apply(connected.js, topology)
    return connected


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    """A bus on a server with the default topology."""
    connected = await Bus.connect(nats_server.url, "test/bus")
    await apply(connected.js, Topology())
    yield connected
    await connected.close()
