"""Ports and socket of houses on a machine that they share."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from polar_common.errors import ConfigError
from polar_common.house import up
from polar_common.house.layout import House
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


def test_the_socket_of_a_long_path_is_never_in_another_users_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    house = House(tmp_path / ("long" * 30))
    house.make()
    place = up._socket_path(house).parent
    assert place.parent == tmp_path / "tmp" and up._socket_path(house).parent == place
    real = Path.stat

    def stat(path: Path, **options: Any) -> Any:
        told = real(path, **options)
        return os.stat_result((*told[:4], told.st_uid + 1, *told[5:])) if path == place else told

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(ConfigError, match="another user's"):
        up._socket_path(house)
