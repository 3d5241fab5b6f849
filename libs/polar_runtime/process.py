"""One host process, streamed and timed, ended for certain: the part of `exec` that isn't about isolation."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from polar_common.errors import RuntimeUnavailable
from polar_common.tasks import cancel_and_wait, spawn
from polar_runtime.base import Stream
from polar_runtime.output import Output

__all__ = ["Ended", "Process"]

_CHUNK = 65536
_DRAIN_S = 2.0
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Ended:
    """`code` as `ExecResult.exit_code`."""

    code: int
    timed_out: bool
    duration_s: float


class Process:
    """A started process. `terminate` and `kill` say how its whole tree is reached."""

    def __init__(self, process: asyncio.subprocess.Process, output: Output) -> None:
        self._process = process
        self._output = output
        self._started = time.monotonic()

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        output: Output,
        *,
        stdin: bool,
        pass_fds: Sequence[int] = (),
    ) -> Process:
        """Start in a session of its own. `RuntimeUnavailable` where the program isn't there."""
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=dict(env),
                cwd=cwd,
                stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )
        except OSError as error:
            raise RuntimeUnavailable(f"cannot start {argv[0]}: {error.strerror}") from error
        return cls(process, output)

    @property
    def pid(self) -> int:
        """On this host."""
        return self._process.pid

    async def run(
        self,
        *,
        stdin: bytes | None,
        timeout: float | None,
        grace: float,
        terminate: Callable[[], Awaitable[None]],
        kill: Callable[[], Awaitable[None]],
    ) -> Ended:
        """Wait for the end. At the timeout, when cancelled and when the output callback fails, the tree is ended."""
        pumps = [
            spawn(self._pump("stdout", self._process.stdout), name="stdout"),
            spawn(self._pump("stderr", self._process.stderr), name="stderr"),
        ]
        feed = spawn(self._feed(stdin), name="stdin") if stdin is not None else None
        timed_out = False
        try:
            if not await self._wait(timeout, pumps):
                timed_out = True
                await terminate()
                if not await self._wait(grace, pumps):
                    await kill()
                    await self._wait(_DRAIN_S, pumps)
            await self._drain(pumps, kill)
        except BaseException:
            await asyncio.shield(self._abandon(kill))
            raise
        finally:
            await cancel_and_wait(feed, *pumps)
            self._close()
        code = self._process.returncode
        code = 137 if code is None else code
        return Ended(128 - code if code < 0 else code, timed_out, time.monotonic() - self._started)

    async def _wait(self, timeout: float | None, pumps: list[asyncio.Task[None]]) -> bool:
        """Whether the process ended in time. Raises what a pump raised."""
        ended = spawn(self._process.wait(), name="wait")
        watched: set[asyncio.Task[object]] = {ended, *pumps}
        deadline = None if timeout is None else time.monotonic() + max(0.0, timeout)
        try:
            # `wait` may not return while a stranger holds the pipes; the return code is there all the same.
            while self._process.returncode is None:
                left = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
                if left <= 0:
                    return False
                done, watched = await asyncio.wait(watched, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {ended}:
                    task.result()
            return True
        finally:
            await cancel_and_wait(ended)

    async def _drain(self, pumps: list[asyncio.Task[None]], kill: Callable[[], Awaitable[None]]) -> None:
        """Read what is left. Whoever still holds the pipe after that isn't waited for."""
        _, pending = await asyncio.wait(pumps, timeout=_DRAIN_S)
        if pending:
            await kill()
            await asyncio.wait(pumps, timeout=_DRAIN_S)
        for task in pumps:
            if task.done() and not task.cancelled():
                task.result()

    async def _abandon(self, kill: Callable[[], Awaitable[None]]) -> None:
        if self._process.returncode is None:
            await kill()
            await self._wait(_DRAIN_S, [])

    async def _pump(self, stream: Stream, reader: asyncio.StreamReader | None) -> None:
        assert reader is not None
        while data := await reader.read(_CHUNK):
            self._output.feed(stream, data)

    async def _feed(self, data: bytes) -> None:
        writer = self._process.stdin
        assert writer is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            writer.write(data)
            await writer.drain()
        writer.close()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await writer.wait_closed()

    def _close(self) -> None:
        """Give back the pipes even where a stranger still holds their other end."""
        transport = getattr(self._process, "_transport", None)
        if transport is not None:
            transport.close()
