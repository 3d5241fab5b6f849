"""A local engine inside the calling process, for tests and notebooks: real HTTP on a free port, on a thread of its own.

with engine_thread(model="tiny") as engine:
    httpx.post(engine.url + "/inference/v1/generate", json=...)
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from polar_engine.host import EngineHost
from polar_engine.server import create_app
from polar_engine.settings import EngineSettings

__all__ = ["EngineThread", "engine_thread"]


@dataclass(frozen=True)
class EngineThread:
    """A serving engine; `host` gives tests a look inside."""

    url: str
    host: EngineHost


@contextlib.contextmanager
def engine_thread(**settings: Any) -> Iterator[EngineThread]:
    """Load and serve an engine with these `EngineSettings` fields until the block is left. Needs torch."""
    from polar_engine.loading import load_engine

    host = load_engine(EngineSettings(**{"model": "tiny", **settings}))
    config = uvicorn.Config(create_app(host), port=0, log_level="warning", access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    sock = config.bind_socket()
    # Listening at once: whoever gets the URL may connect before the server's thread has come so far.
    sock.listen()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), name="engine-http")
    thread.start()
    try:
        yield EngineThread(f"http://127.0.0.1:{sock.getsockname()[1]}", host)
    finally:
        server.should_exit = True
        host.scheduler.close()
        thread.join()
        sock.close()
