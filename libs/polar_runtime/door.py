"""The gateway's way to a container's files while nothing of the task has run in it: its first process answers.

Each command in a container costs its daemon a tenth of a second. So a container's first process connects to a socket
that is mounted into it and does the courier's work (`courier.py door`), until the first command: then the socket is
closed for good, for what an agent can reach answers nobody's questions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from polar_common.errors import ConfigError, RuntimeFault

__all__ = ["Door"]

_INSIDE = "/polar/door"
_NAME = "s"
_ANSWER_S = 10.0
_KILLED = 137


class Door:
    """For one container and its first start. `directory` is made, and mounted read-only at `inside`."""

    inside = _INSIDE
    socket = f"{_INSIDE}/{_NAME}"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._server: asyncio.Server | None = None
        self._caller: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = asyncio.Lock()
        self.is_anothers = False
        """Once it has `answered`: whether the working directory belongs to another user."""

    @property
    def is_open(self) -> bool:
        """Whether `ask` may be called."""
        return self._streams is not None

    async def listen(self) -> None:
        """Before the container starts."""
        self._caller = caller = asyncio.get_running_loop().create_future()

        def come_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if caller.done():
                writer.close()
            else:
                caller.set_result((reader, writer))

        async with self._lock:
            self.directory.mkdir(mode=0o755)
            self.directory.chmod(0o755)
            self._server = await asyncio.start_unix_server(come_in, sock=_bound(self.directory))

    async def answered(self) -> bool:
        """Whether the first process came and has made its places; where not, the door is closed. `ConfigError` where
        the image has something else in a place."""
        assert self._caller is not None
        said = b""
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await self._caller
                self._streams = reader, writer
                said = await reader.readline()
        except (TimeoutError, ConnectionError, ValueError):
            pass
        if said == b"ready\n":
            self._shut()
            return True
        await self.close()
        self.is_anothers = said == b"another's\n"
        if said.startswith(b"no "):
            raise ConfigError(said[3:-1].decode(errors="replace"), "runtime.image")
        return False

    async def ask(self, args: Sequence[str], stdin: bytes, sink: Callable[[bytes], None]) -> tuple[int, str]:
        """The courier's exit code and standard error; 137 where the container was killed meanwhile."""
        async with self._lock:
            if self._streams is None:
                raise RuntimeFault("the container's first process doesn't answer any more")
            reader, writer = self._streams
            try:
                writer.write(b"%s %d %s\n" % (args[0].encode(), len(stdin), os.fsencode(args[1])))
                writer.write(stdin)
                answer = await _answer(reader, sink)
                await writer.drain()
                return answer
            except (ConnectionError, asyncio.IncompleteReadError):
                self._drop()
                return _KILLED, ""
            except BaseException:
                self._drop()
                raise

    async def close(self) -> None:
        """For good; waits for a question under way."""
        async with self._lock:
            self._drop()

    def _drop(self) -> None:
        self._shut()
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    def _shut(self) -> None:
        """Let nobody else in."""
        if self._server is not None:
            self._server.close()
            self._server = None
            with contextlib.suppress(FileNotFoundError):
                (self.directory / _NAME).unlink()


def _bound(directory: Path) -> socket.socket:
    """By way of the directory's descriptor: a socket's path may have no more than 107 bytes."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        made.bind(f"/proc/self/fd/{fd}/{_NAME}")
        (directory / _NAME).chmod(0o666)
    except BaseException:
        made.close()
        raise
    finally:
        os.close(fd)
    return made


async def _answer(reader: asyncio.StreamReader, sink: Callable[[bytes], None]) -> tuple[int, str]:
    """Frames: a kind (`o`utput, `e`nd) and four bytes of length. An end is the exit code and what was said about it."""
    while True:
        head = await reader.readexactly(5)
        left = int.from_bytes(head[1:], "big")
        if head[:1] == b"e":
            end = await reader.readexactly(min(left, 8192))
            return end[0], end[1:].decode(errors="replace")
        while left:
            data = await reader.read(min(left, 65536))
            if not data:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(data)
            sink(data)
