"""`polar up`: the whole house on this machine, in one foreground process that supervises the rest."""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import httpx
import orjson

from polar_common.errors import ConfigError
from polar_common.nats_server import free_port
from polar_common.permissions import SERVICES
from polar_common.settings import inherited_environment, known_settings
from polar_common.topology import ACK_WAIT_S, Topology

from .layout import House, HouseFile, nats_secret, process_started
from .log_server import start_log
from .supervisor import Child, Supervisor, reap

__all__ = ["ENGINE_KINDS", "PREFERRED_PORTS", "UpOptions", "check_options", "run_house"]

ENGINE_KINDS = ("vllm", "sglang", "vllm_chat")
"""The proxy's kinds of engines."""
PREFERRED_PORTS = {"ingest": 8700, "proxy": 8701, "analytics": 8702, "engine": 8703, "nats": 8704}


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What a user may choose. `ports`: explicit ones must be free; others are only preferred."""

    data: Path
    model: str = "smollm2-135m"
    engine_url: str = ""
    """An engine of the user's own (vLLM, SGLang); empty starts the local one."""
    engine_kind: str = "vllm"
    tokenizer: str = ""
    """Directory of the tokenizer and chat template, where the engine isn't ours."""
    ports: dict[str, int] = field(default_factory=dict)
    host: str = "127.0.0.1"
    sync: str = "always"
    work_classes: tuple[str, ...] = ("local", "docker")
    gateway_slots: int = 2
    engine_threads: int = 1
    lease_s: float = ACK_WAIT_S
    """How long work stays with a process that has died. Short leases recover sooner and bear less of a stall."""
    env: dict[str, str] = field(default_factory=dict)
    """Further settings (`POLAR_…`) for all services."""


def check_options(options: UpOptions) -> None:
    """Raises ConfigError, by option, for what can be told to be wrong before anything is started."""
    known = known_settings()
    for name in options.env:
        if name.upper() not in known:
            near = difflib.get_close_matches(name.upper(), known, 1, 0)
            raise ConfigError(f"there is no setting {name!r}; the nearest is {near[0]}", "--setting")
    if options.engine_kind not in ENGINE_KINDS:
        raise ConfigError(f"must be one of {', '.join(ENGINE_KINDS)}, not {options.engine_kind!r}", "--engine-kind")
    if not re.fullmatch(r"always|(\d+(\.\d+)?(ms|s|m|h))+", options.sync):
        raise ConfigError(f"must be always or an interval such as 2m, not {options.sync!r}", "--sync")
    if options.tokenizer and not Path(options.tokenizer).is_dir():
        raise ConfigError(f"{options.tokenizer} is no directory", "--tokenizer")
    if options.engine_url:
        if urlsplit(options.engine_url).scheme not in ("http", "https"):
            raise ConfigError(f"must begin with http:// or https://, not {options.engine_url!r}", "--engine-url")
        if not (options.tokenizer or "POLAR_PROXY_MODEL_DIR" in inherited_environment() | options.env):
            what = "name the directory with the tokenizer and the chat template of the engine's model"
            raise ConfigError(what, "--tokenizer")


def choose_port(name: str, wanted: int | None, host: str) -> int:
    """An explicit port must be free (ConfigError otherwise); the preferred one is taken if it is."""
    port = wanted or PREFERRED_PORTS[name]
    while not _claim(port, host):
        if wanted is not None:
            raise ConfigError(f"port {port} is taken; choose another with --{name}-port", name)
        port = free_port(host)
    return port


_claims: list[socket.socket] = []


