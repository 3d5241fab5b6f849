"""The engine's process: `polar run-service engine`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import uvicorn
from pydantic_settings import CliApp

from polar_common.logs import configure
from polar_common.service import die_with_parent, tell_ready
from polar_engine.host import EngineHost
from polar_engine.server import create_app
from polar_engine.settings import EngineSettings

__all__ = ["run", "serve"]


def run(argv: Sequence[str] = ()) -> None:
    """Serve until SIGTERM or SIGINT. `argv` are options named like the settings, e.g. `["--model", "tiny"]`.

    Raises ConfigError where the model can't be found, built or loaded.
    """
    settings = CliApp.run(EngineSettings, cli_args=list(argv))
    die_with_parent()
    configure("engine", settings.log_level)
    host = _load(settings)
    try:
        asyncio.run(serve(host))
    finally:
        host.scheduler.close()


def _load(settings: EngineSettings) -> EngineHost:
    if settings.script:
        from polar_engine.scripted import load_scripted

        return load_scripted(settings)
    # Imported here: it needs torch, which a bare installation lacks.
    from polar_engine.loading import load_engine

    return load_engine(settings)


async def serve(host: EngineHost) -> None:
    """Bind, tell the ready file, and answer until the server is told to stop."""
    settings = host.settings
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((settings.host, settings.port))
        config = uvicorn.Config(
            create_app(host), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        port = int(sock.getsockname()[1])
        # Listening before the file is told, so that whoever reads it can connect at once.
        sock.listen(config.backlog)
        tell_ready(settings.ready_file, port=port, model=host.served.name)
        await server.serve([sock])
