"""Attempts as Docker containers: any image, no network but the proxy's Unix socket, whole-container kill.

The container's first process does nothing; commands are execs, each run by the relay. Relay and courier bring their own
Python (`portable.py`), so the image needs nothing but what the task itself needs. Commands of one container may leave
background processes behind for the next; a timeout, a cancel, an exhausted limit or a caller that goes away kills the
container, and the next call starts it again: files stay, processes don't.

All capabilities are dropped and privileges can't be regained. Options: `capabilities` (a comma list to keep, for
prepare steps that install packages), `docker_host`, `pull` = `never`, `disk` = `loop`: working directory, HOME and
`/tmp` are on a disk of the limit's size (`loopdisk.py`). Otherwise, and for all other places, what is written over the
image is looked at again and again, and an attempt beyond the limit is ended: later by as much as it writes meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from polar_common.errors import ResourceExhausted, RuntimeFault, RuntimeUnavailable
from polar_common.tasks import cancel_and_wait, spawn
from polar_runtime import ledger
from polar_runtime.base import (
    RELAY_PORT,
    ExecResult,
    OnOutput,
    Resource,
    RuntimeSpec,
    RuntimeStats,
    check_proxy_socket,
    checked_argv,
    checked_env,
)
from polar_runtime.beneath import remove_tree
from polar_runtime.container import HOME, Container
from polar_runtime.couriered import CourieredRuntime
from polar_runtime.docker_api import daemon
from polar_runtime.door import Door
from polar_runtime.loopdisk import LoopDisk
from polar_runtime.output import Output
from polar_runtime.peers import Peers
from polar_runtime.portable import PortablePython, portable_python
from polar_runtime.sampler import Sampler
from polar_runtime.starting import Starting

__all__ = ["DockerRuntime"]

_COURIER_LIMIT = 8192
_SIGNAL_S = 5.0


class DockerRuntime(CourieredRuntime):
    """See the module."""

    def __init__(self, spec: RuntimeSpec) -> None:
        super().__init__(spec)
        self._daemon = daemon(spec.options.get("docker_host", ""))
        self._dir = spec.root.absolute() / spec.label
        self._disk = LoopDisk(self._dir, spec.limits.disk_mb) if spec.options.get("disk") == "loop" else None
        self._starting = Starting(spec.label)
        self._container = Container(self._daemon, spec, self._starting, self._disk)
        self._door = Door(self._dir / "door")
        self._made = False
        self._state = "new"
        self._stopping = asyncio.Lock()

    @property
    def workdir(self) -> str:
        return self.spec.workdir

    @property
    def home(self) -> str:
        return HOME

    @property
    def proxy_base(self) -> str:
        proxied = self.spec.proxy_socket is not None and self.spec.network != "none"
        return f"http://127.0.0.1:{RELAY_PORT}" if proxied else ""

    @property
    def isolation(self) -> str:
        return "docker"

    async def start(self) -> None:
        if self._state != "new":
            raise RuntimeFault(f"{self.spec.label} was already started")
        if self.spec.proxy_socket is not None:
            check_proxy_socket(self.spec.proxy_socket)
        self._state = "started"
        try:
            await self._start()
        except BaseException as error:
            was_stopped = self._state != "started"
            with contextlib.suppress(RuntimeUnavailable):
                await asyncio.shield(self.stop())
            if was_stopped and isinstance(error, Exception):
                raise RuntimeFault(f"{self.spec.label} was stopped while it started") from error
            raise

    async def _start(self) -> None:
        try:
            await self._starting.step(asyncio.to_thread(self._make_dir))
        except FileExistsError as error:
            raise RuntimeFault(f"{self._dir} exists: the attempt ran before and wasn't reaped") from error
        if self._disk is not None:
            await self._starting.step(asyncio.to_thread(self._disk.make))
        python = await self._starting.step(asyncio.to_thread(portable_python))
        await self._container.create(python, self._door)

    def _make_dir(self) -> None:
        self._dir.mkdir(parents=True, mode=0o700)
        self._made = True
        ledger.Ledger(self._dir).write(self.spec.label, "docker", docker_host=self._daemon.host)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        on_output: OnOutput | None = None,
        stdin: bytes | None = None,
        proxy: bool = False,
    ) -> ExecResult:
        self._check_started()
        await self._door.close()
        output = Output(on_output, int(self.spec.limits.log_mb * (1 << 20)))
        line = self._relay(checked_argv(argv), cwd or self.workdir, proxy)
        began = time.monotonic()
        exec_id = await self._container.prepare(line, self._environment(env), stdin=stdin is not None)
        before = self._container.events()
        peers = Peers() if proxy and self.spec.network == "host" else None
        sampler = Sampler(self._container, self.spec.limits, self._container.group, self._container.disk, peers)
        watch = spawn(sampler.run(), name="sampler")
        stream = spawn(self._daemon.attach(exec_id, stdin, output.feed), name="exec")
        try:
            timed_out = await self._attend(stream, timeout)
            code = await self._container.exit_code(exec_id)
        except BaseException:
            await asyncio.shield(self._container.kill())
            raise
        finally:
            await cancel_and_wait(watch, stream)
            self._container.add(sampler)
        exhausted: Resource = sampler.exhausted or await self._container.exhausted(before)
        if timed_out or exhausted:
            await self._container.kill()
        duration = time.monotonic() - began
        return ExecResult(code, timed_out, output.tail, output.bytes, duration, output.stdout, exhausted)

    async def _attend(self, stream: asyncio.Task[None], timeout: float | None) -> bool:
        """Wait for the end of the output, and bring it about at the timeout; whether that was needed."""
        done, _ = await asyncio.wait([stream], timeout=timeout)
        if not done:
            # The grace begins when the signal has arrived: on a busy host a command takes long to start.
            signalled = self._container.run([*self._python.argv, self._python.relay, "--signal-all", "15"])
            with contextlib.suppress(RuntimeFault, TimeoutError):
                await asyncio.wait_for(signalled, _SIGNAL_S)
            ended, _ = await asyncio.wait([stream], timeout=self.spec.limits.grace_s)
            if not ended:
                await self._container.kill()
                await asyncio.wait([stream], timeout=5)
        if stream.done():
            stream.result()
        return not done

    @property
    def _python(self) -> PortablePython:
        return portable_python()

    def _relay(self, argv: list[str], cwd: str, proxy: bool) -> list[str]:
        python, spec = self._python, self.spec
        line = [*python.argv, python.relay, "--own-pipes", "--grace", str(spec.limits.grace_s), "--chdir", cwd]
        line += ["--limit", "core=0", "--limit", f"fsize={spec.limits.disk_mb << 20}"]
        if proxy and self.proxy_base and spec.proxy_socket is not None:
            line += ["--listen", str(RELAY_PORT), "--socket", f"/polar/proxy/{spec.proxy_socket.name}"]
        return [*line, "--", *argv]

    def _environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        base = {"HOME": HOME, "TMPDIR": "/tmp", "LANG": "C.UTF-8", "TERM": "dumb"}
        return {**base, **self.spec.env, **checked_env(env or {}), ledger.VARIABLE: self.spec.host_name}

    async def _courier(self, args: Sequence[str], stdin: bytes, sink: Callable[[bytes], None]) -> tuple[int, str]:
        self._check_started()
        if self._door.is_open:
            before = self._container.events()
            code, text = await self._door.ask(args, stdin, sink)
            if not self._door.is_open:
                # Nothing of the task has run yet, so no agent brought it about.
                if which := await self._container.exhausted(before):
                    raise ResourceExhausted(f"{which} limit reached", which)
                raise RuntimeUnavailable(f"the container was ended from outside ({code})")
            return code, text
        python = self._python
        error = bytearray()

        def feed(stream: str, data: bytes) -> None:
            if stream == "stdout":
                sink(data)
            else:
                error.extend(data[: _COURIER_LIMIT - len(error)])

        exec_id = await self._container.prepare([*python.argv, python.courier, *args], {}, stdin=True)
        await self._daemon.attach(exec_id, stdin, feed)
        return await self._container.exit_code(exec_id), error.decode(errors="replace")

    def _check_started(self) -> None:
        if self._state != "started":
            raise RuntimeFault(f"{self.spec.label} isn't running")

    async def cancel(self) -> None:
        if self._state == "started":
            await self._container.kill()

    async def stop(self) -> None:
        if self._state == "new":
            self._state = "stopped"
        async with self._stopping:
            if self._state == "stopped":
                return
            self._state = "stopping"
            await self._starting.break_off()
            await self._container.remove()
            await self._door.close()
            if self._made:
                await asyncio.to_thread(self._clear)
            self._state = "stopped"

    def _clear(self) -> None:
        if self._disk is not None:
            self._disk.remove()
        remove_tree(self._dir)

    async def stats(self) -> RuntimeStats:
        return self._container.stats()

    def _git_dir(self) -> Path:
        return self._dir / "git"
