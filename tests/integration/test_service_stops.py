"""A service tells when it is ready; told to stop while the log is away, it leaves in time, without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import own_nats

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]


@pytest.mark.parametrize("name", ["ingest", "reconstructor", "evaluator"])
def test_a_service_stops_quietly_while_the_log_is_away(tmp_path: Path, name: str) -> None:
    with own_nats() as server:
        env = os.environ | {"POLAR_NATS": server.url}
        subprocess.run([sys.executable, "-m", "polar_common.apply_topology"], env=env, check=True, timeout=60)
        ready = tmp_path / "ready.json"
        env |= {"POLAR_READY_FILE": str(ready), "POLAR_SECRET": "s" * 32}
        argv = [sys.executable, "-m", "polar_common.cli", "run-service", name, "--json"]
        with (tmp_path / "log").open("w+b") as log, (tmp_path / "told").open("w+b") as told:
            service = subprocess.Popen(argv, env=env, stdout=told, stderr=log)
            try:
                deadline = time.monotonic() + 60
                while not ready.exists() and time.monotonic() < deadline:
                    time.sleep(0.1)
                assert ready.exists(), (tmp_path / "log").read_text()
                server.stop("kill")
                time.sleep(0.5)
                service.send_signal(signal.SIGTERM)
                code = service.wait(30)
            finally:
                service.kill()
                service.wait()
            told.seek(0)
            assert told.read() == ready.read_bytes() + b"\n"
    text = (tmp_path / "log").read_text()
    assert "Traceback" not in text, text[-3000:]
    assert code == 0, text[-3000:]
