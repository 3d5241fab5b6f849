"""`polar doctor` on Docker: what counts is a daemon that answers, not a command that is installed."""

from __future__ import annotations

import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from polar_common.cli.doctor import _docker


class Daemon(BaseHTTPRequestHandler):
    """Knows its version."""

    def do_GET(self) -> None:
        body = b'{"Version": "27.1"}' if self.path == "/version" else b"{}"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        pass


def test_a_daemon_that_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with socketserver.UnixStreamServer(str(path), Daemon) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            assert _docker() == ("docker", "ok", f"unix://{path}, version 27.1")
        finally:
            server.shutdown()
            thread.join()
    name, verdict, text = _docker()
    assert (name, verdict) == ("docker", "note") and "no daemon answers" in text and str(path) in text


@pytest.mark.parametrize(
    ("host", "told"),
    [("unix:///nowhere/docker.sock", "no daemon answers"), ("tcp://10.0.0.1:2375", "only a daemon on this machine")],
)
def test_where_none_answers_the_command_alone_is_no_comfort(
    host: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = tmp_path / "docker"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", host)
    _, verdict, text = _docker()
    assert verdict == "note" and told in text and host in text and "set DOCKER_HOST" in text