def _claim(port: int, host: str) -> bool:
    """Whether the port is free, and this house's from now on: its part may come to listen a minute later, when the
    model is loaded, and another house on this machine must have chosen differently by then. An abstract socket is seen
    where the port is, and goes with the process."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
        claim.bind(f"\0polar-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


class _Lock:
    """One house per data directory."""

    def __init__(self, house: House) -> None:
        self._file: IO[str] = house.lock.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            running = house.read()
            who = f" (pid {running.pid}, {running.ingest})" if running else ""
            raise ConfigError(f"a house already runs on {house.data}{who}: see `polar status`", "up") from error


def run_house(options: UpOptions, say: Callable[[str], None]) -> None:
    """Start everything, tell when it's ready, supervise until SIGTERM or SIGINT, stop everything.

    Raises ConfigError, with one line of what to do, if it can't start.
    """
    house = House(options.data)
    house.make()
    lock = _Lock(house)
    for name in reap(house.run):
        say(f"ended a leftover {name}")
    supervisor = Supervisor(house.run, inherited_environment() | _common_env(house, options))

    def on_signal(*_: object) -> None:
        supervisor.stopping = True

    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, on_signal)
    try:
        content = _Starter(house, options, supervisor, say).start()
        house.write(content)
        say(f"ready: ingest {content.ingest}  proxy {content.proxy}  dashboard {content.analytics}")
        while not supervisor.stopping:
            for line in supervisor.watch():
                say(line)
            time.sleep(0.2)
        say("stopping")
    finally:
        house.forget()
        supervisor.stop()
        lock._file.close()


def _common_env(house: House, options: UpOptions) -> dict[str, str]:
    return {
        "POLAR_DATA": str(house.data),
        "POLAR_SECRET": house.secret("session-keys"),
        "POLAR_TOKEN": house.secret("token"),
        "POLAR_WORK_CLASSES": "[" + ",".join(f'"{c}"' for c in options.work_classes) + "]",
        "PYTHONUNBUFFERED": "1",
    }


class _Starter:
    """Starts the parts of a house in order; knows their ports and settings."""

    def __init__(self, house: House, options: UpOptions, supervisor: Supervisor, say: Callable[[str], None]) -> None:
        self._house = house
        self._options = options
        self._supervisor = supervisor
        self._say = say
        explicit_first = sorted(PREFERRED_PORTS, key=lambda n: options.ports.get(n) is None)
        self._ports = {n: choose_port(n, options.ports.get(n), options.host) for n in explicit_first}
        self._nats = f"nats://127.0.0.1:{self._ports['nats']}"
        self._topology = Topology(work_classes=options.work_classes, lease_s=options.lease_s)

    def start(self) -> HouseFile:
        """Everything, ready. Raises ConfigError naming the part that isn't."""
        options = self._options
        topology, segments = start_log(self._house, self._supervisor, self._ports["nats"], options.sync, self._topology)
        self._topology = topology
        others = [s for s in segments if s != topology.segment]
        self._say("log ready" + (f", segment {topology.segment} (also: {', '.join(others)})" if others else ""))
        # These need nothing but the log, so they start beside the engine, which takes longest.
        early = [
            self._service("ingest", POLAR_PORT=str(self._ports["ingest"])),
            self._service("reconstructor"),
            self._service("evaluator"),
        ]
        engine_url, model_dir = self._engine()
        self._wait(*early, *self._around_the_engine(engine_url, model_dir))
        return self._told(engine_url)

    def _service(self, name: str, **env: str) -> Child:
        ready = self._house.run / f"{name}.ready.json"
        argv = [sys.executable, "-m", "polar_common.cli", "run-service", name]
        settings = {"POLAR_READY_FILE": str(ready), "POLAR_HOST": self._options.host, "POLAR_NATS": self._nats}
        settings |= {"POLAR_SEGMENT": self._topology.segment} | env | self._options.env
        if name in SERVICES:
            settings |= {"POLAR_NATS_USER": name, "POLAR_NATS_PASSWORD": self._house.secret(nats_secret(name))}
        timeout_s = 600 if name == "engine" else 120
        log = self._house.logs / f"{name}.log"
        return self._supervisor.spawn(Child(name, argv, log, settings, ready, start_timeout_s=timeout_s))

    def _wait(self, *children: Child) -> None:
        for child in children:
            self._supervisor.wait(child)
            self._say(f"{child.name} ready")

    def _engine(self) -> tuple[str, str]:
        """URL and model directory of the user's engine, or of a local one that is started."""
        options = self._options
        if options.engine_url:
            return options.engine_url, options.tokenizer
        engine = self._service(
            "engine",
            POLAR_ENGINE_PORT=str(self._ports["engine"]),
            POLAR_ENGINE_HOST="127.0.0.1",
            POLAR_ENGINE_READY_FILE=str(self._house.run / "engine.ready.json"),
            POLAR_ENGINE_MODEL=options.model,
            POLAR_ENGINE_THREADS=str(options.engine_threads),
        )
        self._say(f"loading {options.model}")
        self._wait(engine)
        url = f"http://127.0.0.1:{(engine.facts() or {})['port']}"
        return url, options.tokenizer or str(_model_card(url)["root"])

    def _around_the_engine(self, engine_url: str, model_dir: str) -> list[Child]:
        options, house = self._options, self._house
        socket_path = str(_socket_path(house))
        return [
            self._service(
                "proxy",
                POLAR_PORT=str(self._ports["proxy"]),
                POLAR_PROXY_ENGINES=f'["{engine_url}"]',
                POLAR_PROXY_ENGINE_KIND=options.engine_kind,
                POLAR_PROXY_SOCKET=socket_path,
                **({"POLAR_PROXY_MODEL_DIR": model_dir} if model_dir else {}),
            ),
            self._service(
                "analytics",
                POLAR_PORT=str(self._ports["analytics"]),
                POLAR_ANALYTICS_CHDB=str(house.chdb),
                **({"POLAR_ANALYTICS_MODEL_DIR": model_dir} if model_dir else {}),
            ),
            self._service(
                "gateway",
                POLAR_GATEWAY_PROXY_URL=f"http://127.0.0.1:{self._ports['proxy']}",
                POLAR_GATEWAY_PROXY_SOCKET=socket_path,
                POLAR_GATEWAY_ENGINES=orjson.dumps([urlsplit(engine_url).netloc]).decode(),
                POLAR_GATEWAY_CLASSES=orjson.dumps(options.work_classes).decode(),
                POLAR_GATEWAY_SLOTS=str(options.gateway_slots),
                # A session that waits in READY spends its own time: few, where a slot is held for minutes.
                POLAR_GATEWAY_READY=str(max(1, options.gateway_slots // 2)),
                POLAR_GATEWAY_INIT_SLOTS="2",
                POLAR_GATEWAY_CONTEXT_WINDOW=str(_model_card(engine_url).get("max_model_len") or 32_768),
            ),
        ]

    def _told(self, engine_url: str) -> HouseFile:
        at = {n: f"http://{self._options.host}:{self._ports[n]}" for n in ("ingest", "proxy", "analytics")}
        return HouseFile(
            pid=os.getpid(),
            started=process_started(os.getpid()),
            nats=self._nats,
            nats_users=True,
            segment=self._topology.segment,
            engine=engine_url,
            model=self._options.model,
            **at,
        )


def _model_card(engine_url: str) -> dict[str, Any]:
    """The engine's first model: `root` is where it lies, `max_model_len` its window in tokens."""
    try:
        card: dict[str, Any] = httpx.get(f"{engine_url}/v1/models", timeout=10).json()["data"][0]
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"{engine_url}/v1/models doesn't list a model: {error!r}", "engine-url") from error
    return card


def _socket_path(house: House) -> Path:
    """The proxy's Unix socket, alone in its directory. A long data path is left: socket names hold 107 bytes."""
    path = house.run / "proxy" / "proxy.sock"
    if len(str(path)) > 100:
        digest = hashlib.sha256(str(house.data).encode()).hexdigest()[:16]
        path = Path(tempfile.gettempdir()) / f"polar-{digest}" / "proxy.sock"
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    if path.parent.stat().st_uid not in (os.geteuid(), house.run.stat().st_uid):
        # Anybody may make directories there, and would hear all model calls.
        raise ConfigError(f"{path.parent} is another user's: choose a shorter --data", "data")
    return path
