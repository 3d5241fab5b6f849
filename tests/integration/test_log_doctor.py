"""`polar doctor` on logs that are as they should be, of one server and of three, and on logs that aren't."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import orjson
import pytest
from tests.conftest import replicated

from polar_common.bus import Bus
from polar_common.nats_server import NatsCluster, NatsServer
from polar_common.topology import Topology, apply, consumers, differences, events_stream

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]
STREAM = events_stream("s1")


def _doctor(url: str, env: dict[str, str]) -> list[dict[str, Any]]:
    argv = [sys.executable, "-m", "polar_common.cli", "doctor", "--json"]
    done = subprocess.run(
        argv, capture_output=True, env=os.environ | {"POLAR_NATS": url} | env, timeout=60, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    lines = [orjson.loads(line) for line in done.stdout.splitlines()]
    return [line for line in lines if line["check"] == "log"]


async def said(url: str, **env: str) -> list[tuple[str, str]]:
    """What doctor says about the log."""
    return [(line["verdict"], line["text"]) for line in await asyncio.to_thread(_doctor, url, env)]


@pytest.fixture
async def three(nats_cluster: NatsCluster) -> AsyncIterator[Bus]:
    connected = await replicated(nats_cluster)
    yield connected
    for stream in await connected.js.streams_info():
        await connected.js.delete_stream(str(stream.config.name))
    await connected.close()


async def test_r3_a_sound_cluster_is_called_sound(three: Bus, nats_cluster: NatsCluster) -> None:
    for env in ({}, {"POLAR_REPLICAS": "3"}):
        assert [verdict for verdict, _ in await said(nats_cluster.url, **env)] == ["ok"]
    # Whoever says how many replicas there should be is told of what isn't so.
    found = await said(nats_cluster.url, POLAR_REPLICAS="1")
    assert any("num_replicas is 3, should be 1" in text for _, text in found)


async def test_a_house_with_classes_a_lease_and_a_build_of_its_own_is_sound(bus: Bus, nats_server: NatsServer) -> None:
    for stream in await bus.js.streams_info():
        await bus.js.delete_stream(str(stream.config.name))
    await apply(bus.js, Topology(work_classes=("gpu",), lease_s=4.0, build="b2", events_bytes=1 << 30))
    assert [verdict for verdict, _ in await said(nats_server.url)] == ["ok"]


async def changed(bus: Bus, durable: str, **changes: Any) -> list[str]:
    """The differences after a consumer was made anew with something changed."""
    spec = next(c for c in consumers(Topology()) if c.durable == durable)
    await bus.js.delete_consumer(spec.stream, durable)
    config = spec.config()
    for key, value in changes.items():
        setattr(config, key, value)
    await bus.js.add_consumer(spec.stream, config)
    return await differences(bus.js, Topology())


async def test_a_consumer_that_hears_something_else_is_named(bus: Bus) -> None:
    other = {"filter_subject": "polar.events.*.session.*.*.running"}
    assert [f for f in await changed(bus, "gateway-local", **other) if "gateway-local" in f and "running" in f]
    await changed(bus, "gateway-local")
    fewer = await changed(bus, "reconstructor-live", filter_subjects=["polar.events.*.session.*.*.artifacts"])
    assert len(fewer) == 1 and "reconstructor-live" in fewer[0]
    await changed(bus, "reconstructor-live")
    assert [f for f in await changed(bus, "evaluator", ack_wait=1.0) if "evaluator" in f and "ack_wait" in f]
    await changed(bus, "evaluator")
    assert [f for f in await changed(bus, "callbacks", max_ack_pending=10) if "callbacks" in f]
    assert await changed(bus, "callbacks") == []


async def test_a_consumer_that_is_missing_is_named_by_doctor(bus: Bus, nats_server: NatsServer) -> None:
    await bus.js.delete_consumer(STREAM, "evaluator")
    found = await said(nats_server.url)
    assert found == [("fail", f"consumer evaluator on {STREAM} is missing")]
    for durable in ("gateway-local", "gateway-docker"):
        await bus.js.delete_consumer(STREAM, durable)
    assert len(await said(nats_server.url)) == 3
    assert len(await differences(bus.js, replace(Topology(), work_classes=("local",)))) == 2
