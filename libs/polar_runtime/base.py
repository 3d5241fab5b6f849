"""What a runtime is: an isolated place with a working directory in which commands of one attempt run.

Variants are one file each (`local.py`, `docker.py`, `apptainer.py`, or a user's own class) and pass one contract
suite. What they share is here: the values that go in and out, and patches, which are computed by `gitstore.py` in a
git directory that lies outside the working directory, so that nothing an agent does to its own repositories or ignore
rules hides a change.

The agent is not trusted. Nothing it wrote is executed, followed or parsed on the host but by code that expects the
worst; its commands run inside the isolation that `isolation` names.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from polar_common.errors import CommandFailed, ConfigError, RuntimeFault
from polar_runtime.gitstore import Change, GitStore, Node

__all__ = [
    "RELAY_PORT",
    "ExecResult",
    "Limits",
    "Mount",
    "OnOutput",
    "Runtime",
    "RuntimeSpec",
    "RuntimeStats",
    "Stream",
    "check_proxy_socket",
    "checked_argv",
    "checked_env",
    "host_name",
]

Stream = Literal["stdout", "stderr"]
OnOutput = Callable[[Stream, bytes], None]
Resource = Literal["", "memory", "pids", "disk"]

RELAY_PORT = 41417
_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one attempt may use, all of its processes together."""

    memory_mb: int = 2048
    pids: int = 512
    cpus: float = 0.0
    """Cores; 0 leaves it to the scheduler."""
    disk_mb: int = 4096
    """Writable directories together; also the size that no single file may exceed."""
    log_mb: float = 16.0
    """Output handed on per `exec`; the rest is counted and dropped."""
    grace_s: float = 2.0
    """Between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A host directory or file, read-only at `target` inside."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class RuntimeSpec:
    """All that is needed to make a runtime. `label` is `<session id>.<attempt>`; the reaper finds leftovers by it."""

    kind: str
    label: str
    root: Path
    """Host directory for this gateway's attempts; each gets a directory named by its label."""
    image: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = Limits()
    network: Literal["proxy", "none", "host"] = "proxy"
    """`proxy`: nothing but the model proxy; `none`: nothing at all; `host`: no restriction."""
    mounts: tuple[Mount, ...] = ()
    proxy_socket: Path | None = None
    """The proxy's Unix socket. Its *directory* is mounted, so that a restarted proxy is reached again: it must hold
    nothing else."""
    proxy_url: str = ""
    """The proxy's `http://host:port`, used where there is no isolation of the network."""
    workdir: str = "/workspace"
    user: str = ""
    """`uid[:gid]` inside, where the variant can choose; empty for its default."""
    isolation: Literal["auto", "bubblewrap", "none"] = "auto"
    options: Mapping[str, str] = field(default_factory=dict)
    """Passed to the variant as they are."""

    def __post_init__(self) -> None:
        if not _LABEL.fullmatch(self.label):
            raise ConfigError(f"not a usable label: {self.label!r}", "runtime.label")
        if not self.workdir.startswith("/") or ".." in self.workdir.split("/"):
            raise ConfigError(f"must be an absolute path: {self.workdir!r}", "runtime.workdir")
        checked_env(self.env, "runtime.env")

    @property
    def host_name(self) -> str:
        """The attempt's name on this host."""
        return host_name(self.root, self.label)


def host_name(root: Path, label: str) -> str:
    """An attempt's name among all of a host: houses whose tasks are called the same have the same labels."""
    return f"{label}-{hashlib.sha256(str(root.absolute()).encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended. `exit_code` is the command's own; 128 + n where signal n ended it, 127 where there is no
    such program, 126 where it can't be executed. A timeout keeps the code with which the killed command ended."""

    exit_code: int
    timed_out: bool
    output_tail: str
    """The last 8 KiB of both streams, as text."""
    output_bytes: int
    """All that the command wrote, kept or not."""
    duration_s: float
    stdout: bytes = b""
    """The first MiB of standard output."""
    exhausted: Resource = ""
    """The limit that ended the command or made its parts fail, where that is known."""


@dataclass(frozen=True, slots=True)
class RuntimeStats:
    """Over the whole life so far. `peak_rss` in bytes, `cpu_s` user and system, `peak_procs` processes at once."""

    peak_rss: int = 0
    cpu_s: float = 0.0
    peak_procs: int = 0
    peers: tuple[str, ...] = ()
    """`host:port` of whom commands run with `proxy` were seen connected to beside the proxy; always empty where the
    network is closed, and perhaps incomplete where it is open."""


