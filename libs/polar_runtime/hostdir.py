"""Runtimes whose writable directories are directories of this host and whose commands are its processes.

Nothing runs between two `exec` calls: each is enclosed anew and ends with everything in it; the directories stay.
Inside, `relay.py` starts the command, and is the only way out: it joins 127.0.0.1:41417 with the proxy's Unix socket.

Limits: a control group where the host allows one (`cgroup.py`), else rlimits and a sampler that ends the attempt.
Disk: no file larger than the limit, and a sampler for their sum.
"""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from polar_common.errors import ConfigError, RuntimeFault, RuntimeUnavailable
from polar_common.tasks import cancel_and_wait, spawn
from polar_runtime import cgroup, ledger
from polar_runtime.base import (
    RELAY_PORT,
    ExecResult,
    Mount,
    OnOutput,
    Runtime,
    RuntimeSpec,
    RuntimeStats,
    check_proxy_socket,
    checked_argv,
    checked_env,
)
from polar_runtime.beneath import remove_tree
from polar_runtime.gitstore import Change, Node
from polar_runtime.handle import ProcessHandle
from polar_runtime.hostfiles import HostFiles
from polar_runtime.output import Output
from polar_runtime.peers import Peers
from polar_runtime.process import Ended, Process
from polar_runtime.sampler import Sampler, disk_usage
from polar_runtime.starting import Starting
from polar_runtime.status import SandboxStatus

__all__ = ["HOME", "RELAY", "HostDirRuntime"]

HOME = "/home/agent"
RELAY = Path(__file__).with_name("relay.py")
_ENTER = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo 0 > "$1" || exit 125; shift; n=$((n-1)); done; exec "$@"'


@dataclass(frozen=True, slots=True)
class _Places:
    """Host directories of one attempt."""

    base: Path

    @property
    def work(self) -> Path:
        return self.base / "work"

    @property
    def home(self) -> Path:
        return self.base / "home"

    @property
    def tmp(self) -> Path:
        return self.base / "tmp"

    @property
    def git(self) -> Path:
        return self.base / "git"

    @property
    def etc(self) -> Path:
        return self.base / "etc"


