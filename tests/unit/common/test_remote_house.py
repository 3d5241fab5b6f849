"""Commands on a house elsewhere: what they need to be told, and answers that aren't a house's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from polar_common.cli.ingest import Ingest
from polar_common.cli.query import ask
from polar_common.errors import ConfigError, PolarError
from polar_common.house import find_house


class Page(BaseHTTPRequestHandler):
    """Something in between that answers with a page."""

    def do_GET(self) -> None:
        self.send_response(502)
        self.send_header("content-length", "12")
        self.end_headers()
        self.wfile.write(b"<html></htm>")

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def page() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_what_isnt_told_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLAR_URL", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="POLAR_ANALYTICS_URL"):
        ask("SELECT 1")
    monkeypatch.delenv("POLAR_URL")
    monkeypatch.setenv("POLAR_NATS", "nats://127.0.0.1:9")
    with pytest.raises(ConfigError, match="POLAR_URL"):
        Ingest(find_house())


def test_an_answer_that_isnt_a_houses_is_shown(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLAR_URL", page)
    monkeypatch.setenv("POLAR_ANALYTICS_URL", page)
    with pytest.raises(PolarError, match="502 <html>"):
        ask("SELECT 1")
    with pytest.raises(PolarError, match="502 <html>"):
        Ingest(find_house()).get("/v1/runs/r")
