"""One Docker container: made, started again after a kill, watched, removed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

from docker.errors import NotFound
from docker.types import Mount as BindMount

from polar_common.errors import ConfigError, RuntimeFault, RuntimeUnavailable
from polar_runtime import archive, cgroup
from polar_runtime.base import Mount, Resource, RuntimeSpec, RuntimeStats
from polar_runtime.docker_api import ATTEMPT, ROOT, Daemon, removal
from polar_runtime.docker_image import check_places, copy_out, given_to, user_of
from polar_runtime.door import Door
from polar_runtime.loopdisk import LoopDisk
from polar_runtime.portable import PortablePython
from polar_runtime.sampler import Sampler, disk_usage
from polar_runtime.starting import Starting

__all__ = ["HOME", "Container"]

HOME = "/home/agent"
# The first process, a relay with its threads and a courier aren't the task's.
_SPARE_PIDS = 24


class Container:
    """Used by one `DockerRuntime`. Every call may raise what `Daemon.call` raises."""

    def __init__(self, daemon: Daemon, spec: RuntimeSpec, starting: Starting, disk: LoopDisk | None = None) -> None:
        self._daemon = daemon
        self._spec = spec
        self._starting = starting
        self._disk = disk
        self._id = ""
        self._asked = False
        self._running = False
        self._waking = asyncio.Lock()
        self._upper: Path | None = None
        self._user = spec.user
        self._volumes: list[Path] = []
        self._volumes_held = 0
        self._stats = RuntimeStats()
        self._cpu_before = 0.0
        self.group: cgroup.Cgroup | None = None

    async def create(self, python: PortablePython, door: Door) -> None:
        """Make and start it. `RuntimeUnavailable` without the image, `ConfigError` for one that can't run here.

        Where commands run as root, its first process makes what is needed and answers at the `door`: the daemon's own
        way takes a tenth of a second.
        """
        if not self._spec.image:
            raise ConfigError("the docker runtime needs an image", "runtime.image")
        user = self._user = self._spec.user or await user_of(self._daemon, self._spec)
        answers = _is_root(user)
        if answers:
            await door.listen()
        try:
            self._id = await self._make(self._options(python, door if answers else None))
            if self._disk is not None:
                await self._fill_disk()
            if not answers:
                await self._make_places(user, python)
            await self.awake()
            if answers and not await door.answered():
                await self._make_places(user, python)
                if door.is_anothers:
                    await self._give_to_root()
        except NotFound as error:
            raise RuntimeUnavailable(f"Docker: {error.explanation}") from error
        self._starting.check()

    async def _make(self, options: dict[str, Any]) -> str:
        self._asked = True
        return await self._starting.step(self._daemon.call(lambda client: str(client.containers.create(**options).id)))

    async def _fill_disk(self) -> None:
        """With the image's own working directory, which the disk hides. Held in a file: it may be large."""
        assert self._disk is not None
        bare = {"image": self._spec.image, "entrypoint": ["-"], "command": ["-"], "network_mode": "none"}
        copied = await self._make({**bare, "labels": self._labels()})
        await check_places(self._daemon, self._spec, copied, self._places())
        with tempfile.TemporaryFile(dir=self._spec.root) as spool:
            there = await self._copy_out(copied, spool)
            await self._daemon.call(lambda client: client.api.remove_container(copied, force=True, v=True))
            if there:
                await self._put_workdir(spool)

    async def _give_to_root(self) -> None:
        """The working directory with all below it: without capabilities he can't write what is another user's."""
        root = self._spec.root
        with tempfile.TemporaryFile(dir=root) as spool, tempfile.TemporaryFile(dir=root) as given:
            if await self._copy_out(self._id, spool):
                await asyncio.to_thread(given_to, 0, spool, given)
                await self._put_workdir(given)

    async def _copy_out(self, container: str, spool: IO[bytes]) -> bool:
        return await self._starting.step(copy_out(self._daemon, self._spec, container, spool))

    async def _put_workdir(self, spool: IO[bytes]) -> None:
        parent = str(PurePosixPath(self._spec.workdir).parent)
        try:
            await self._daemon.call(lambda client: client.api.put_archive(self._id, parent, spool))
        except RuntimeFault as error:
            if self._disk is None or not self._disk.full():
                raise
            image = f"{self._spec.workdir} of {self._spec.image!r}"
            raise ConfigError(f"{image} doesn't fit into the disk limit", "runtime.disk_mb") from error

    def _places(self) -> list[str]:
        return [self._spec.workdir, HOME, "/tmp"]

    async def _make_places(self, user: str, python: PortablePython) -> None:
        """HOME, `/tmp` and the working directory, owned by the user who runs commands."""
        if self._disk is None:
            await check_places(self._daemon, self._spec, self._id, self._places())
        uid, gid = await self._numbers(user, python)
        modes = {HOME: 0o700, "/tmp": 0o1777, self._spec.workdir: 0o755}
        places = [archive.Entry(path.lstrip("/"), mode) for path, mode in modes.items()]
        tar = archive.to_tar(places, uid=uid, gid=gid)
        await self._daemon.call(lambda client: client.api.put_archive(self._id, "/", tar))

    async def _numbers(self, user: str, python: PortablePython) -> tuple[int, int]:
        uid, _, gid = (user or "0").partition(":")
        if uid.isdigit() and (gid.isdigit() or not gid):
            return int(uid), int(gid or uid)
        # A name: only the image's own passwd knows its number.
        out = bytearray()
        exec_id = await self.prepare([*python.argv, python.courier, "whoami"], {}, stdin=False)
        await self._daemon.attach(exec_id, None, lambda _stream, data: out.extend(data))
        try:
            first, second = map(int, bytes(out).split())
        except ValueError as error:
            raise ConfigError(
                f"no user {user!r}: {bytes(out).decode(errors='replace')[:300]}", "runtime.user"
            ) from error
        return first, second

    def _options(self, python: PortablePython, door: Door | None) -> dict[str, Any]:
        spec, limits = self._spec, self._spec.limits
        mounts = [*python.mounts, *spec.mounts]
        first = [*python.argv, python.relay, "--idle"]
        if door is not None:
            mounts.append(Mount(door.directory, door.inside))
            first = [*python.argv, python.courier, "door", door.socket, HOME, spec.workdir, "--", *first]
        if spec.proxy_socket is not None and spec.network != "none":
            mounts.append(Mount(spec.proxy_socket.absolute().parent, "/polar/proxy"))
        kept = [c.strip() for c in spec.options.get("capabilities", "").split(",") if c.strip()]
        options: dict[str, Any] = {
            "image": spec.image,
            "entrypoint": first[:1],
            "command": first[1:],
            "user": "0:0",
            "labels": self._labels(),
            "hostname": "polar",
            "network_mode": "bridge" if spec.network == "host" else "none",
            "mem_limit": limits.memory_mb << 20,
            "memswap_limit": limits.memory_mb << 20,
            "pids_limit": limits.pids + _SPARE_PIDS,
            "cap_drop": ["ALL"],
            "cap_add": kept,
            "security_opt": ["no-new-privileges"],
            "mounts": [*self._writable(), *(_bind(m.target, m.source, read_only=True) for m in mounts)],
            "log_config": {"Type": "none"},
            "healthcheck": {"test": ["NONE"]},
            "working_dir": "/",
        }
        if limits.cpus:
            options["nano_cpus"] = int(limits.cpus * 1e9)
        return options

    def _labels(self) -> dict[str, str]:
        return {ATTEMPT: self._spec.label, ROOT: str(self._spec.root.absolute())}

    def _writable(self) -> list[BindMount]:
        """The directories of the attempt's own disk."""
        if self._disk is None:
            return []
        places = {self._spec.workdir: "work", HOME: "home", "/tmp": "tmp"}
        return [_bind(target, self._disk.directory(name), read_only=False) for target, name in places.items()]

    async def awake(self) -> None:
        """Start it unless it runs."""
        async with self._waking:
            if self._running:
                return

            def work(client: Any) -> dict[str, Any]:
                client.api.start(self._id)
                found: dict[str, Any] = client.api.inspect_container(self._id)
                return found

            try:
                found = await self._daemon.call(work)
            except NotFound as error:
                raise RuntimeFault("the container is gone") from error
            except RuntimeFault as error:
                raise RuntimeUnavailable(f"the container doesn't start: {error}") from error
            self._running = True
            self.group = cgroup.of_process(int(found["State"]["Pid"])) if found["State"]["Pid"] else None
            upper = (found.get("GraphDriver", {}).get("Data") or {}).get("UpperDir")
            self._upper = Path(upper) if upper and os.access(upper, os.R_OK) else None
            await self._find_volumes(found)

    async def _find_volumes(self, found: dict[str, Any]) -> None:
        """The image's own volumes lie beside what is written over it; what they hold at first is the image's."""
        mounted = [Path(m["Source"]) for m in found.get("Mounts", []) if m.get("Type") == "volume"]
        volumes = [path for path in mounted if os.access(path, os.R_OK)]
        if volumes and not self._volumes:
            self._volumes_held = await disk_usage(volumes)
        self._volumes = volumes

    async def prepare(self, argv: Sequence[str], env: Mapping[str, str], *, stdin: bool) -> str:
        """Make an exec, waking the container; one that died meanwhile is started once more. Returns its id."""
        for again in (False, True):
            await self.awake()

            def work(client: Any) -> str:
                made = client.api.exec_create(
                    self._id, list(argv), stdin=stdin, environment=dict(env), user=self._user, workdir="/"
                )
                return str(made["Id"])

            try:
                return await self._daemon.call(work)
            except NotFound as error:
                raise RuntimeFault("the container is gone") from error
            except RuntimeFault:
                if again:
                    raise
                self._running = False
        raise AssertionError("unreachable")

    async def run(self, argv: Sequence[str]) -> None:
        """A command of our own, to its end; what it says isn't looked at."""
        exec_id = await self.prepare(argv, {}, stdin=False)
        await self._daemon.attach(exec_id, None, lambda _stream, _data: None)

    async def exit_code(self, exec_id: str) -> int:
        """An ended exec's code; 137 where its container was killed under it."""
        for pause in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0):
            try:
                found = await self._daemon.call(lambda client: client.api.exec_inspect(exec_id))
            except (NotFound, RuntimeFault) as error:
                if isinstance(error, RuntimeUnavailable):
                    raise
                return 137
            if not found["Running"] and found["ExitCode"] is not None:
                return int(found["ExitCode"])
            if not self._running:
                return 137
            await asyncio.sleep(pause)
        return 137

    def events(self) -> tuple[int, int]:
        """How often the kernel has killed for memory and refused a fork so far."""
        return self.group.exhausted() if self.group else (0, 0)

    async def exhausted(self, before: tuple[int, int]) -> Resource:
        """The limit that was hit since `before`."""
        if self._disk is not None and self._disk.full():
            return "disk"
        if self.group and (which := self.group.which(before)):
            return which
        with contextlib.suppress(NotFound, RuntimeFault):
            found = await self._daemon.call(lambda client: client.api.inspect_container(self._id))
            if found["State"].get("OOMKilled"):
                return "memory"
            if not found["State"].get("Running"):
                self._running = False
        return ""

    async def disk(self) -> int:
        """Bytes written over the image and on the attempt's own disk."""
        own = self._disk.used() if self._disk is not None else 0
        if self._volumes:
            own += max(0, await disk_usage(self._volumes) - self._volumes_held)
        return own + await self._written()

    async def _written(self) -> int:
        if self._upper is not None:
            return await disk_usage([self._upper])

        def work(client: Any) -> int:
            found = client.api.containers(all=True, size=True, filters={"id": self._id})
            return int(found[0].get("SizeRw") or 0) if found else 0

        with contextlib.suppress(NotFound, RuntimeFault):
            return await self._daemon.call(work)
        return 0

    def members(self, most: int = 1 << 22) -> list[int]:
        """Its processes, where this host shows them."""
        return self.group.pids()[:most] if self.group else []

    async def kill(self) -> None:
        """SIGKILL to everything in it; returns when it has ended."""
        if not self._id or not self._running:
            return
        self._measure()
        self._cpu_before = self._stats.cpu_s
        self._running = False

        def work(client: Any) -> None:
            client.api.kill(self._id)
            client.api.wait(self._id, timeout=30)

        with contextlib.suppress(NotFound, RuntimeFault):
            await self._daemon.call(work)
        self.group = None

    async def remove(self) -> None:
        """Kill and remove it, whatever state it is in, once its start is broken off.

        By its label: the daemon may have made more than it said before it died.
        """
        self._measure()
        self._running = False
        if self._asked:
            await self._daemon.call(removal(self._spec.label, self._spec.root))

    def add(self, sampler: Sampler) -> None:
        """Take over what a sampler saw."""
        self._stats = RuntimeStats(
            max(self._stats.peak_rss, sampler.peak_rss),
            max(self._stats.cpu_s, self._cpu_before + sampler.cpu_s),
            max(self._stats.peak_procs, sampler.peak_procs),
            sampler.peers_with(self._stats.peers),
        )
        self._measure()

    def _measure(self) -> None:
        if self.group is not None:
            self._stats = replace(
                self._stats,
                peak_rss=max(self._stats.peak_rss, self.group.peak_memory()),
                cpu_s=max(self._stats.cpu_s, self._cpu_before + self.group.cpu_s()),
                peak_procs=max(self._stats.peak_procs, self.group.peak_pids()),
            )

    def stats(self) -> RuntimeStats:
        """Peaks and sums so far."""
        return self._stats


def _is_root(user: str) -> bool:
    return all(part in ("", "0", "root") for part in user.split(":"))


def _bind(target: str, source: Path, *, read_only: bool) -> BindMount:
    return BindMount(target, str(source), type="bind", read_only=read_only)