class HostDirRuntime(Runtime):
    """Subclasses say how a command line is enclosed. Options: `cgroup` = `off` to do without control groups."""

    kind: ClassVar[str]

    def __init__(self, spec: RuntimeSpec) -> None:
        super().__init__(spec)
        self._places = _Places(spec.root.absolute() / spec.label)
        self._ledger = ledger.Ledger(self._places.base)
        self._isolated = False
        self._port = 0
        self._group: cgroup.Cgroup | None = None
        self._running: set[ProcessHandle] = set()
        self._stats = RuntimeStats()
        self._starting = Starting(spec.label)
        self._made = False
        self._state = "new"

    @property
    def workdir(self) -> str:
        return self.spec.workdir if self._isolated else str(self._places.work)

    @property
    def home(self) -> str:
        return HOME if self._isolated else str(self._places.home)

    @property
    def proxy_base(self) -> str:
        if self.spec.network == "none":
            return ""
        return f"http://127.0.0.1:{self._port}" if self._port else self.spec.proxy_url

    def inside(self, mount: Mount) -> str:
        return mount.target if self._isolated else str(mount.source)

    async def start(self) -> None:
        if self._state != "new":
            raise RuntimeFault(f"{self.spec.label} was already started")
        self._state = "starting"
        try:
            self._isolated = await self._starting.step(asyncio.to_thread(self._can_enclose))
            self._port = self._relay_port()
            await self._starting.step(asyncio.to_thread(self._make_places))
        except BaseException as error:
            await asyncio.shield(self.stop())
            if isinstance(error, FileExistsError):
                raise RuntimeFault(f"{self._places.base} exists: the attempt ran before and wasn't reaped") from error
            if isinstance(error, OSError):
                raise RuntimeUnavailable(f"cannot make {self._places.base}: {error.strerror}") from error
            raise
        self._state = "started"

    def _relay_port(self) -> int:
        spec = self.spec
        if spec.network != "proxy" or spec.proxy_socket is None:
            if spec.network == "proxy" and self._isolated and spec.proxy_url:
                raise ConfigError("a sandbox reaches the proxy by its Unix socket only", "runtime.proxy_socket")
            return 0
        check_proxy_socket(spec.proxy_socket)
        if self._isolated:
            return RELAY_PORT
        return 0 if spec.proxy_url else _free_port()

    def _make_places(self) -> None:
        places = self._places
        places.base.mkdir(parents=True, mode=0o700)
        self._made = True
        for path in (places.work, places.home, places.tmp):
            path.mkdir()
        self._prepare_enclosure()
        found = cgroup.find() if self.spec.options.get("cgroup") != "off" else None
        group = None if found is None else cgroup.Cgroup(found, self.spec.host_name)
        self._ledger.write(self.spec.label, self.kind, groups=[str(p) for p in group.paths.values()] if group else [])
        if group is not None:
            try:
                group.create(self.spec.limits.memory_mb, self.spec.limits.pids, self.spec.limits.cpus)
                self._group = group
            except OSError:
                group.remove()

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
        if self._state != "started":
            raise RuntimeFault(f"{self.spec.label} isn't running")
        limits = self.spec.limits
        output = Output(on_output, int(limits.log_mb * (1 << 20)))
        inner = self._relay(checked_argv(argv), cwd or self.workdir, proxy)
        before = self._group.exhausted() if self._group else (0, 0)
        with SandboxStatus() as status:
            line = self._enclose(inner, status.write_fd) if self._isolated else inner
            started = await Process.start(
                self._entering(line),
                self._outer_environment(self._environment(env)),
                str(self._places.base),
                output,
                stdin=stdin is not None,
                pass_fds=[status.write_fd] if self._isolated else [],
            )
            status.close_write()
            handle = ProcessHandle(started.pid, self._relay_command()[0], self._isolated)
            places = [self._places.work, self._places.home, self._places.tmp]
            sampler = Sampler(handle, limits, self._group, lambda: disk_usage(places), self._peers(proxy))
            ended = await self._attend(started, handle, sampler, stdin, timeout)
            if self._isolated and self._was_not_set_up(status, ended.code, output.tail):
                raise RuntimeUnavailable(f"{self.isolation}: {output.tail.strip()[-500:]}")
        exhausted = sampler.exhausted or (self._group.which(before) if self._group else "")
        return ExecResult(
            ended.code, ended.timed_out, output.tail, output.bytes, ended.duration_s, output.stdout, exhausted
        )

    async def _attend(
        self, started: Process, handle: ProcessHandle, sampler: Sampler, stdin: bytes | None, timeout: float | None
    ) -> Ended:
        limits = self.spec.limits
        self._running.add(handle)
        self._ledger.running(handle.id)
        watch = spawn(sampler.run(), name="sampler")
        try:
            return await started.run(
                stdin=stdin, timeout=timeout, grace=limits.grace_s, terminate=handle.terminate, kill=handle.kill
            )
        finally:
            await cancel_and_wait(watch)
            self._running.discard(handle)
            self._ledger.ended(handle.id)
            self._add(sampler)

    def _add(self, sampler: Sampler) -> None:
        group = self._group
        self._stats = RuntimeStats(
            max(self._stats.peak_rss, group.peak_memory() if group else sampler.peak_rss),
            (group.cpu_s() if group else 0.0) or self._stats.cpu_s + sampler.cpu_s,
            max(self._stats.peak_procs, sampler.peak_procs, group.peak_pids() if group else 0),
            sampler.peers_with(self._stats.peers),
        )

    def _peers(self, proxy: bool) -> Peers | None:
        if not proxy or (self._isolated and self.spec.network != "host"):
            return None
        url = urlsplit(self.spec.proxy_url)
        return Peers(frozenset({f"{url.hostname}:{url.port}"} if url.hostname else ()))

    def _relay(self, argv: list[str], cwd: str, proxy: bool) -> list[str]:
        limits = self.spec.limits
        line = [*self._relay_command(), "--grace", str(limits.grace_s), "--chdir", cwd, "--limit", "core=0"]
        line += ["--limit", f"fsize={limits.disk_mb << 20}"]
        if self._group is None:
            line += ["--limit", f"data={limits.memory_mb << 21}"]
            line += ["--limit", f"nproc={limits.pids}"] if self._isolated else []
        if proxy and self._port and self.spec.proxy_socket is not None:
            path = f"/polar/proxy/{self.spec.proxy_socket.name}" if self._isolated else str(self.spec.proxy_socket)
            line += ["--listen", str(self._port), "--socket", path]
        return [*line, *([] if self._isolated else ["--adopt"]), "--", *argv]

    # What a subclass adds.

    @abstractmethod
    def _can_enclose(self) -> bool:
        """Whether commands will be enclosed. `RuntimeUnavailable` where they must be and can't. Blocking."""

    @abstractmethod
    def _prepare_enclosure(self) -> None:
        """Write what the enclosure needs beside the attempt's directories."""

    @abstractmethod
    def _relay_command(self) -> list[str]:
        """Python and relay, as seen inside."""

    @abstractmethod
    def _enclose(self, inner: list[str], status_fd: int) -> list[str]:
        """The host's command line that runs `inner` in the sandbox."""

    @abstractmethod
    def _was_not_set_up(self, status: SandboxStatus, code: int, tail: str) -> bool:
        """Whether the sandbox failed before the command began."""

    def _outer_environment(self, env: dict[str, str]) -> dict[str, str]:
        """The environment of the sandbox program that gives the command `env`."""
        return env

    def _read_only(self) -> list[Mount]:
        """The spec's mounts and the proxy's directory."""
        mounts = list(self.spec.mounts)
        if self.spec.network == "proxy" and self.spec.proxy_socket is not None:
            mounts.append(Mount(self.spec.proxy_socket.absolute().parent, "/polar/proxy"))
        return mounts

    def _writable(self) -> dict[str, Path]:
        places = self._places
        return {"/tmp": places.tmp, HOME: places.home, self.spec.workdir: places.work}

    def _entering(self, line: list[str]) -> list[str]:
        """Enter the control group before anything else happens; arguments are never parsed by the shell."""
        if self._group is None:
            return line
        files = self._group.entry_files()
        return ["/bin/sh", "-c", _ENTER, "sh", str(len(files)), *files, *line]

    def _environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        tmp = "/tmp" if self._isolated else str(self._places.tmp)
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        base = {"HOME": self.home, "PATH": path, "TMPDIR": tmp, "LANG": "C.UTF-8", "TERM": "dumb", "SHELL": "/bin/sh"}
        base |= {"USER": "agent", "LOGNAME": "agent", ledger.VARIABLE: self.spec.host_name}
        return {**base, **self.spec.env, **checked_env(env or {}), ledger.VARIABLE: self.spec.host_name}

    def _files(self) -> HostFiles:
        places = self._places
        tmp = "/tmp" if self._isolated else str(places.tmp)
        return HostFiles(
            {self.workdir: places.work, self.home: places.home, tmp: places.tmp}, self.spec.limits.disk_mb << 20
        )

    async def upload(self, data: bytes | Mapping[str, bytes], dest: str | None = None) -> None:
        await asyncio.to_thread(self._files().upload, data, dest or self.workdir)

    async def download(self, paths: Sequence[str], *, max_bytes: int = 64 << 20) -> dict[str, bytes]:
        return await asyncio.to_thread(self._files().download, paths, max_bytes)

    async def cancel(self) -> None:
        for handle in list(self._running):
            await handle.kill()

    async def stop(self) -> None:
        if self._state == "new":
            self._state = "stopped"
        if self._state == "stopped":
            return
        self._state = "stopping"
        await self._starting.break_off()
        for handle in list(self._running):
            await handle.end(self.spec.limits.grace_s)
        if self._made:
            await asyncio.to_thread(self._clear)
        self._state = "stopped"

    def _clear(self) -> None:
        if self._group is not None:
            self._group.kill()
            self._stats = replace(
                self._stats,
                peak_rss=max(self._stats.peak_rss, self._group.peak_memory()),
                cpu_s=max(self._stats.cpu_s, self._group.cpu_s()),
            )
            self._group.remove()
        elif not self._isolated:
            ledger.kill_named(self.spec.host_name)
        try:
            remove_tree(self._places.base)
        except OSError as error:
            raise RuntimeFault(str(error)) from error

    async def stats(self) -> RuntimeStats:
        return self._stats

    def _git_dir(self) -> Path:
        return self._places.git

    async def _tree(self) -> list[Node]:
        return await asyncio.to_thread(self._files().nodes)

    async def _apply(self, changes: Sequence[Change]) -> None:
        await asyncio.to_thread(self._files().apply, changes)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
