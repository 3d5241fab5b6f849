"""What the runtime contract suite runs against: one case per variant, and a proxy of its own on a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from polar_runtime import ExecResult, Limits, Runtime, RuntimeSpec, make_runtime

LIMITS = Limits(memory_mb=256, pids=64, disk_mb=64, log_mb=1.0, grace_s=0.5)


@dataclass
class Case:
    """One variant. `fetch(url)` is a command that prints a URL's body and fails where it can't be reached."""

    name: str
    kind: str
    root: Path
    fetch: Callable[[str], list[str]]
    isolation: str = "auto"
    image: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    isolated: bool = True
    serial: int = 0

    def spec(self, **changes: object) -> RuntimeSpec:
        self.serial += 1
        base = RuntimeSpec(
            self.kind,
            f"s{self.serial}.1",
            self.root,
            image=self.image,
            limits=LIMITS,
            network="none",
            isolation=self.isolation,  # type: ignore[arg-type]
            options=self.options,
        )
        return replace(base, **changes)  # type: ignore[arg-type]

    @contextlib.asynccontextmanager
    async def runtime(self, **changes: object) -> AsyncIterator[Runtime]:
        made = make_runtime(self.spec(**changes))
        await made.start()
        try:
            yield made
        finally:
            await made.stop()


async def sh(runtime: Runtime, script: str, *args: str, **kwargs: object) -> ExecResult:
    """Run a shell script; `args` are its positional parameters."""
    return await runtime.exec(["/bin/sh", "-c", script, "sh", *args], **kwargs)  # type: ignore[arg-type]


async def size_of(runtime: Runtime, path: str) -> int:
    return len((await runtime.download([path])).get(path, b""))


async def begun(runtime: Runtime, path: str) -> bool:
    """Whether a file gets a content in time."""

    async def has_content() -> bool:
        return await size_of(runtime, path) > 0

    return await soon(has_content, 20)


async def stands_still(runtime: Runtime, path: str) -> bool:
    """Whether a file that a process keeps appending to has stopped growing; it must have begun."""
    before = await size_of(runtime, path)
    await asyncio.sleep(0.5)
    return before > 0 and await size_of(runtime, path) == before


HEARTBEAT = "while :; do echo x >> {0}; sleep 0.05; done"


@dataclass
class Unix:
    """A tiny HTTP server on a Unix socket in a directory of its own; counts connections that the client closed."""

    path: Path
    seen: list[bytes] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self) -> asyncio.Server:
        self.path.parent.mkdir(exist_ok=True)
        self.path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self.answer, self.path)
        os.chmod(self.path, 0o666)
        return server

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            self.seen.append(await reader.readuntil(b"\r\n\r\n"))
            if b"/hang" in self.seen[-1]:
                await reader.read()
                self.closed.set()
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nproxy")
                await writer.drain()
        writer.close()


async def soon(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 5.0) -> bool:
    """Whether the condition becomes true in time."""
    for _ in range(int(seconds / 0.05)):
        value = condition()
        if await value if isinstance(value, Awaitable) else value:
            return True
        await asyncio.sleep(0.05)
    return False
