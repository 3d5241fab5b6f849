"""Ports of houses that start at the same time on one machine."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from polar_common.errors import ConfigError
from polar_common.house import up
from polar_common.nats_server import free_port

_OTHER = """
import sys
from polar_common.house import up
up.PREFERRED_PORTS["proxy"] = int(sys.argv[1])
print(up.choose_port("proxy", None, "127.0.0.1"), flush=True)
sys.stdin.read()
"""


def test_a_port_that_another_house_will_listen_at_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setitem(up.PREFERRED_PORTS, "proxy", port)
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == f"{port}\n"
        assert up.choose_port("proxy", None, "127.0.0.1") not in (port, up.PREFERRED_PORTS["nats"])
        with pytest.raises(ConfigError, match=f"port {port} is taken"):
            up.choose_port("proxy", port, "127.0.0.1")
        other.stdin.close()
    assert up.choose_port("proxy", port, "127.0.0.1") == port


def test_a_port_that_is_listened_at_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setitem(up.PREFERRED_PORTS, "ingest", port)
        assert up.choose_port("ingest", None, "127.0.0.1") != port
        with pytest.raises(ConfigError):
            up.choose_port("ingest", port, "127.0.0.1")
