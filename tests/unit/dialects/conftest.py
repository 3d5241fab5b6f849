"""The loopback server that the SDK tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dialect_server import DialectServer, Script


@pytest.fixture(scope="module")
def running_server() -> Iterator[DialectServer]:
    with DialectServer() as server:
        yield server


@pytest.fixture
def server(running_server: DialectServer) -> DialectServer:
    running_server.script = Script()
    return running_server
