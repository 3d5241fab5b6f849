"""The Docker daemon: the SDK in a bounded pool of threads, and `exec` streams without a thread each.

The SDK blocks while an exec runs, and a thousand live sessions would need a thousand threads; so an exec's stream is
read by the event loop from a connection of its own, in the daemon's documented multiplexed framing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from polar_common.errors import ConfigError, RuntimeFault, RuntimeUnavailable
from polar_common.settings import docker_host
from polar_common.tasks import cancel_and_wait, spawn
from polar_runtime.base import Stream

__all__ = ["ATTEMPT", "ROOT", "Daemon", "daemon", "removal"]

ATTEMPT, ROOT = "polar.attempt", "polar.root"

T = TypeVar("T")
_THREADS = 16
_TIMEOUT_S = 60


@functools.cache
def daemon(host: str = "") -> Daemon:
    """The daemon at `host` (default: `DOCKER_HOST`, else the usual socket). One per process and address."""
    host = (host or docker_host()).removeprefix("http+")
    if not host.startswith("unix://"):
        raise ConfigError(
            f"directories are mounted, so the daemon must be this host's: unix://…, not {host}", "docker_host"
        )
    return Daemon(host)


class Daemon:
    """Calls fail with `RuntimeUnavailable` where the daemon doesn't answer, `RuntimeFault` where it refuses."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="docker")
        self._local = threading.local()

    async def call(self, work: Callable[[Any], T]) -> T:
        """Run `work(client)` in a thread. Raises the SDK's `NotFound` as it is."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.call_here, work)

    def call_here(self, work: Callable[[Any], T]) -> T:
        """`call`, blocking."""
        try:
            client = self._client()
            try:
                return work(client)
            finally:
                # The SDK keeps a pool of connections per URL, and every exec has a URL of its own.
                client.close()
        except (ImageNotFound, NotFound):
            raise
        except APIError as error:
            text = str(error.explanation or error)
            kind = RuntimeUnavailable if error.is_server_error() and "no such" not in text.lower() else RuntimeFault
            raise kind(f"Docker: {text[:500]}") from error
        except (DockerException, requests.RequestException, OSError) as error:
            raise RuntimeUnavailable(f"the Docker daemon at {self.host} doesn't answer: {error}") from error

    def _client(self) -> Any:
        client = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = docker.DockerClient(base_url=self.host, timeout=_TIMEOUT_S, version="auto")
        return client

    async def attach(self, exec_id: str, stdin: bytes | None, feed: Callable[[Stream, bytes], None]) -> None:
        """Start a prepared exec and pass on its output until it ends. The connection's loss ends it too."""
        try:
            reader, writer = await asyncio.open_unix_connection(self.host.removeprefix("unix://"))
        except OSError as error:
            raise RuntimeUnavailable(f"the Docker daemon at {self.host} doesn't answer: {error}") from error
        write: asyncio.Task[None] | None = None
        try:
            body = json.dumps({"Detach": False, "Tty": False}).encode()
            head = f"POST /exec/{exec_id}/start HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await _upgraded(reader)
            if stdin is not None:
                write = spawn(_send(writer, stdin), name="exec stdin")
            await _frames(reader, feed)
        finally:
            await cancel_and_wait(write)
            # Not `close`, which would wait for input to go in that nobody reads any more.
            writer.transport.abort()
            with contextlib.suppress(ConnectionError, BrokenPipeError):
                await writer.wait_closed()


def removal(label: str, root: Path) -> Callable[[Any], None]:
    """For `Daemon.call`: remove all containers of an attempt."""

    def work(client: Any) -> None:
        filters = {"label": [f"{ATTEMPT}={label}", f"{ROOT}={root.absolute()}"]}
        for found in client.api.containers(all=True, filters=filters):
            _remove(client, found["Id"])

    return work


def _remove(client: Any, container: str) -> None:
    """Gone when this returns, whoever removes it: the daemon refuses the second of two requests."""
    until = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            client.api.remove_container(container, force=True, v=True)
        except NotFound:
            return
        except APIError as error:
            if "already in progress" not in str(error.explanation) or time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return


async def _upgraded(reader: asyncio.StreamReader) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode(errors="replace")
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise RuntimeUnavailable("the Docker daemon broke off") from error
    status = head.split(" ", 2)[1]
    if status not in ("101", "200"):
        rest = (await reader.read(2000)).decode(errors="replace")
        raise RuntimeFault(f"Docker: exec answered {status}: {rest}")


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError, BrokenPipeError):
        writer.write(data)
        await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


async def _frames(reader: asyncio.StreamReader, feed: Callable[[Stream, bytes], None]) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readexactly(8)
            left = int.from_bytes(head[4:], "big")
            stream: Stream = "stderr" if head[0] == 2 else "stdout"
            while left:
                data = await reader.read(min(left, 65536))
                if not data:
                    return
                left -= len(data)
                feed(stream, data)
