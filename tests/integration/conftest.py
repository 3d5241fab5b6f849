"""Fixtures of several modules: a tokenizer made on the spot, a whole proxy on a real log, and a log that is empty."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from proxy_engine import make_model_dir
from proxy_kit import Kit, kit
from tests.conftest import own_nats

from polar_common.bus import Bus, read
from polar_common.bus.read import Stored
from polar_common.nats_server import NatsServer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def proxy(model_dir: Path, nats_server: NatsServer, bus: Bus, tmp_path: Path) -> AsyncIterator[Kit]:
    """One proxy with one scripted engine."""
    async with kit(model_dir, nats_server.url, bus, tmp_path) as made:
        yield made


@pytest.fixture
async def empty() -> AsyncIterator[Bus]:
    """A bus on another server that has never seen a stream."""
    with own_nats() as server:
        bus = await Bus.connect(server.url, "test/other")
        yield bus
        await bus.close()


@pytest.fixture
def lagging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas a tenth of a second behind their leader; on loopback they rarely are."""
    whole = read._collect

    async def behind(nc: Client, stream: str, request: dict[str, Any]) -> tuple[list[Stored], str]:
        found, status = await whole(nc, stream, request)
        known = datetime.now(UTC) - timedelta(seconds=0.1)
        return [s for s in found if s.time < known], status

    monkeypatch.setattr(read, "_collect", behind)
