"""INIT: from a task to a runtime in which the harness can be launched."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

import orjson

from polar_common.errors import ConfigError, PolarError, RuntimeFault, RuntimeUnavailable
from polar_common.events import SessionQueued
from polar_common.keys import SessionKey, sign
from polar_common.task_spec import RuntimeChoice
from polar_common.tasks import spawn
from polar_runtime import Limits, Mount, Runtime, RuntimeSpec, RuntimeStats

from .domain import Deadlines
from .harnesses import toolchain
from .harnesses.base import TOOLCHAIN, Harness, Launch, LaunchContext
from .house import House
from .settings import GatewaySettings

__all__ = ["Preparation", "Prepared", "place_files", "session_key"]

_START_S = 60.0
_DAEMON_PAUSE_S = 1.0


def session_key(settings: GatewaySettings, queued: SessionQueued, deadlines: Deadlines) -> str:
    """The key that the attempt's harness shows the proxy. Raises ConfigError without a secret."""
    secret = settings.secret.get_secret_value().encode()
    if not secret:
        raise ConfigError("no secret to sign session keys with; `polar up` makes one", "secret")
    spec = queued.spec
    key = SessionKey(
        session=queued.session,
        task=queued.task,
        run=queued.run,
        attempt=queued.attempt,
        model=spec.model,
        expires=int(deadlines.attempt.timestamp() + settings.gateway_key_grace_s) + 1,
        calls=spec.limits.calls,
        max_tokens_per_call=spec.limits.max_tokens_per_call,
        total_tokens=spec.limits.total_tokens,
        sampling=spec.sampling,
    )
    return sign(key, secret)


async def place_files(runtime: Runtime, launch: Launch) -> None:
    """Put a launch's files and folders in their places. Raises ConfigError for a folder that isn't one."""
    await runtime.upload({path: text.encode() for path, text in launch.files.items()})
    for place, folder in launch.folders.items():
        try:
            files = await runtime.download([folder])
        except RuntimeUnavailable:
            raise
        except RuntimeFault as error:
            raise ConfigError(f"{folder}: {error}", "harness.args.skills") from error
        inside = {str(PurePosixPath(path).relative_to(folder)): content for path, content in files.items()}
        if "SKILL.md" not in inside:
            raise ConfigError(f"{folder} holds no SKILL.md", "harness.args.skills")
        await runtime.upload({f"{place}/{path}": content for path, content in inside.items()})


@dataclass(frozen=True, slots=True)
class Prepared:
    """A runtime with everything in place."""

    harness: Harness
    launch: Launch
    config_hash: str