class Runtime(ABC):
    """One attempt's sandbox. Life: `start`, any number of calls, `stop`. Calls other than `stop` and `cancel` are made
    one at a time, except that several `exec` may overlap.

    Raises `RuntimeUnavailable` where the host is at fault (no daemon, no image, no bubblewrap), `ConfigError` where the
    spec is, and `RuntimeFault` for everything else that keeps a call from doing its work. A command that ends with a
    non-zero code is a result, not an error.
    """

    def __init__(self, spec: RuntimeSpec) -> None:
        self.spec = spec

    # Where things are, as seen from inside; valid after `start`.

    @property
    @abstractmethod
    def workdir(self) -> str:
        """The working directory."""

    @property
    @abstractmethod
    def home(self) -> str:
        """HOME: empty at start, writable, outside the working directory and never part of a patch."""

    @property
    @abstractmethod
    def proxy_base(self) -> str:
        """`http://host:port` at which the proxy answers inside `exec(..., proxy=True)`; empty without a proxy."""

    @property
    @abstractmethod
    def isolation(self) -> str:
        """`bubblewrap`, `docker`, `apptainer`, `none`: what really separates the attempt from the host."""

    def base_url(self, key: str) -> str:
        """The model base URL of a session key, without `/v1`."""
        return f"{self.proxy_base}/s/{key}"

    def inside(self, mount: Mount) -> str:
        """Where a mount of the spec is seen from inside."""
        return mount.target

    # What it does.

    @abstractmethod
    async def start(self) -> None:
        """Create directories or container. After a failure everything is gone again."""

    @abstractmethod
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
        """Run a command to its end. No shell is involved: `argv` is passed as it is.

        `env` is added to the spec's; nothing of the gateway's own environment is inherited. `on_output` sees each
        piece as it arrives, up to the log limit. With `proxy` the relay listens at `proxy_base` while the command
        runs. At `timeout` seconds, or when the caller is cancelled, the whole process tree ends: SIGTERM, then SIGKILL
        after the grace. What the command left running in the background may end with it, and at the latest with `stop`.
        """

    @abstractmethod
    async def upload(self, data: bytes | Mapping[str, bytes], dest: str | None = None) -> None:
        """Write files below `dest` (default: the working directory): a tar archive, plain or gzip, or path → content.

        Absolute paths in a mapping must lie in the working directory, HOME or `/tmp`. An archive with absolute paths,
        `..`, devices, links that lead outside, or more than the disk limit is refused before anything is written;
        links that already lie in the way are replaced, never followed.
        """

    @abstractmethod
    async def download(self, paths: Sequence[str], *, max_bytes: int = 64 << 20) -> dict[str, bytes]:
        """Read regular files, relative to the working directory or absolute as in `upload`. A directory yields the
        files below it. What is missing or a link is left out; more than `max_bytes` in all raises `RuntimeFault`."""

    @abstractmethod
    async def cancel(self) -> None:
        """End every running `exec`; the files stay."""

    @abstractmethod
    async def stop(self) -> None:
        """End everything and remove everything. May be called at any time, any number of times, and leaks nothing."""

    @abstractmethod
    async def stats(self) -> RuntimeStats:
        """Peaks and sums so far; still answers after `stop`."""

    # Patches, the same for all.

    @abstractmethod
    def _git_dir(self) -> Path:
        """A host directory for the git objects, outside everything that the agent can write."""

    @abstractmethod
    async def _tree(self) -> list[Node]:
        """The working directory's files and links, `.git` directories left out."""

    @abstractmethod
    async def _apply(self, changes: Sequence[Change]) -> None:
        """Write and remove files in the working directory."""

    async def snapshot(self) -> str:
        """Record the working directory as the state against which `diff` compares; returns its tree id."""
        self._base = await self._write_tree()
        return self._base

    async def diff(self, base: str | None = None) -> bytes:
        """Binary git patch from `base` (default: the last snapshot) to now; empty where nothing changed.

        Contains untracked, ignored and committed files and links. Not representable and so left out: empty
        directories, sockets, pipes, devices, `.git` in whatever letters, links at or below `.gitmodules`.
        `ResourceExhausted` for more than 512 MiB of changed files, or a patch of more than 256 MiB.
        """
        base = base or self._base
        if not base:
            raise RuntimeFault("diff before snapshot")
        nodes = await self._tree()
        self._store().check_changed(nodes)
        now = await asyncio.to_thread(self._store().write, nodes)
        return await asyncio.to_thread(self._store().diff, base, now)

    async def apply_patch(self, patch: bytes) -> None:
        """Apply what `diff` made to this working directory. `CommandFailed` where it doesn't fit; then nothing is
        written."""
        if not patch.strip():
            return
        before = await self._write_tree()
        changes = await asyncio.to_thread(self._store().apply, before, patch)
        await self._apply(changes)

    _base = ""
    _git: GitStore | None = None

    def _store(self) -> GitStore:
        if self._git is None:
            self._git = GitStore(self._git_dir(), max_bytes=self.spec.limits.disk_mb << 20)
        return self._git

    async def _write_tree(self) -> str:
        nodes = await self._tree()
        return await asyncio.to_thread(self._store().write, nodes)

    async def check(self, argv: Sequence[str], **kwargs: object) -> ExecResult:
        """`exec` for prepare steps: a non-zero code or a timeout raises `CommandFailed` with the output's tail."""
        result = await self.exec(argv, **kwargs)  # type: ignore[arg-type]
        if result.exit_code or result.timed_out:
            code = result.exit_code or 124
            raise CommandFailed(" ".join(argv)[:200], code, result.output_tail[-2000:])
        return result

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()


def checked_argv(argv: Sequence[str]) -> list[str]:
    """The arguments as a list; `ConfigError` for what no command line can carry: nothing at all, NUL, 128 KiB."""
    if not argv or not argv[0]:
        raise ConfigError("no command", "argv")
    for i, arg in enumerate(argv):
        if "\0" in arg:
            raise ConfigError("contains a NUL byte", f"argv[{i}]")
        if len(arg.encode(errors="surrogateescape")) >= 131072:
            raise ConfigError("longer than the 128 KiB that Linux allows for one argument", f"argv[{i}]")
    return list(argv)


def check_proxy_socket(path: Path) -> None:
    """`ConfigError` unless the socket's directory exists and holds nothing but sockets: it is mounted as a whole."""
    parent = path.absolute().parent
    others = [p.name for p in parent.iterdir() if not p.is_socket()] if parent.is_dir() else ["no directory"]
    if others:
        raise ConfigError(f"{parent} must hold nothing but sockets, found: {', '.join(others[:3])}", "proxy_socket")


def checked_env(env: Mapping[str, str], where: str = "env") -> dict[str, str]:
    """The variables as a dict; `ConfigError` for names and values that no environment can carry."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise ConfigError(f"not a usable variable: {name!r}", where)
    return dict(env)