class Preparation:
    """The steps of INIT. `runtime` is there as soon as it has to be stopped."""

    def __init__(self, house: House, queued: SessionQueued, label: str, key: str) -> None:
        self._house = house
        self._queued = queued
        self._label = label
        self._key = key
        self.runtime: Runtime | None = None
        self._starting: asyncio.Task[Exception | None] | None = None

    async def run(self) -> Prepared:
        """Raises ConfigError, HarnessError or a RuntimeFault, see `domain.blame_init`."""
        spec = self._queued.spec
        harness = self._house.find_harness(spec.harness.name)
        mounts = toolchain.mounts(await self._house.toolchain(harness))
        runtime = await self._started(self._runtime_spec(mounts))
        await self._upload_files(runtime)
        for step in spec.runtime.prepare:
            await runtime.check(["/bin/sh", "-c", step.exec], timeout=step.timeout_s)
        context = self._context(runtime, mounts)
        launch = self._launch(harness, context)
        await place_files(runtime, launch)
        await runtime.snapshot()
        return Prepared(harness, launch, self._config_hash(harness, context))

    async def stop(self) -> RuntimeStats:
        """Stop and remove the runtime, if there is one; any number of times. Raises RuntimeFault."""
        runtime = self.runtime
        if runtime is None:
            return RuntimeStats()
        if self._starting is not None:
            await asyncio.wait({self._starting}, timeout=_START_S)
        await runtime.stop()
        return await runtime.stats()

    async def _started(self, spec: RuntimeSpec) -> Runtime:
        """A running runtime; a daemon that restarts is waited for."""
        patience = self._house.patience
        until = patience.until()
        while True:
            try:
                # What a daemon made before it died can be removed when it is back.
                await self.stop()
                self.runtime = runtime = self._house.make_runtime(spec)
                await self._start(runtime)
                break
            except RuntimeUnavailable as error:
                if spec.kind != "docker" or error.cause != "daemon" or time.monotonic() > until:
                    raise
            await asyncio.sleep(_DAEMON_PAUSE_S)
        if spec.kind == "docker":
            patience.heard()
        return runtime

    async def _start(self, runtime: Runtime) -> None:
        # A start that is cut off half-way may go on in a thread and leave what nobody stops.
        self._starting = spawn(_error_of(runtime.start()), name=f"start:{self._label}")
        error = await asyncio.shield(self._starting)
        if error is not None:
            raise error

    def _runtime_spec(self, mounts: tuple[Mount, ...]) -> RuntimeSpec:
        settings, choice = self._house.settings, self._queued.spec.runtime
        return RuntimeSpec(
            kind=choice.kind,
            label=self._label,
            root=settings.root,
            image=choice.image,
            env=choice.env,
            limits=_limits(settings, choice),
            network="host" if choice.network else "proxy",
            mounts=mounts,
            proxy_socket=settings.proxy_socket,
            proxy_url=settings.gateway_proxy_url,
            isolation=settings.gateway_isolation,
            options={"disk": settings.gateway_disk} if choice.kind == "docker" else {},
        )

    async def _upload_files(self, runtime: Runtime) -> None:
        if self._queued.files is None:
            return
        body = await self._house.blobs.get(self._queued.files)
        try:
            await runtime.upload(body)
        except RuntimeUnavailable:
            raise
        except RuntimeFault as error:
            raise ConfigError(str(error), "files") from error

    def _context(self, runtime: Runtime, mounts: tuple[Mount, ...]) -> LaunchContext:
        settings, spec = self._house.settings, self._queued.spec
        return LaunchContext(
            instruction=spec.instruction,
            workdir=runtime.workdir,
            home=runtime.home,
            base_url=runtime.base_url(self._key),
            api_key=self._key,
            model=spec.model,
            context_window=settings.gateway_context_window,
            max_tokens_per_call=spec.limits.max_tokens_per_call or settings.gateway_max_tokens_per_call,
            args=spec.harness.args,
            toolchain=runtime.inside(mounts[0]) if mounts else TOOLCHAIN,
            call_timeout_s=settings.gateway_call_timeout_s,
        )

    def _launch(self, harness: Harness, context: LaunchContext) -> Launch:
        name = self._queued.spec.harness.name
        try:
            launch = harness.launch(context)
        except PolarError:
            raise
        except (Exception, SystemExit) as error:
            # A user's own adapter may raise anything, as a script does that ends itself; that is the harness's failure,
            # not the gateway's.
            raise ConfigError(f"{name}: launch() raised {error!r}", "harness.name") from error
        if wrong := _unlaunchable(launch):
            raise ConfigError(f"{name}: launch() returned {wrong}", "harness.name")
        return launch

    def _config_hash(self, harness: Harness, context: LaunchContext) -> str:
        """The same for every session of a task, wherever it runs: of a launch with nobody's key and places."""
        base, home = "http://polar/s/KEY", "/home/agent"
        common = replace(context, base_url=base, api_key="KEY", workdir="/workspace", home=home, toolchain=TOOLCHAIN)
        launch = self._launch(harness, common)
        parts = [launch.argv, dict(launch.env), dict(launch.files), dict(launch.folders)]
        return hashlib.sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _unlaunchable(launch: object) -> str:
    """What an adapter returned where it should have been a `Launch` of texts; empty for a good one."""
    if not isinstance(launch, Launch):
        return f"a {type(launch).__name__} and not a Launch"
    if not isinstance(launch.argv, tuple | list) or not launch.argv or not all(isinstance(a, str) for a in launch.argv):
        return f"an argv that isn't a sequence of texts: {launch.argv!r}"
    for field in ("env", "files", "folders"):
        value = getattr(launch, field)
        if not isinstance(value, Mapping) or not all(isinstance(x, str) for pair in value.items() for x in pair):
            return f"{field} that don't map texts to texts"
    if not isinstance(launch.cwd, str) or not isinstance(launch.stdin, bytes | None):
        return "a cwd that isn't a text, or a stdin that isn't bytes"
    return ""


async def _error_of(work: Awaitable[None]) -> Exception | None:
    try:
        await work
    except Exception as error:
        return error
    return None


def _limits(settings: GatewaySettings, choice: RuntimeChoice) -> Limits:
    return Limits(
        memory_mb=choice.memory_mb or settings.gateway_memory_mb,
        pids=choice.pids or settings.gateway_pids,
        cpus=choice.cpus or 0.0,
        disk_mb=choice.disk_mb or settings.gateway_disk_mb,
        log_mb=settings.gateway_log_mb,
    )
